"""What engines keep when servers, clients and power go away."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_child import Child
from engine_servers import World, eventually
from fault.disk import Disk, need, small_disk
from patience import patient
from ports import free_ports

from cometmq.actors.replication.engines.engine import (
    Applied,
    Engine,
    Holding,
    Refused,
    Stored,
    Unknown,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineUnreachable
from cometmq.actors.replication.engines.etcd import EtcdEngine
from cometmq.actors.replication.engines.opening import open_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

PACE_S = 0.005  # of who counts, between two changes
ELECTION_S = patient(60)  # at most, on a busy machine


class Counter:
    """Counts in a group by compare-and-set, in a thread, until it is told to end."""

    def __init__(self, world: World, group: str, timeout_s: float) -> None:
        self.applied: list[Stored] = []
        self.unknown: list[Unknown] = []
        self.over = threading.Event()
        self.failure: BaseException | None = None
        self._engine = world.open(timeout_s)
        self._group = group
        self._thread = threading.Thread(target=self._guard)
        self._thread.start()

    def _guard(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    def _run(self) -> None:
        known: Stored | None = None
        is_known = False
        while not self.over.wait(PACE_S):
            try:
                if not is_known:
                    known, is_known = self._engine.get(self._group), True
                    self._check(known)
                number = int(known.record) + 1 if known else 1
                outcome = self._engine.cas(self._group, known and known.version, b"%d" % number)
            except EngineUnreachable:
                is_known = False
                continue
            if isinstance(outcome, Applied):
                known = Stored(b"%d" % number, outcome.version)
                self._check(known)
                self.applied.append(known)
            else:
                is_known = False
                if isinstance(outcome, Unknown):
                    self.unknown.append(outcome)

    def _check(self, found: Stored | None) -> None:
        """Nobody else counts: nothing that was applied is lost, versions grow."""
        if not self.applied:
            return
        last = self.applied[-1]
        assert found is not None
        assert int(found.record) >= int(last.record)
        assert found == last or found.version > last.version

    def wait_for(self, more: int) -> None:
        wanted = len(self.applied) + more
        eventually(lambda: self.failure or len(self.applied) >= wanted, patient(120))
        if self.failure:
            raise self.failure

    def end(self) -> Stored:
        self.over.set()
        self._thread.join()
        self._engine.close()
        if self.failure:
            raise self.failure
        return self.applied[-1]


# SQLite has none: its processes are killed in tests of their own.
servers = pytest.mark.parametrize("world", ["etcd"], indirect=True)


@servers
def test_no_applied_change_is_lost_with_all_servers_killed(
    world: World, engine: Engine, group: str
) -> None:
    counter = Counter(world, group, timeout_s=2)
    watch = engine.watch(group)
    try:
        counter.wait_for(20)
        for server in range(world.servers):
            world.signal(signal.SIGKILL, server)
        for server in range(world.servers):
            world.restart(server)
        world.wait_ready()
        counter.wait_for(20)
    finally:
        counter.over.set()
        print(f"{len(counter.applied)} applied, {len(counter.unknown)} unknown")
        last = counter.end()
    stored = engine.get(group)
    assert stored is not None
    assert int(stored.record) >= int(last.record)
    eventually(lambda: watch.view and watch.view.stored == stored)


@servers
def test_one_server_after_the_other(world: World, engine: Engine, group: str) -> None:
    """A majority is enough: changes go on, and so does a session."""
    session = engine.open_session(group, 1, 12)
    counter = Counter(world, group, timeout_s=2)
    try:
        for server in range(world.servers):
            counter.wait_for(5)
            world.signal(signal.SIGKILL, server)
            counter.wait_for(5)
            assert engine.alive(group) == {1}
            world.restart(server)
            world.wait_ready()
    finally:
        counter.over.set()
        counter.end()
    eventually(lambda: session.holding is Holding.HELD)
    assert engine.alive(group) == {1}


@servers
def test_a_server_that_hangs_is_left_and_sessions_are_kept(
    world: World, engine: Engine, group: str
) -> None:
    """It has the connection, confirms what it is sent, and answers nothing. Requests are made all
    the while, as brokers do, with their limits of time."""
    with world.open(2.0) as broker:
        assert eventually(lambda: broker.cas(group, None, b"0") and broker.get(group))
        watch = broker.watch(group)
        session = eventually(lambda: broker.open_session(group, 1, 10))
        # A leader of an etcd from before March 2024 that wakes up after a lease's time has it
        # revoked, although it was renewed at the next leader (etcd-io/etcd#15247).
        hang_s = session.ttl_s * 0.6
        for server in range(world.servers):
            world.signal(signal.SIGSTOP, server)
            until = now_s() + hang_s
            answered = 0
            while now_s() < until or not answered:
                assert now_s() < until + ELECTION_S
                with contextlib.suppress(EngineUnreachable):
                    assert broker.get(group) is not None
                    answered += 1
                assert session.holding is not Holding.LOST
                time.sleep(0.1)  # as a broker does, which asks from time to time
            stored = eventually(lambda: engine.get(group))
            record = b"%d" % (server + 1)
            outcome = engine.cas(group, stored.version, record)
            assert not isinstance(outcome, Refused)
            eventually(lambda wanted=record: watch.view and watch.view.stored.record == wanted)
            assert eventually(lambda: engine.alive(group)) == {1}
            world.signal(signal.SIGCONT, server)
            world.wait_ready()
        eventually(lambda: session.holding is Holding.HELD)


@servers
def test_when_all_servers_hang_nobody_waits_for_ever(world: World, group: str) -> None:
    """A call ends in time, and a session is in doubt; all of it comes back."""
    with world.open(1.0) as broker:
        session = eventually(lambda: broker.open_session(group, 1, world.ttl_s))
        version = eventually(lambda: broker.cas(group, None, b"0") and broker.get(group)).version
        for server in range(world.servers):
            world.signal(signal.SIGSTOP, server)
        try:
            for call in (
                lambda: broker.get(group),
                lambda: broker.alive(group),
                lambda: broker.open_session(group, 2, world.ttl_s),
            ):
                began = time.monotonic()
                with pytest.raises(EngineUnreachable):
                    call()
                assert time.monotonic() - began < patient(20)  # for ever is longer
            with contextlib.suppress(EngineUnreachable):
                assert isinstance(broker.cas(group, version, b"1"), Unknown)
            eventually(lambda: session.holding is Holding.IN_DOUBT)
            assert session.left_s() == 0
        finally:
            for server in range(world.servers):
                world.signal(signal.SIGCONT, server)
        world.wait_ready()
        eventually(lambda: session.holding is not Holding.IN_DOUBT)
        assert eventually(lambda: broker.get(group)).record in (b"0", b"1")


@servers
def test_a_server_that_was_stopped_tells_nothing_old(
    world: World, engine: Engine, group: str
) -> None:
    """What it is asked waits in its socket, as do the changes that it has missed."""
    for server in range(world.servers):
        others = [number for number in range(world.servers) if number != server]
        with (
            world.open_some(server) as one,
            world.open_some(*others) as rest,
            ThreadPoolExecutor(1) as pool,
        ):
            one.get(group)
            for number in range(3):
                world.signal(signal.SIGSTOP, server)
                try:
                    last = changed(rest, group, b"%d.%d" % (server, number))
                    reading = pool.submit(one.get, group)
                finally:
                    world.signal(signal.SIGCONT, server)
                assert reading.result() == last
        world.wait_ready()


def changed(engine: Engine, group: str, record: bytes) -> Stored:
    """The record is put there, however often that takes: nobody else changes it."""

    def change() -> Stored | None:
        before = engine.get(group)
        if before and before.record == record:
            return before
        outcome = engine.cas(group, before and before.version, record)
        return Stored(record, outcome.version) if isinstance(outcome, Applied) else None

    found = eventually(change)
    assert isinstance(found, Stored)
    return found


@servers
def test_an_answer_that_is_lost(world: World, engine: Engine, group: str) -> None:
    """The servers stop, and go on later: what was sent is applied then, or never, or before."""
    before = engine.cas(group, None, b"before")
    assert isinstance(before, Applied)
    with world.open(1) as other:
        assert eventually(lambda: other.get(group)) == Stored(b"before", before.version)
        stop_before_it_is_sent(world, other)
        try:
            began = time.monotonic()
            outcome = other.cas(group, before.version, b"lost")
            took = time.monotonic() - began
            with pytest.raises(EngineUnreachable):
                other.get(group)
        finally:
            for server in range(world.servers):
                world.signal(signal.SIGCONT, server)
        assert isinstance(outcome, Unknown)
        assert took < patient(20)
        world.wait_ready()
        # Once the version is another one it is decided, and stays so.
        settled = eventually(lambda: settle(engine, group, before.version))
        assert settled.record in (b"lost", b"settled")
        for _ in range(20):
            assert engine.get(group) == settled
        again = engine.cas(group, before.version, b"late")
        assert again == Refused(settled)


def stop_before_it_is_sent(world: World, engine: Engine) -> None:
    """Stop the servers with SIGSTOP just before the engine sends a change."""
    assert isinstance(engine, EtcdEngine)
    gateway = engine._gateway
    send = gateway.ask_once

    def stopped(path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        for server in range(world.servers):
            world.signal(signal.SIGSTOP, server)
        return send(path, body, timeout_s)

    gateway.ask_once = stopped  # type: ignore[method-assign]


def settle(engine: Engine, group: str, expected: int) -> Stored | None:
    outcome = engine.cas(group, expected, b"settled")
    if isinstance(outcome, Applied):
        return Stored(b"settled", outcome.version)
    return outcome.current if isinstance(outcome, Refused) else None


@servers
def test_nobody_is_there(world: World, group: str) -> None:
    """Nothing listens: nothing was sent, and that is said."""
    port = free_ports(2)
    url = f"{world.kind}://127.0.0.1:{port},127.0.0.1:{port + 1}"
    with open_engine(url, timeout_s=0.5) as engine:
        for call in (
            lambda: engine.get(group), lambda: engine.cas(group, None, b""),
            lambda: engine.alive(group), lambda: engine.open_session(group, 1, 2),
            lambda: engine.delete(group, 1),
        ):  # fmt: skip
            with pytest.raises(EngineUnreachable, match=str(port)):
                call()
        watch = engine.watch(group)
        assert watch.view is None


@servers
def test_a_session_whose_engine_is_away_is_in_doubt(
    world: World, engine: Engine, group: str
) -> None:
    session = engine.open_session(group, 1, world.ttl_s)
    for server in range(world.servers):
        world.signal(signal.SIGSTOP, server)
    try:
        eventually(lambda: session.holding is not Holding.HELD)
        assert session.left_s() == 0
    finally:
        for server in range(world.servers):
            world.signal(signal.SIGCONT, server)
    world.wait_ready()
    # It is held on or has ended, and its holder and others say the same.
    holding = eventually(
        lambda: session.holding if session.holding is not Holding.IN_DOUBT else None
    )
    eventually(lambda: (engine.alive(group) == {1}) is (session.holding is Holding.HELD))
    assert holding in (Holding.HELD, Holding.LOST)


# --- SQLite: processes instead of servers ---------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cluster"


def test_processes_that_are_killed_as_they_change(folder: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    url = f"sqlite:{folder}"
    last = Stored(b"0", 0)
    with open_engine(url) as engine:
        for _ in range(6):
            with Child(url) as child:
                child.say(do="count", group="g", times=100_000)
                for _ in range(chance.randrange(1, 40)):
                    heard = child.hear()
                for said in [heard, *child.kill()]:
                    last = Stored(b"%d" % said["number"], said["version"])
            stored = engine.get("g")
            assert stored is not None
            # One more may be there: it was killed before it could say so.
            assert stored == last or int(stored.record) == int(last.record) + 1
            assert stored.version >= last.version
    assert (folder / "records.db").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_many_processes_make_the_files_at_once(folder: Path) -> None:
    url = f"sqlite:{folder}"
    command = [
        sys.executable, "-c",
        "import sys; from cometmq.actors.replication.engines.opening import open_engine\n"
        "sys.stdin.readline()\n"
        "engine = open_engine(sys.argv[1], 30)\n"
        "print(engine.cas('g', None, b'x'))", url,
    ]  # fmt: skip
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    said = [child.communicate(timeout=patient(90))[0] for child in children]
    assert sum(each.startswith("Applied") for each in said) == 1, said
    assert sum(each.startswith("Refused") for each in said) == 5, said


def test_a_process_that_is_stopped_within_its_change(folder: Path) -> None:
    """It keeps the lock: others say who it is, and nothing is changed."""
    url = f"sqlite:{folder}"
    with open_engine(url, timeout_s=0.5) as engine, Child(url) as child:
        before = engine.cas("g", None, b"before")
        assert isinstance(before, Applied)
        pid = child.ask(do="hold")["pid"]
        child.stop()
        with pytest.raises(EngineUnreachable, match=f"process {pid} .*let it go on, or kill it"):
            engine.cas("g", before.version, b"after")
        assert engine.get("g") == Stored(b"before", before.version)
        session = engine.open_session("g", 1, 3)  # of another file
        assert engine.alive("g") == {session.broker_id}
        child.kill()
        assert isinstance(engine.cas("g", before.version, b"after"), Applied)


def test_sockets_of_killed_processes_are_removed(folder: Path) -> None:
    url = f"sqlite:{folder}"
    with open_engine(url) as engine:
        with Child(url) as child:
            child.ask(do="session", group="g", broker=1, ttl=1.0)
            child.ask(do="forked", group="g")  # it watches
            assert len(list((folder / "watchers").iterdir())) == 1
        assert isinstance(engine.cas("g", None, b"x"), Applied)
        assert not list((folder / "watchers").iterdir())


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_of_sqlite(kind: str, tmp_path: Path) -> None:
    """What was applied before the cut is there; sessions end with the machine."""
    need(kind, "power cuts of the engine SQLite")
    last = Stored(b"0", 0)
    with Disk(tmp_path, kind) as disk:
        url = f"sqlite:{disk.folder}/cluster"
        for cycle in range(4):
            with Child(url, boot=f"boot-{cycle}") as child:
                child.ask(do="session", group="g", broker=1, ttl=60.0)
                child.say(do="count", group="g", times=100_000)
                for _ in range(5 + 10 * cycle):
                    said = child.hear()
                    # More than was heard of may be there, and nothing less.
                    assert said["number"] > int(last.record), f"{last} is lost"
                    assert said["version"] > last.version
                    last = Stored(b"%d" % said["number"], said["version"])
                disk.cut()
                # What it says from here on comes from a machine that would be dark.
                child.kill()
            disk.power_on()
        disk.check()
        with open_engine(url) as engine:
            stored = engine.get("g")
    assert stored is not None
    assert int(stored.record) >= int(last.record)


def test_a_cut_before_a_commit(tmp_path: Path) -> None:
    """It fails, and nobody knows whether what was written of it will be found."""
    need("ext4", "power cuts of the engine SQLite")
    with Disk(tmp_path, "ext4") as disk:
        url = f"sqlite:{disk.folder}/cluster"
        with Child(url, boot="one") as child:
            said = child.ask(do="count", group="g", times=1)
            assert child.hear() == {"done": 1}
            assert child.ask(do="slow", group="g", expected=said["version"]) == {"within": True}
            disk.cut()
            child.say()
            assert child.hear() == {"outcome": "Unknown"}
            child.kill()
        disk.power_on()
        with Child(url, boot="two") as child:
            found = child.ask(do="get", group="g")
            assert found["record"] in ("1", "slow")
            assert found["version"] >= said["version"]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """No change is half there, and they go on when there is room."""
    need("ext4", "a full disk of the engine SQLite")
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path, 16 << 20))
        with open_engine(f"sqlite:{disk.folder}/cluster") as engine:
            before = engine.open_session("g-0", 0, 3)
            filling = disk.folder / "filling"
            with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            stored: dict[str, Stored | None] = {}
            for number in range(200):
                name = f"g-{number}"
                try:
                    outcome: object = engine.cas(name, None, bytes([number]) * 65_536)
                except EngineUnreachable as error:
                    outcome = error
                if not isinstance(outcome, Applied):
                    break
                stored[name] = Stored(bytes([number]) * 65_536, outcome.version)
            assert not isinstance(outcome, Applied), "the disk is never full"
            assert {each: engine.get(each) for each in stored} == stored
            # Sessions go on, also beyond their first time to live.
            engine.open_session("g-0", 1, 3)
            seen = now_s()
            eventually(lambda: before.left_s() and now_s() + before.left_s() > seen + 3)
            assert engine.alive("g-0") == {0, 1}
            filling.unlink()
            if not isinstance(engine.cas(name, None, b"room"), Applied):
                assert isinstance(outcome, Unknown)
            assert {each: engine.get(each) for each in stored} == stored
