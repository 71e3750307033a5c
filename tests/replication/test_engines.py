"""The contract of engine.Engine, which all three engines keep: against real servers."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from engine_child import Child
from engine_servers import World, eventually, remove_by_hand
from linear import ABSENT, Op, is_linearizable
from patience import patient

from cometmq.actors.replication.engines import bells, watching
from cometmq.actors.replication.engines.engine import (
    RECORD_BYTES_MAX,
    Applied,
    Engine,
    Holding,
    Refused,
    Session,
    Stored,
    View,
    Watch,
    now_s,
)
from cometmq.actors.replication.engines.errors import (
    EngineError,
    RecordTooLarge,
    SessionHeld,
)
from cometmq.protocol.errors import ArgumentIllegal, NameIllegal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

# What the line to the servers may be at fault with is asked of lines under TLS, of a user: all that
# lies below such a line is in use as well.
secured = pytest.mark.parametrize("world", ["sqlite", "etcd, secured"], indirect=True)


def applied(engine: Engine, group: str, expected: int | None, record: bytes) -> int:
    outcome = engine.cas(group, expected, record)
    assert isinstance(outcome, Applied), outcome
    return outcome.version


def is_held(session: Session) -> bool:
    """A machine that is busy may renew late, and then it is in doubt for a moment."""
    return bool(eventually(lambda: session.holding is Holding.HELD and session.left_s() > 0))


def held(child: Child) -> Any:
    """What the child's session says, once it is held."""

    def ask() -> Any:
        said = child.ask(do="holding")
        return said if said["holding"] == "HELD" and said["left"] > 0 else None

    return eventually(ask)


def until(watch: Watch, seen: Callable[[View], bool], limit_s: float = patient(60.0)) -> View:
    """Woken by the watch's descriptor alone, until it shows that."""
    poller = select.poll()
    poller.register(watch.fileno(), select.POLLIN)
    end = time.monotonic() + limit_s
    while True:
        view = watch.take()
        if view is not None and seen(view):
            return view
        assert poller.poll(max(0.0, end - time.monotonic()) * 1000), f"it shows {view}"


# --- records --------------------------------------------------------------------------------------


def test_a_record_comes_changes_and_goes(engine: Engine, group: str) -> None:
    assert engine.get(group) is None
    first = applied(engine, group, None, b"first")
    assert engine.get(group) == Stored(b"first", first)
    assert engine.cas(group, None, b"again") == Refused(Stored(b"first", first))
    second = applied(engine, group, first, b"second")
    assert second > first > 0
    assert engine.cas(group, first, b"late") == Refused(Stored(b"second", second))
    assert engine.delete(group, first) == Refused(Stored(b"second", second))
    assert isinstance(engine.delete(group, second), Applied)
    assert engine.get(group) is None
    assert engine.cas(group, second, b"late") == Refused(None)
    assert engine.delete(group, second) == Refused(None)


def test_versions_grow_over_a_deletion(engine: Engine, group: str) -> None:
    seen = [applied(engine, group, None, b"0")]
    for number in range(4):
        outcome = engine.delete(group, seen[-1])
        assert isinstance(outcome, Applied)
        again = applied(engine, group, None, b"again")
        assert again > outcome.version >= seen[-1]
        for old in seen:
            assert engine.cas(group, old, b"old") == Refused(Stored(b"again", again))
        seen += [again, applied(engine, group, again, b"%d" % number)]
    assert seen == sorted(set(seen))


def test_versions_grow_where_somebody_deletes_by_hand(
    world: World, engine: Engine, group: str
) -> None:
    with world.open() as other:
        first = applied(engine, group, None, b"first")
        remove_by_hand(other, group)
        assert engine.cas(group, first, b"late") == Refused(None)
        second = applied(other, group, None, b"second")
        assert second > first
        assert engine.cas(group, first, b"late") == Refused(Stored(b"second", second))


@secured
@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES_MAX - 1, RECORD_BYTES_MAX])
def test_sizes(engine: Engine, group: str, size: int) -> None:
    record = random.Random(size).randbytes(size)
    version = applied(engine, group, None, record)
    assert engine.get(group) == Stored(record, version)


def test_what_no_call_takes(engine: Engine, group: str) -> None:
    with pytest.raises(RecordTooLarge, match="65537 bytes, at most 65536"):
        engine.cas(group, None, bytes(RECORD_BYTES_MAX + 1))
    for record in ("text", None, memoryview(b"x")):
        with pytest.raises(ArgumentIllegal):
            engine.cas(group, None, record)  # type: ignore[arg-type]
    for expected in (0, -1, 2**63, True, 1.0, "1"):
        with pytest.raises(ArgumentIllegal):
            engine.cas(group, expected, b"")  # type: ignore[arg-type]
    for name in ("", "a/b", "..", "a\0", "x" * 121, None):
        for call in (engine.get, engine.alive, engine.watch):
            with pytest.raises(NameIllegal):
                call(name)  # type: ignore[arg-type]
    for broker in (-1, 2**63, True, "1", 1.5):
        with pytest.raises(ArgumentIllegal):
            engine.open_session(group, broker, 2)  # type: ignore[arg-type]
    for ttl in (0, 0.49, 60.1, float("nan"), True, "2"):
        with pytest.raises(ArgumentIllegal):
            engine.open_session(group, 1, ttl)  # type: ignore[arg-type]
    assert engine.get(group) is None
    assert engine.alive(group) == frozenset()


def test_the_longest_name_and_the_largest_id(world: World, engine: Engine) -> None:
    group = "%|_-" + "x" * 116
    applied(engine, group, None, b"x")
    session = engine.open_session(group, 2**63 - 1, world.ttl_s)
    assert engine.alive(group) == {session.broker_id}


def test_a_thousand_groups(engine: Engine) -> None:
    names = [f"many-{number}" for number in range(1000)]
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda name: applied(engine, name, None, name.encode()), names))
        assert len(set(versions)) == 1000
        found = list(pool.map(engine.get, names))
    assert found == [
        Stored(name.encode(), version) for name, version in zip(names, versions, strict=True)
    ]


# --- many at once ---------------------------------------------------------------------------------


def test_of_many_one_wins(world: World, group: str) -> None:
    with ExitStack() as stack:
        handles = [stack.enter_context(world.open()) for _ in range(8)]
        pool = stack.enter_context(ThreadPoolExecutor(len(handles)))
        version: int | None = None
        for _ in range(5):
            together = threading.Barrier(len(handles))

            def run(number: int) -> Any:
                together.wait(patient(60))  # noqa: B023
                return handles[number].cas(group, version, b"%d" % number)  # noqa: B023

            outcomes = list(pool.map(run, range(len(handles))))
            (winner,) = [n for n, each in enumerate(outcomes) if isinstance(each, Applied)]
            version = outcomes[winner].version
            stored = Stored(b"%d" % winner, version)
            del outcomes[winner]
            assert outcomes == [Refused(stored)] * 7


@secured
def test_threads_of_one_handle(engine: Engine, group: str) -> None:
    version = applied(engine, group, None, b"0")

    def add(_: int) -> None:
        stored = engine.get(group)
        while True:
            assert stored is not None
            outcome = engine.cas(group, stored.version, b"%d" % (int(stored.record) + 1))
            if isinstance(outcome, Applied):
                return
            assert isinstance(outcome, Refused)
            stored = outcome.current

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(30)))
    stored = engine.get(group)
    assert stored is not None
    assert stored.record == b"30"
    assert stored.version > version


@secured
def test_processes_count_together(world: World, engine: Engine, group: str) -> None:
    with ExitStack() as stack:
        children = [stack.enter_context(world.child()) for _ in range(3)]
        for child in children:
            child.say(do="count", group=group, times=10)
        said = []
        for child in children:
            while "done" not in (answer := child.hear()):
                said.append(answer)
    assert sorted(answer["number"] for answer in said) == list(range(1, 31))
    by_number = sorted(said, key=lambda answer: answer["number"])
    versions = [answer["version"] for answer in by_number]
    assert versions == sorted(set(versions))
    assert engine.get(group) == Stored(b"30", versions[-1])


def test_the_register_is_linearizable(world: World, group: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    history: list[Op] = []
    versions: dict[int, str] = {}
    with ExitStack() as stack:
        handles = [stack.enter_context(world.open()) for _ in range(4)]
        pool = stack.enter_context(ThreadPoolExecutor(len(handles)))
        for each in pool.map(
            lambda number: one_client(handles[number], group, number, seed), range(len(handles))
        ):
            history += each[0]
            for version, record in each[1].items():
                assert versions.setdefault(version, record) == record
    assert len({record for record in versions.values()}) == len(versions)
    assert sum(op.kind == "applied" for op in history) > 10
    assert is_linearizable(history), f"seed {seed}: {history}"


def one_client(
    engine: Engine, group: str, number: int, seed: int
) -> tuple[list[Op], dict[int, str]]:
    """What it did, and which record has which version."""
    chance = random.Random(seed + number)
    known: Stored | None = None
    history: list[Op] = []
    versions: dict[int, str] = {}
    for step in range(30):
        began = time.monotonic()
        expected = known.record.decode() if known else ABSENT
        if chance.random() < 0.4:
            known = engine.get(group)
            record, kind = known.record.decode() if known else ABSENT, "get"
        else:
            record = f"{number}.{step}"
            outcome = engine.cas(group, known and known.version, record.encode())
            if isinstance(outcome, Applied):
                assert known is None or outcome.version > known.version
                known, kind = Stored(record.encode(), outcome.version), "applied"
            else:
                assert isinstance(outcome, Refused)
                current, kind = outcome.current, "refused"
                record = current.record.decode() if current else ABSENT
                if chance.random() < 0.8:  # else it goes on with what is old
                    known = current
        history.append(Op(kind, began, time.monotonic(), record, expected))
        if known:
            versions[known.version] = known.record.decode()
    return history, versions


def test_the_checker_sees_what_is_not_linearizable() -> None:
    write = Op("applied", 0, 1, "a")
    assert is_linearizable([write, Op("get", 2, 3, "a")])
    assert not is_linearizable([write, Op("get", 2, 3, ABSENT)])  # old
    assert is_linearizable([write, Op("get", 0.5, 3, ABSENT)])
    both = [write, Op("applied", 2, 3, "b", "a"), Op("applied", 2, 3, "c", "a")]
    assert not is_linearizable(both)  # two of one version
    assert not is_linearizable([write, Op("refused", 2, 3, "a", "a")])  # for no reason
    back = [write, Op("applied", 2, 3, "b", "a"), Op("get", 4, 5, "b"), Op("get", 6, 7, "a")]
    assert not is_linearizable(back)
    late = [write, Op("unknown", 2, 3, "b", "a"), Op("get", 4, 5, "a"), Op("get", 8, 9, "b")]
    assert is_linearizable(late)  # it came later
    assert is_linearizable(late[:3])  # or never
    twice = [*late, Op("applied", 10, 11, "c", "b"), Op("get", 12, 13, "b")]
    assert not is_linearizable(twice)


# --- sessions -------------------------------------------------------------------------------------


@secured
def test_sessions_come_and_go(world: World, engine: Engine, group: str) -> None:
    with world.open() as other:
        assert engine.alive(group) == frozenset()
        first = engine.open_session(group, 0, world.ttl_s)
        second = other.open_session(group, 12, world.ttl_s)
        assert first.ttl_s == second.ttl_s == world.ttl_s
        assert is_held(first)
        assert is_held(second)
        assert first.left_s() <= world.ttl_s
        for handle in (engine, other):
            assert handle.alive(group) == {0, 12}
            with pytest.raises(SessionHeld):
                handle.open_session(group, 12, world.ttl_s)
        second.close()
        second.close()
        assert second.holding is Holding.LOST
        assert second.left_s() == 0
        assert engine.alive(group) == {0}
        again = engine.open_session(group, 12, world.ttl_s)
        assert other.alive(group) == {0, 12}
        assert is_held(again)
        engine.close()
        assert other.alive(group) == frozenset()


def test_a_session_lives_as_long_as_its_process(world: World, engine: Engine, group: str) -> None:
    """Nobody is told of its end before its holder would have known."""
    watch = engine.watch(group)
    with world.child() as child:
        child.ask(do="session", group=group, broker=3, ttl=world.ttl_s)
        until(watch, lambda view: view.alive == {3})
        first = held(child)
        # It is renewed, also beyond its first time to live.
        eventually(lambda: held(child)["until"] > first["until"] + world.ttl_s)
        assert engine.alive(group) == {3}
        last = held(child)
        child.kill()
    until(watch, lambda view: not view.alive)
    assert now_s() >= last["until"]
    assert engine.alive(group) == frozenset()


@secured
def test_a_stopped_holder_learns_it_before_it_acts(
    world: World, engine: Engine, group: str
) -> None:
    watch = engine.watch(group)
    with world.child() as child:
        child.ask(do="session", group=group, broker=3, ttl=world.ttl_s)
        until(watch, lambda view: view.alive == {3})
        child.stop()
        child.say(do="holding")
        child.say(do="lost")
        until(watch, lambda view: not view.alive)
        mine = engine.open_session(group, 3, world.ttl_s)
        child.go_on()
        assert child.hear()["holding"] != "HELD"  # before anything came of its engine
        assert child.hear() == {"holding": "LOST"}
        assert is_held(mine)
        assert engine.alive(group) == {3}


# --- watches --------------------------------------------------------------------------------------


def test_a_watch_sees_the_last_change(world: World, engine: Engine, group: str) -> None:
    with world.open() as other:
        watch = other.watch(group)
        assert until(watch, lambda _: True).stored is None
        version: int | None = None
        for number in range(30):
            version = applied(engine, group, version, b"%d" % number)
        last = Stored(b"29", version or 0)
        assert until(watch, lambda view: view.stored == last).alive == frozenset()
        session = engine.open_session(group, 4, world.ttl_s)
        until(watch, lambda view: view.alive == {4})
        session.close()
        until(watch, lambda view: not view.alive)
        assert isinstance(engine.delete(group, last.version), Applied)
        until(watch, lambda view: view.stored is None)
        again = applied(engine, group, None, b"again")
        view = until(watch, lambda view: view.stored == Stored(b"again", again))
        eventually(lambda: watch.view and watch.view.at_s > view.at_s)
        assert watch.take() is not None
        watch.close()
        watch.close()
        applied(engine, group, again, b"unseen")


@secured
def test_notices_alone_suffice(
    world: World, engine: Engine, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look of its own now and then."""
    monkeypatch.setattr(watching, "CHECK_S", 3600)
    with world.open() as other:
        watch = other.watch(group)
        until(watch, lambda _: True)
        version: int | None = None
        for number in range(3):
            version = applied(engine, group, version, b"%d" % number)
            until(watch, lambda view: view.stored == Stored(b"%d" % number, version or 0))  # noqa: B023
        session = engine.open_session(group, 4, world.ttl_s)
        until(watch, lambda view: view.alive == {4})
        session.close()
        until(watch, lambda view: not view.alive)


def test_views_do_not_go_back(world: World, engine: Engine, group: str) -> None:
    with world.open() as other, ThreadPoolExecutor(1) as pool:
        watch, second = other.watch(group), other.watch(group)

        def change() -> int:
            version: int | None = None
            for number in range(40):
                version = applied(engine, group, version, b"%d" % number)
            return version or 0

        changing = pool.submit(change)
        seen: list[int] = []

        def is_last(view: View) -> bool:
            if view.stored:
                seen.append(view.stored.version)
            return changing.done() and seen[-1:] == [changing.result()]

        eventually(lambda: watch.take() and is_last(watch.take() or View(None, frozenset(), 0)))
        assert seen == sorted(seen)
        last = changing.result()
        until(second, lambda view: view.stored is not None and view.stored.version == last)


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
def test_a_change_that_nobody_tells_of_is_seen(
    engine: Engine, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was killed behind the commit. Servers tell of changes themselves."""
    watch = engine.watch(group)
    until(watch, lambda _: True)
    monkeypatch.setattr(bells.Bells, "ring", lambda *_: None)
    version = applied(engine, group, None, b"quiet")
    until(watch, lambda view: view.stored == Stored(b"quiet", version))


# --- handles --------------------------------------------------------------------------------------


@secured
def test_nothing_goes_through_a_fork(world: World, engine: Engine, group: str) -> None:
    with world.child() as child:
        child.ask(do="session", group=group, broker=1, ttl=world.ttl_s)
        said = child.ask(do="forked", group=group)["said"]
        assert len(said) == 10
        assert all(each.startswith("EngineError: ") for each in said), said
        assert all(each.endswith("open it after the fork") for each in said), said
        assert held(child)
        assert engine.alive(group) == {1}


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever is started is ended."""
    before = set(threading.enumerate())
    yield
    eventually(lambda: set(threading.enumerate()) <= before)


@secured
@pytest.mark.usefixtures("threads")
def test_a_closed_handle(world: World, group: str) -> None:
    engine = world.open()
    applied(engine, group, None, b"x")
    session, watch = engine.open_session(group, 1, world.ttl_s), engine.watch(group)
    until(watch, lambda view: view.alive == {1})
    engine.close()
    engine.close()
    assert session.holding is Holding.LOST
    assert watch.take() is not None
    for call in (
        lambda: engine.get(group), lambda: engine.cas(group, None, b""),
        lambda: engine.watch(group),
        lambda: engine.open_session(group, 1, 2), lambda: engine.alive(group),
        lambda: engine.delete(group, 1),
    ):  # fmt: skip
        with pytest.raises(EngineError, match="is closed"):
            call()
