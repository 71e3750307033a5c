"""Named holds: no hold that was acknowledged is deleted past, whoever dies, and nobody is told of
one that the cleaner does not respect."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from cleaning_child import SEGMENT, cleaner_of, make_store, new_run
from coordinator_child import (
    INSIDE,
    FakeCommitlog,
    Settings,
    address_of,
    ledger_of,
    running,
)
from family import RunningBroker
from hypothesis import given
from hypothesis import strategies as st
from old_segments import ALL_HOURS, FAST, MIB, log_begins, make_old, write_segments
from patience import patient
from still import stopped
from waiting import until

from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.coordination.holds import HOLDS_MAX
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.holds import HoldBook
from cometmq.client import Admin
from cometmq.protocol.commands import (
    Command,
    Cover,
    DeletedSegments,
    DeleteSegments,
    DropHold,
    Finish,
    Hold,
    HoldList,
    HoldsWanted,
    ListHolds,
    Ping,
    PlaceHold,
    SetHolds,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    DiskFull,
    NotConfirmed,
    ServiceNotAvailable,
    SystemBusy,
)
from cometmq.protocol.ledger import Change, HoldDropped, HoldPut, OffsetsForgotten
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.remote import RemoteRef
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import list_segments
from cometmq.shm.state.holds import (
    OLD_HOLDS_FILE,
    HoldTable,
    holds_file,
    holds_text,
    load_holds,
    read_holds,
)

NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(0, (1 << 63) - 1)
CHANGES = st.lists(
    st.one_of(st.builds(HoldPut, NAMES, NUMBERS, NUMBERS), st.builds(HoldDropped, NAMES)),
    max_size=12,
)


# --- the book -------------------------------------------------------------------------------------


@given(CHANGES, CHANGES)
def test_what_is_taken_back_was_never_there(kept: list[Change], refused: list[Change]) -> None:
    book = HoldBook({})
    for change in kept:
        assert book.apply(change)
    before, changes = dict(book.all()), book.changes
    undos = [book.apply(change) for change in refused]
    for undo in reversed(undos):
        book.undo(undo)
    assert book.all() == before
    assert book.changes == changes + 2 * len(refused)  # so a snapshot that has them is written anew


def test_the_book_of_holds() -> None:
    book = HoldBook({"a": Hold("a", 5)})
    assert not book.apply(OffsetsForgotten("t"))
    assert book.changes == 0
    book.apply(HoldPut("b", 7, 1_000))
    book.apply(HoldPut("a", 6, 0))
    assert book.live(999) == [Hold("a", 6), Hold("b", 7, 1_000)]
    assert (book.live(1_000), book.ended(1_000)) == ([Hold("a", 6)], [Hold("b", 7, 1_000)])
    book.apply(HoldDropped("a"))
    book.apply(HoldDropped("a"))
    assert (book.get("a"), book.get("b")) == (None, Hold("b", 7, 1_000))


@given(st.dictionaries(st.text(), st.builds(Hold, st.text(), NUMBERS, NUMBERS)))
def test_what_the_file_says_is_read(found: dict[str, Hold]) -> None:
    holds = {
        name: Hold(name, hold.physical_offset, hold.expires_ms) for name, hold in found.items()
    }
    table = msgspec.json.decode(holds_text(holds.values()), type=HoldTable)
    assert {
        name: Hold(name, held.physical_offset, held.expires_ms)
        for name, held in table.holds.items()
    } == holds


# --- the coordinator ------------------------------------------------------------------------------


class FakeCleaner(ServiceActor):
    """Keeps what it is told, and says where the log begins."""

    role = "cleaner"

    def __init__(self, *, bind: Sequence[tuple[str, bool]] = INSIDE) -> None:
        super().__init__(bind=bind)
        self.lists: list[SetHolds] = []
        self.begin = 0  # of the log

    def on_set_holds(self, command: SetHolds, _request: Request) -> Command:
        self.lists.append(command)
        return HoldList(command.holds, self.begin)

    def on_delete_segments(self, _command: DeleteSegments, _request: Request) -> Command:
        return DeletedSegments([], SEGMENT, self.begin)


class World:
    """A coordinator between a commitlog process and a cleaner."""

    def __init__(self, stack: ExitStack, store: Path) -> None:
        self._store = store
        self._stack = stack
        commitlog, cleaner = FakeCommitlog.start(), FakeCleaner.start()
        stack.enter_context(running(commitlog))
        stack.enter_context(running(cleaner))
        self._addresses = address_of(commitlog), address_of(cleaner)
        self.commitlog, self.cleaner = commitlog.proxy(), cleaner.proxy()
        self.begin = 0  # of the log, as all see it
        self.line: RemoteRef

    def start(self) -> None:
        """A coordinator, also after another one."""
        commitlog, cleaner = self._addresses
        actor = CoordinatorActor.start(
            Settings(),
            self._store,
            commitlog_endpoint=commitlog,
            cleaner_endpoint=cleaner,
            log_begin=lambda: self.begin,
            ledger_log=ledger_of(commitlog),
            name_server_endpoints=[],
            bind=INSIDE,
        )
        self.line = self._stack.enter_context(running(actor))

    def held(self, command: Command) -> dict[str, int]:
        """What its answer says; it was asked and answered."""
        answer = self.line.ask(command, timeout=patient(30))
        assert isinstance(answer, HoldList)
        return {hold.name: hold.physical_offset for hold in answer.holds}

    def told(self) -> list[dict[str, int]]:
        """All lists that the cleaner was told."""
        lists = cast(list[SetHolds], self.cleaner.lists.get())
        return [{hold.name: hold.physical_offset for hold in each.holds} for each in lists]


@contextmanager
def world(store: Path) -> Iterator[World]:
    with ExitStack() as stack:
        made = World(stack, store)
        made.start()
        yield made


def test_a_hold_is_in_the_log_and_at_the_cleaner_when_it_is_told(tmp_path: Path) -> None:
    with world(tmp_path) as all_of_them:
        appended = all_of_them.commitlog.appended.get()
        assert all_of_them.held(PlaceHold("a", 5)) == {"a": 5}
        assert all_of_them.commitlog.appended.get() == appended + 1
        assert all_of_them.told()[-1] == {"a": 5}
        assert all_of_them.held(PlaceHold("b")) == {"a": 5, "b": 0}
        assert all_of_them.held(DropHold("a")) == {"b": 0}
        assert all_of_them.held(DropHold("a")) == {"b": 0}
        assert all_of_them.commitlog.appended.get() == appended + 3  # nothing was changed
        assert all_of_them.commitlog.covers.get()[-3:] == [Cover.FLUSHED] * 3
        assert all_of_them.held(ListHolds()) == {"b": 0}
        assert all_of_them.told()[-1] == {"b": 0}
        places = [(each.epoch, each.number) for each in all_of_them.cleaner.lists.get()]
        assert places == sorted(set(places))


def test_the_cleaner_is_told_by_a_coordinator_that_starts(tmp_path: Path) -> None:
    """Or that it asks; the list of the later life counts as the later one."""
    with world(tmp_path) as all_of_them:
        all_of_them.held(PlaceHold("a", 5))
        last = all_of_them.cleaner.lists.get()[-1]
        all_of_them.line.ask(Finish(), timeout=patient(30))
        count = len(all_of_them.told())
        all_of_them.start()
        until(lambda: len(all_of_them.told()) > count)
        assert all_of_them.told()[-1] == {"a": 5}
        assert all_of_them.cleaner.lists.get()[-1].epoch > last.epoch
        count = len(all_of_them.told())
        all_of_them.line.ask(HoldsWanted())
        until(lambda: len(all_of_them.told()) > count)
        assert all_of_them.told()[-1] == {"a": 5}


@pytest.mark.slow
def test_a_hold_that_is_not_in_the_log_yet_is_told_to_nobody(tmp_path: Path) -> None:
    """And a dropped one is still held. Who is told that nothing is known may find it kept later:
    then the cleaner has it, too, without being asked."""
    with world(tmp_path) as all_of_them, Channel(all_of_them.line._channel.endpoint) as channel:
        all_of_them.held(PlaceHold("a", 5))
        all_of_them.commitlog.silent = True
        asked = [channel.request(each) for each in (DropHold("a"), PlaceHold("b", 7))]
        all_of_them.line.ask(Ping())
        all_of_them.line.ask(HoldsWanted())
        for each in asked:
            assert channel.wait(each, patient(30))
            with pytest.raises(NotConfirmed):
                each.result()
        assert all_of_them.told()[-1] == {"a": 5}
        all_of_them.commitlog.silent = False
        until(lambda: all_of_them.told()[-1] == {"b": 7})
        assert all_of_them.held(ListHolds()) == {"b": 7}
        assert {"a": 5, "b": 7} not in all_of_them.told()


@pytest.mark.parametrize("wait_first", [False, True])
def test_what_the_log_refuses_is_not_held_and_not_dropped(wait_first: bool, tmp_path: Path) -> None:
    """
    Args:
        wait_first: the first is refused before the second one is said.
    """
    with world(tmp_path) as all_of_them, Channel(all_of_them.line._channel.endpoint) as channel:
        all_of_them.held(PlaceHold("a", 5))
        all_of_them.commitlog.refusal = SystemBusy("not now")
        asked = []
        for each in (DropHold("a"), PlaceHold("b", 7)):
            asked.append(channel.request(each))
            if wait_first:
                assert channel.wait(asked[-1], patient(30), keep=True)
        for pending in asked:
            assert channel.wait(pending, patient(30))
            with pytest.raises(SystemBusy, match="not now"):
                pending.result()
        all_of_them.commitlog.refusal = None
        assert all_of_them.held(ListHolds()) == {"a": 5}
        assert all(each in ({}, {"a": 5}) for each in all_of_them.told())


def test_what_the_log_has_no_room_for_is_kept_in_the_file(tmp_path: Path) -> None:
    """Who waits for an archive on a full disk can place its hold."""
    with world(tmp_path) as all_of_them:
        all_of_them.commitlog.refusal = DiskFull("full")
        assert all_of_them.held(PlaceHold("a", 5)) == {"a": 5}
        assert [hold.name for hold in read_holds(tmp_path)] == ["a"]
        blocked = tmp_path / "config" / "holds.json.tmp"
        blocked.mkdir()
        with pytest.raises(ServiceNotAvailable, match=r"holds\.json cannot be written"):
            all_of_them.held(PlaceHold("b", 7))
        assert all_of_them.held(ListHolds()) == {"a": 5}
        blocked.rmdir()
        assert all_of_them.told()[-1] == {"a": 5}


def test_what_was_deleted_meanwhile_is_not_held(tmp_path: Path) -> None:
    """Between the coordinator's look at the log's beginning and the cleaner's answer: the hold
    begins with the log, and that is what is said and kept."""
    with world(tmp_path) as all_of_them:
        all_of_them.begin = 1_000
        assert all_of_them.held(PlaceHold("a", 5)) == {"a": 1_000}
        all_of_them.cleaner.begin = 3_000
        answer = all_of_them.line.ask(PlaceHold("b", 5, 60_000), timeout=patient(30))
        assert isinstance(answer, HoldList)
        assert answer.min_physical_offset == 3_000
        a, b = answer.holds
        assert a == Hold("a", 1_000)  # that one was there: it is overridden, and seen to be
        assert (b.name, b.physical_offset) == ("b", 3_000)
        assert b.expires_ms > time.time() * 1_000
        all_of_them.line.ask(Finish(), timeout=patient(30))
        assert {hold.name: hold.physical_offset for hold in read_holds(tmp_path)} == {
            "a": 1_000, "b": 3_000,
        }  # fmt: skip


def test_there_are_so_many_holds_that_live(tmp_path: Path) -> None:
    holds = [[f"h{number}", number, 0] for number in range(HOLDS_MAX)]
    holds[7][2] = 1_000  # its lease has ended
    (tmp_path / OLD_HOLDS_FILE).write_bytes(msgspec.json.encode(holds))
    with world(tmp_path) as all_of_them:
        assert len(all_of_them.held(ListHolds())) == HOLDS_MAX - 1
        assert len(all_of_them.held(PlaceHold("one_more"))) == HOLDS_MAX
        with pytest.raises(SystemBusy, match=f"there are {HOLDS_MAX} holds"):
            all_of_them.held(PlaceHold("too_many"))
        assert all_of_them.held(PlaceHold("h8", 9_000))["h8"] == 9_000
        with pytest.raises(BadRequest, match="is for store another"):
            all_of_them.held(PlaceHold("h8", 9_001, store_id="another"))
        all_of_them.line.ask(Finish(), timeout=patient(30))
    kept = load_holds(tmp_path, holds_file(tmp_path))
    assert len(kept) == HOLDS_MAX
    assert "h7" not in kept  # it is not kept for ever


def test_without_a_cleaner_nothing_is_changed(tmp_path: Path) -> None:
    commitlog = FakeCommitlog.start()
    with running(commitlog):
        actor = CoordinatorActor.start(
            Settings(),
            tmp_path,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            bind=INSIDE,
        )
        with running(actor) as line:
            appended = commitlog.proxy().appended.get()
            for command in (PlaceHold("a"), DropHold("a"), ListHolds(), DeleteSegments()):
                with pytest.raises(ServiceNotAvailable, match="no cleaner"):
                    line.ask(command)
            assert commitlog.proxy().appended.get() == appended


# --- the cleaner ----------------------------------------------------------------------------------


def test_nothing_is_deleted_before_the_holds_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    make_store(store, segments=8, old=5)
    new_run(store, 8 * SEGMENT - 100)
    request = cast(Any, None)
    cleaner = cleaner_of(store)
    cleaner.on_start()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                cleaner._clean()
        said = [each for each in caplog.messages if "has said which holds there are" in each]
        assert len(said) == 1
        with pytest.raises(ServiceNotAvailable, match="knows no holds"):
            cleaner.on_delete_segments(DeleteSegments(), request)
        assert len(list_segments(store / "commitlog", SEGMENT)) == 8
        late = SetHolds(7, 1, [])
        answer = cleaner.on_set_holds(SetHolds(7, 2, [Hold("a", 2 * SEGMENT)]), request)
        assert answer == HoldList([Hold("a", 2 * SEGMENT)], 0)
        assert cleaner.on_set_holds(late, request) == answer  # it comes late
        assert cleaner.on_set_holds(SetHolds(6, 99, []), request) == answer  # of one who is dead
        gone = cleaner.on_delete_segments(DeleteSegments(), request)
        assert isinstance(gone, DeletedSegments)
        assert (gone.segments, gone.held_by) == ([0, SEGMENT], ["a"])
        cleaner.on_set_holds(SetHolds(8, 1, []), request)
        cleaner._clean()
        assert list_segments(store / "commitlog", SEGMENT)[0] == 5 * SEGMENT
    finally:
        cleaner.settle()


# --- all of them ----------------------------------------------------------------------------------

ALWAYS = FAST | {"deleteWhen": ALL_HOURS}
LAZY = {"flushConsumerOffsetInterval": 600_000}  # there is no snapshot but at the end


def kill_cleaner(broker: RunningBroker) -> None:
    broker.kill("cleaner")


def kill_coordinator(broker: RunningBroker) -> None:
    broker.kill("coordinator")


def kill_both(broker: RunningBroker) -> None:
    before = broker.pids()
    for role in ("cleaner", "coordinator"):
        broker.end(before[role])
    for role in ("cleaner", "coordinator"):
        broker.wait_serves(role, not_pid=before[role])


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_cleaner, kill_coordinator, kill_both])
def test_a_hold_is_respected_whoever_is_killed_right_after_the_answer(
    kill: Callable[[RunningBroker], None], tmp_path: Path
) -> None:
    """What is old goes up to the hold, and not a segment more, each time."""
    with RunningBroker(tmp_path / "store", ALWAYS) as broker:
        broker.create_topic("t")
        write_segments(broker, 6)
        with Admin(broker.ready.name_server) as admin:
            for number in range(1, 4):
                admin.place_hold("a", number * MIB)
                kill(broker)
                make_old(
                    broker, 6, first=max(number - 1, broker.counter(Counter.MIN_OFFSET) // MIB)
                )
                log_begins(broker, number * MIB)
                rounds = broker.statistics("cleaner")["rounds"]
                until(lambda rounds=rounds: broker.statistics("cleaner")["rounds"] > rounds + 3)
                log_begins(broker, number * MIB)
                assert broker.statistics("cleaner")["holds"] == f"a at {number * MIB}"
            assert admin.drop_hold("a") == []
        log_begins(broker, broker.counter(Counter.WROTE) // MIB * MIB)


@pytest.mark.slow
def test_a_cleaner_waits_for_a_coordinator_that_does_not_answer(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", ALWAYS) as broker:
        broker.create_topic("t")
        write_segments(broker, 4)
        with Admin(broker.ready.name_server) as admin:
            admin.place_hold("a", 2 * MIB)
        with stopped(broker.pids()["coordinator"]):
            old = broker.pids()["cleaner"]
            broker.end(old)
            make_old(broker, 4)
            until(lambda: "nothing is deleted before the coordinator" in broker.log)
            new = until(lambda: (pid := broker.pids()["cleaner"]) != old and pid)
            until(lambda: broker.statistics("cleaner")["rounds"] > 5)
            assert broker.counter(Counter.MIN_OFFSET) == 0
            assert broker.pids()["cleaner"] == new
        log_begins(broker, 2 * MIB)


def test_a_hold_is_on_the_disk_when_it_is_told(tmp_path: Path) -> None:
    """Also where messages would be on it much later."""
    never = {"flushIntervalCommitLog": 600_000, "flushCommitLogThoroughInterval": 600_000}
    with RunningBroker(tmp_path / "store", FAST | never) as broker:
        broker.create_topic("t")
        broker.send("t", 0, [b"x"])
        wrote = broker.counter(Counter.WROTE)
        with Admin(broker.ready.name_server) as admin:
            admin.place_hold("a")
        assert broker.counter(Counter.FLUSHED) > wrote


@pytest.mark.slow
def test_holds_that_are_in_no_file_survive_the_kill_of_everything(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, ALWAYS | LAZY) as broker:
        with Admin(broker.ready.name_server) as admin:
            for name in ("a", "b", "c"):
                admin.place_hold(name)
            admin.drop_hold("b")
        broker.kill_all()
    assert not (store / "config" / "holds.json").exists()
    for _ in range(2):
        with (
            RunningBroker(store, ALWAYS | LAZY) as broker,
            Admin(broker.ready.name_server) as admin,
        ):
            assert [hold.name for hold in admin.holds()] == ["a", "c"]
    assert [hold.name for hold in read_holds(store)] == ["a", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_the_holds_of_a_store_of_before(killed: bool, tmp_path: Path) -> None:
    """They stood in a file of their own, which goes once there is another one.

    Args:
        killed: the first broker that finds it, before it has written anything of them.
    """
    store = tmp_path / "store"
    with RunningBroker(store, FAST) as broker:
        broker.create_topic("t")
        write_segments(broker, 4)
    old = store / OLD_HOLDS_FILE
    old.write_bytes(b'[["a",2097152,0],["over",0,1000],["b",3145728,0]]\n')
    with RunningBroker(store, ALWAYS | LAZY) as broker, Admin(broker.ready.name_server) as admin:
        make_old(broker, 4)
        assert {hold.name: hold.physical_offset for hold in admin.holds()} == {
            "a": 2 * MIB, "b": 3 * MIB,
        }  # fmt: skip
        admin.drop_hold("b")
        admin.place_hold("c", 4 * MIB)
        assert old.exists()
        if killed:
            broker.kill_all()
    assert old.exists()
    assert (store / "config" / "holds.json").exists() is not killed
    for _ in range(2):
        with RunningBroker(store, ALWAYS) as broker, Admin(broker.ready.name_server) as admin:
            assert [hold.name for hold in admin.holds()] == ["a", "c"]
            until(lambda: (store / "config" / "holds.json").exists())
            delete_by_hand(admin)
            log_begins(broker, 2 * MIB)
    assert not old.exists()


def delete_by_hand(admin: Admin) -> None:
    """What may go; right after a start the cleaner may have to hear of the holds first."""

    def done() -> bool:
        try:
            admin.delete_expired()
        except ServiceNotAvailable:
            return False
        return True

    until(done)


@pytest.mark.slow
def test_a_hold_is_in_time_or_says_where_the_log_begins(tmp_path: Path) -> None:
    """Placed while segments are being deleted, again and again: what it says is true from then
    on."""
    with RunningBroker(tmp_path / "store", ALWAYS | {"deleteFileBatchMax": 1}) as broker:
        broker.create_topic("t")
        write_segments(broker, 12)
        with Admin(broker.ready.name_server) as admin:
            for number in range(12):
                name = f"h{number % 2}"
                make_old(broker, 1, first=broker.counter(Counter.MIN_OFFSET) // MIB)
                if number:
                    admin.drop_hold(f"h{(number - 1) % 2}")
                (hold,) = admin.place_hold(name)
                begin = broker.counter(Counter.MIN_OFFSET)
                assert (hold.overridden, hold.physical_offset) == (False, begin)
                if begin >= 11 * MIB:
                    break
                make_old(broker, 1, first=begin // MIB)
                rounds = broker.statistics("cleaner")["rounds"]
                until(lambda rounds=rounds: broker.statistics("cleaner")["rounds"] > rounds + 2)
                assert broker.counter(Counter.MIN_OFFSET) == begin


@pytest.mark.parametrize("content", [b"[[1,", b'[["a",-1,0]]', b'[["a",9223372036854775808,0]]'])
def test_a_damaged_file_of_before(content: bytes, tmp_path: Path) -> None:
    (tmp_path / OLD_HOLDS_FILE).write_bytes(content)
    with pytest.raises(CometError, match=r"cometmq\.holds: .*Remove it to clean without holds"):
        read_holds(tmp_path)
    os.mkdir(tmp_path / "config")
    (tmp_path / "config" / "holds.json").write_text('{"holds":{}}')
    assert read_holds(tmp_path) == []  # it does not count any more
