"""One replica, event by event: what it does, and above all what it refuses, with both facts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cometmq.actors.replication.core.actions import (
    Action,
    Append,
    Cas,
    Confirmed,
    Get,
    Keep,
    Lead,
    Refuse,
    Send,
    Serve,
    Service,
    Ship,
    StartOver,
    StepDown,
    Stop,
    Truncate,
    Why,
)
from cometmq.actors.replication.core.frames import (
    Ack,
    Agreed,
    AnyFrame,
    Apart,
    Beat,
    Bid,
    Bytes,
    Hello,
    Mark,
    Marks,
    Refused,
    Welcome,
)
from cometmq.actors.replication.core.promises import EpochStart, Promises
from cometmq.actors.replication.core.record import GroupRecord, Member, new_record
from cometmq.actors.replication.core.replica import Replica
from cometmq.actors.replication.core.settings import Settings

SETTINGS = Settings(group="g", replica="a", address="host-a:1", frame_bytes=10, window_bytes=30)
PROMISED = Promises(group="g", replica="a", store_uuid="ua", boot_id="boot", clean=False)
TABLE = (EpochStart(1, 0), EpochStart(4, 60))


ROOT = Path(__file__).resolve().parents[2]


class Log:
    """Records of ten bytes; `changed` are ends of records that are not what others have there."""

    def __init__(self) -> None:
        self.changed: set[int] = set()

    def last_record(self, end: int) -> Mark | None:
        return Mark(end, end - 10, 1000 + end + (end in self.changed))

    def whole_records(self, offset: int, end: int, bytes_max: int) -> int:
        return min(end, offset + max(10, bytes_max // 10 * 10))


def a_record(**changes: Any) -> GroupRecord:
    """Of a group in epoch 5, led by b; all have registered, `a` for its second life."""
    replicas = {
        "a": Member("host-a:1", "ua", 2),
        "b": Member("host-b:1", "ub", 1),
        "c": Member("host-c:1", "uc", 1),
    }
    names = [(name, each.address) for name, each in replicas.items()]
    record = msgspec.structs.replace(
        new_record("g", names), replicas=replicas, epoch=5, master="b", iss=("a", "b", "c")
    )
    return msgspec.structs.replace(record, **changes)


def lives(*names: str) -> list[tuple[str, str, int]]:
    return [(name, f"u{name}", 2 if name == "a" else 1) for name in names]


class Rig:
    """Replica `a`, started for its second time, with a log of 100 bytes."""

    def __init__(
        self,
        *,
        end: int = 100,
        begin: int = 0,
        flushed: int | None = None,
        known_end: int = 0,
        boot_id: str = "boot",
        settings: Settings = SETTINGS,
        registers: bool = True,
        **promised: Any,
    ) -> None:
        """
        Args:
            registers: it has done so, while there was no master; its versions and tickets begin
                behind that. False: it has asked for the record.
        """
        defaults = {"incarnation": 1, "promised_epoch": 4, "epochs": TABLE, "confirm_offset": 40}
        self.log = Log()
        self.replica = Replica(
            settings,
            msgspec.structs.replace(PROMISED, **{**defaults, **promised}),
            self.log,
            begin=begin,
            end=end,
            flushed=end if flushed is None else flushed,
            known_end=known_end,
            boot_id=boot_id,
        )
        self.actions = self.replica.start(1.0)
        if registers:
            last = self.replica.local.promises.incarnation - 1
            replicas = {**a_record().replicas, "a": Member("host-a:1", "ua", last)}
            *_, cas = self.learn(5, a_record(replicas=replicas, master=""))
            assert isinstance(cas, Cas)
            self.replica.cas_applied(cas.ticket, 6)

    # --- events, in short ---

    def learn(self, version: int, record: GroupRecord | None) -> list[Action]:
        return self.replica.learned(version, record)

    def follow(self, record: GroupRecord | None = None) -> int:
        """Say hello to b; the nonce."""
        (hello,) = frames_in(self.learn(7, record or a_record()), Hello)
        return hello.nonce

    def stream(self, agreed: int = 100, confirm: int = 0) -> int:
        """A whole handshake with b in epoch 5; the nonce."""
        nonce = self.follow()
        self.replica.frame("b", welcome(nonce))
        self.replica.frame("b", Agreed("g", 5, nonce, agreed))
        if confirm:
            self.replica.frame("b", Beat("g", 5, nonce, agreed, confirm, 1))
        return nonce

    def lead(self, **changes: Any) -> list[Action]:
        """Win epoch 6 at version 9."""
        self.replica.session(100.0)
        self.replica.sessions(lives("a", "b", "c"))
        record = a_record(epoch=6, master="a", **changes)
        return self.learn(9, record)

    def join(self, name: str, held: int, *, number: int = 0, nonce: int = 1) -> list[Action]:
        """A follower's handshake and its first word."""
        self.replica.frame(name, Hello("g", 4, nonce, f"u{name}", 1))
        self.replica.frame(name, Marks("g", 6, nonce, (Mark(held, held - 10, 1000 + held),)))
        return self.replica.frame(name, Ack("g", 6, nonce, held, number))


def welcome(nonce: int, **changes: Any) -> Welcome:
    table = (*TABLE, EpochStart(5, 100))
    frame = Welcome("g", 5, nonce, table, 0, 130)
    return msgspec.structs.replace(frame, **changes)


def of_kind(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [each for each in actions if isinstance(each, kind)]


def frames_in(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [each.frame for each in of_kind(actions, Send) if isinstance(each.frame, kind)]


def refused(actions: list[Action]) -> tuple[Why, int, int]:
    (refuse,) = of_kind(actions, Refuse)
    assert str(refuse.here) in str(refuse) or "group" in str(refuse)
    assert not of_kind(actions, Append) + of_kind(actions, Truncate) + of_kind(actions, StartOver)
    return refuse.why, refuse.here, refuse.there


# --- a start --------------------------------------------------------------------------------------


def test_a_start_is_a_new_life_and_durable_before_it_is_told() -> None:
    rig = Rig(registers=False)
    assert [type(each) for each in rig.actions] == [Get]
    keep, cas = rig.learn(7, with_life(1))
    assert isinstance(keep, Keep)
    assert isinstance(cas, Cas)
    assert keep.promises.incarnation == cas.record.replicas["a"].incarnation == 2
    assert not keep.promises.clean


def with_life(incarnation: int) -> GroupRecord:
    """The record as it was when `a` had been started so often."""
    replicas = {**a_record().replicas, "a": Member("host-a:1", "ua", incarnation)}
    return a_record(replicas=replicas)


def test_a_start_that_is_not_told_leaves_nothing() -> None:
    """The engine is away; so the next one is the life that this one would have been."""
    rig = Rig(registers=False)
    assert rig.replica.tick(2.0) == [Get(2)]
    assert rig.replica.ending() == []


@pytest.mark.parametrize(("confirm", "known"), [(101, 0), (40, 101)])
def test_a_log_that_lacks_what_it_had_stops_its_replica(confirm: int, known: int) -> None:
    rig = Rig(confirm_offset=confirm, known_end=known, registers=False)
    (stop,) = rig.actions
    assert isinstance(stop, Stop)
    assert "up to 100, but it had all up to 101" in stop.why
    assert rig.learn(7, a_record()) == []
    assert rig.replica.tick(99.0) == []


def test_a_start_registers_and_a_former_master_is_none_any_more() -> None:
    replicas = {**a_record().replicas, "a": Member("host-a:1", "ua", 1)}
    _, cas = Rig(registers=False).learn(7, a_record(replicas=replicas, master="a"))
    assert isinstance(cas, Cas)
    assert (cas.version, cas.record.master, cas.record.epoch) == (7, "", 5)
    assert cas.record.replicas["a"].incarnation == 2
    assert cas.record.iss == ("a", "b", "c")


@pytest.mark.parametrize("known", [2, 9])
def test_an_older_copy_of_a_store_stops(known: int) -> None:
    """Also where the group knows of one life more than the copy: that is not the one that begins
    here, but another one, which may have acknowledged what is not here. And nothing is kept, or the
    copy would be taken for the newer one when it has been started often enough."""
    rig = Rig(registers=False)
    (stop,) = rig.learn(7, with_life(known))
    assert isinstance(stop, Stop)
    assert f"started 1 times before, the group knows of {known}" in stop.why
    assert not of_kind(rig.actions, Keep)
    assert rig.replica.ending() == []


def test_a_copy_that_is_started_meanwhile_ends_the_first_one() -> None:
    rig = Rig()
    rig.follow()
    (stop,) = rig.learn(8, with_life(3))
    assert isinstance(stop, Stop)
    assert "started 2 times before, the group knows of 3" in stop.why


@pytest.mark.parametrize("answer", ["applied", "unknown", "refused"])
def test_a_change_of_ones_own_is_no_copys(answer: str) -> None:
    """However its answer goes astray."""
    rig = Rig(registers=False)
    _, cas = rig.learn(7, with_life(1))
    assert isinstance(cas, Cas)
    if answer == "applied":
        actions = rig.replica.cas_applied(cas.ticket, 8)
    elif answer == "unknown":
        rig.replica.cas_unknown(cas.ticket)
        actions = rig.learn(8, with_life(2))
    else:  # of one that was sent once more
        actions = rig.replica.cas_refused(cas.ticket, 8, with_life(2))
    assert frames_in(actions, Hello)


def test_a_store_that_is_replaced_while_it_runs_stops() -> None:
    rig = Rig()
    rig.follow()
    replicas = {**a_record().replicas, "a": Member("host-a:1", "other", 1)}
    (stop,) = rig.learn(8, a_record(replicas=replicas))
    assert isinstance(stop, Stop)
    assert "other" in stop.why


def test_a_store_with_bytes_is_no_new_replica() -> None:
    replicas = {**a_record().replicas, "a": Member("host-a:1", "old", 5)}
    (stop,) = Rig(registers=False).learn(7, a_record(replicas=replicas))
    assert isinstance(stop, Stop)
    assert "bytes from 0 to 100" in stop.why
    empty = Rig(end=0, epochs=(), confirm_offset=0, promised_epoch=0, registers=False)
    _, cas = empty.learn(7, a_record(replicas=replicas))
    assert isinstance(cas, Cas)
    assert cas.record.iss == ("b", "c")


def test_the_last_one_that_has_everything_cannot_be_replaced_by_an_empty_store() -> None:
    replicas = {**a_record().replicas, "a": Member("host-a:1", "old", 5)}
    rig = Rig(end=0, epochs=(), confirm_offset=0, promised_epoch=0, registers=False)
    *_, stop = rig.learn(7, a_record(replicas=replicas, iss=("a",), elr=()))
    assert isinstance(stop, Stop)
    assert "only a had every confirmed byte" in stop.why


def test_the_first_store_of_a_group_may_have_bytes() -> None:
    names = [(name, f"host-{name}:1") for name in "abc"]
    _, cas = Rig(epochs=(), promised_epoch=0, registers=False).learn(1, new_record("g", names))
    assert isinstance(cas, Cas)
    assert cas.record.iss == ("a",)


@pytest.mark.parametrize(
    ("promised", "boot_id", "stays"),
    [
        ({"sync_flush": True}, "other", True),
        ({"sync_flush": False}, "boot", True),
        ({"sync_flush": False, "clean": True}, "other", True),
        ({"sync_flush": False}, "other", False),
    ],
)
def test_after_a_cut_of_power(promised: dict[str, Any], boot_id: str, stays: bool) -> None:
    """Rule 9; also where this run would flush first, and the last one did not."""
    rig = Rig(boot_id=boot_id, registers=False, **promised)
    keep, cas = rig.learn(7, with_life(1))
    assert isinstance(keep, Keep)
    assert isinstance(cas, Cas)
    assert ("a" in cas.record.iss) is stays
    assert (keep.promises.boot_id == boot_id) is stays
    actions = rig.replica.cas_applied(cas.ticket, 8)
    # Once it has left, its log is as good as the record says.
    assert [each.promises.boot_id for each in of_kind(actions, Keep)] == [boot_id] * (not stays)


def test_an_orderly_end_is_remembered() -> None:
    (keep,) = Rig(boot_id="boot").replica.ending()
    assert isinstance(keep, Keep)
    assert keep.promises.clean
    unsure = Rig(boot_id="other", sync_flush=False, registers=False)
    unsure.learn(7, with_life(1))  # it is not known to have left
    assert unsure.replica.ending() == []


def test_an_engine_that_has_lost_something_is_not_believed() -> None:
    actions = Rig(promised_epoch=6, registers=False).learn(7, a_record())
    assert refused(actions) == (Why.ENGINE_BEHIND, 6, 5)


def test_old_answers_of_the_engine_say_nothing() -> None:
    rig = Rig()
    rig.follow()
    assert rig.learn(6, a_record(master="c")) == []
    assert rig.learn(7, a_record(master="c")) == []
    assert rig.learn(8, None) == []
    assert frames_in(rig.learn(8, a_record(master="c")), Hello)


# --- following ------------------------------------------------------------------------------------


def test_a_handshake_promises_before_it_answers() -> None:
    rig = Rig()
    nonce = rig.follow()
    keep, marks = rig.replica.frame("b", welcome(nonce))
    assert isinstance(keep, Keep)
    assert keep.promises.promised_epoch == 5
    assert marks == Send("b", Marks("g", 5, nonce, (Mark(100, 90, 1100), Mark(60, 50, 1060))))
    kept, ack = rig.replica.frame("b", Agreed("g", 5, nonce, 100))
    assert isinstance(kept, Keep)
    assert kept.promises.epochs[-1] == EpochStart(5, 100)
    assert ack == Send("b", Ack("g", 5, nonce, 100, 0))


def test_a_log_is_cut_where_it_parts_from_the_masters() -> None:
    rig = Rig()
    nonce = rig.follow()
    table = (EpochStart(1, 0), EpochStart(5, 60))
    actions = rig.replica.frame("b", welcome(nonce, epochs=table))
    assert frames_in(actions, Marks)[0].marks == (Mark(60, 50, 1060),)
    actions = rig.replica.frame("b", Agreed("g", 5, nonce, 60))
    # First the cut, durably; then the table; then the word.
    assert [type(each) for each in actions] == [Truncate, Keep, Send]
    assert frames_in(actions, Ack)[0].held == 60


def test_confirmed_bytes_are_never_cut() -> None:
    rig = Rig()
    nonce = rig.follow()
    table = (EpochStart(1, 0), EpochStart(5, 30))
    rig.replica.frame("b", welcome(nonce, epochs=table))
    (stop,) = rig.replica.frame("b", Agreed("g", 5, nonce, 30))
    assert isinstance(stop, Stop)
    assert "confirmed up to 40, has only what lies below 30" in stop.why


def test_an_agreement_on_what_was_not_marked() -> None:
    rig = Rig()
    nonce = rig.follow()
    rig.replica.frame("b", welcome(nonce))
    actions = rig.replica.frame("b", Agreed("g", 5, nonce, 70))
    assert refused(actions) == (Why.NOT_MARKED, 100, 70)


def test_a_log_that_has_nothing_in_common_keeps_none_of_its_bytes() -> None:
    """Nor those before the beginning of the master's, which nobody can compare any more."""
    rig = Rig(confirm_offset=0)
    nonce = rig.follow()
    actions = rig.replica.frame("b", welcome(nonce, epochs=(EpochStart(5, 50),), begin=50))
    assert frames_in(actions, Marks)[0].marks == ()
    actions = rig.replica.frame("b", Apart("g", 5, nonce, 50))
    assert [type(each) for each in actions] == [StartOver, Keep, Send]


@pytest.mark.parametrize(("begin", "is_refused"), [(109, True), (110, False), (111, False)])
def test_a_master_may_have_deleted_what_it_sent_itself(begin: int, is_refused: bool) -> None:
    rig = Rig(end=0, epochs=(), confirm_offset=0, promised_epoch=0)
    nonce = rig.follow()
    rig.replica.frame("b", welcome(nonce, epochs=(EpochStart(5, 0),)))
    rig.replica.frame("b", Apart("g", 5, nonce, 0))
    for offset in range(0, 110, 10):
        rig.replica.frame("b", bytes_frame(nonce, offset=offset), 10, 7)
    (hello,) = frames_in(rig.replica.tick(20.0), Hello)
    rig.replica.frame("b", welcome(hello.nonce, epochs=(EpochStart(5, 0),), begin=begin))
    actions = rig.replica.frame("b", Apart("g", 5, hello.nonce, begin))
    assert bool(of_kind(actions, Refuse)) is is_refused
    assert bool(of_kind(actions, StartOver)) is not is_refused


def test_an_empty_log_goes_on_where_it_has_begun() -> None:
    rig = Rig(begin=100)
    nonce = rig.follow()
    actions = rig.replica.frame("b", welcome(nonce))
    assert frames_in(actions, Marks)[0].marks == (Mark(100, 100, 0),)
    actions = rig.replica.frame("b", Agreed("g", 5, nonce, 100))
    assert [type(each) for each in actions] == [Keep, Send]


def test_a_store_that_replaces_another_numbers_its_lives_behind_it() -> None:
    """A word of the old one's session is none of the new one's."""
    replicas = {**a_record().replicas, "a": Member("host-a:1", "old", 5)}
    rig = Rig(end=0, epochs=(), confirm_offset=0, promised_epoch=0, registers=False)
    keep, cas = rig.learn(7, a_record(replicas=replicas))
    assert isinstance(keep, Keep)
    assert isinstance(cas, Cas)
    assert keep.promises.incarnation == cas.record.replicas["a"].incarnation == 6


def test_what_the_present_epoch_wrote_is_never_cut() -> None:
    rig = Rig()
    nonce = rig.stream()
    rig.replica.frame("b", Bytes("g", 5, nonce, 100, 10, 7, 0), 10, 7)
    assert refused(rig.replica.frame("b", Agreed("g", 5, nonce, 100)))[0] is Why.OTHER_SESSION
    rig.replica.tick(9.0)  # nothing heard for long: a new session
    (hello,) = frames_in(rig.replica.tick(20.0), Hello)
    rig.replica.frame("b", welcome(hello.nonce))
    actions = rig.replica.frame("b", Agreed("g", 5, hello.nonce, 100))
    assert refused(actions) == (Why.CURRENT_EPOCH, 110, 100)


def test_an_empty_log_begins_where_the_masters_begins() -> None:
    rig = Rig(end=0, epochs=(), confirm_offset=0, promised_epoch=0)
    nonce = rig.follow()
    actions = rig.replica.frame("b", welcome(nonce, begin=50))
    assert frames_in(actions, Marks)[0].marks == ()
    actions = rig.replica.frame("b", Apart("g", 5, nonce, 50))
    assert [type(each) for each in actions] == [StartOver, Keep, Send]
    assert actions[1].promises.confirm_offset == 50  # type: ignore[attr-defined]


def test_a_log_of_which_nothing_is_confirmed_may_begin_anew() -> None:
    """Also before its own beginning; what it then has is no damaged log."""
    rig = Rig(begin=40)
    nonce = rig.follow()
    rig.replica.frame("b", welcome(nonce, begin=20))
    actions = rig.replica.frame("b", Apart("g", 5, nonce, 20))
    assert actions[0] == StartOver(20)
    assert actions[1].promises.confirm_offset == 20  # type: ignore[attr-defined]


def test_the_longer_log_goes_first() -> None:
    rig = Rig()
    rig.replica.session(100.0)
    rig.replica.sessions(lives("a", "c"))
    rig.learn(7, a_record())
    (bid, _) = frames_in(rig.replica.tick(2.0), Bid)
    assert (bid.last_epoch, bid.end) == (4, 100)
    rig.replica.frame("c", Bid("g", 4, 1, 4, 110))
    rig.replica.frame("x", Bid("g", 4, 1, 4, 990))
    assert not of_kind(rig.replica.tick(2.3), Cas)
    assert of_kind(rig.replica.tick(2.7), Cas)  # it has not come: then without it


def test_a_log_that_ends_before_the_masters_begins_is_kept() -> None:
    rig = Rig()
    nonce = rig.follow()
    rig.replica.frame("b", welcome(nonce, begin=110))
    (stop,) = rig.replica.frame("b", Apart("g", 5, nonce, 110))
    assert isinstance(stop, Stop)


@pytest.mark.parametrize(
    "table",
    [
        (),
        (EpochStart(1, 0), EpochStart(4, 60)),  # not up to its own epoch
        (EpochStart(5, 100), EpochStart(5, 100)),
        (EpochStart(4, 100), EpochStart(5, 60)),
        (EpochStart(1, 0), EpochStart(5, 131)),  # beyond its end
    ],
)
def test_a_table_that_cannot_be_is_not_taken_over(table: tuple[EpochStart, ...]) -> None:
    rig = Rig()
    actions = rig.replica.frame("b", welcome(rig.follow(), epochs=table))
    assert refused(actions) == (Why.BAD_TABLE, 5, 130)
    assert not of_kind(actions, Keep)


def test_a_welcome_of_an_older_epoch_or_of_somebody_else() -> None:
    rig = Rig()
    nonce = rig.follow()
    old = welcome(nonce, epoch=3)
    assert refused(rig.replica.frame("b", old)) == (Why.OLD_EPOCH, 4, 3)
    not_so_old = welcome(nonce, epoch=4)
    assert refused(rig.replica.frame("b", not_so_old)) == (Why.NOT_THE_MASTER, 5, 4)
    assert refused(rig.replica.frame("c", welcome(nonce)))[0] is Why.OTHER_SESSION
    other = welcome(nonce - 1)
    assert refused(rig.replica.frame("b", other)) == (Why.OTHER_SESSION, nonce, nonce - 1)


def bytes_frame(session: int, **changes: Any) -> Bytes:
    return msgspec.structs.replace(Bytes("g", 5, session, 100, 10, 7, 0), **changes)


def test_bytes_are_taken_in_order_and_acknowledged_when_flushed() -> None:
    rig = Rig()
    nonce = rig.stream()
    actions = rig.replica.frame("b", bytes_frame(nonce, confirm=105), 10, 7)
    assert actions == [Append(100, 10), Confirmed(105)]
    assert rig.replica.flushed(110) == [Send("b", Ack("g", 5, nonce, 110, 0))]
    assert rig.replica.flushed(110) == []


def test_what_is_in_the_page_cache_counts_under_async_flush() -> None:
    rig = Rig(settings=msgspec.structs.replace(SETTINGS, sync_flush=False))
    nonce = rig.stream()
    actions = rig.replica.frame("b", bytes_frame(nonce), 10, 7)
    assert actions == [Append(100, 10), Send("b", Ack("g", 5, nonce, 110, 0))]


@pytest.mark.parametrize(
    ("changes", "length", "crc", "facts", "is_new_session"),
    [
        ({"group": "h"}, 10, 7, (Why.OTHER_GROUP, 0, 0), False),
        ({"epoch": 4}, 10, 7, (Why.OLD_EPOCH, 5, 4), False),
        ({"epoch": 6}, 10, 7, (Why.OTHER_SESSION,), False),
        ({"nonce": 3}, 10, 7, (Why.OTHER_SESSION,), False),
        ({"offset": 110}, 10, 7, (Why.GAP, 100, 110), True),
        ({"offset": 90}, 10, 7, (Why.OVERLAP, 100, 90), False),
        ({}, 9, 7, (Why.WRONG_LENGTH, 9, 10), True),
        ({"length": 0}, 0, 7, (Why.WRONG_LENGTH, 0, 0), True),
        ({}, 10, 8, (Why.WRONG_CRC, 8, 7), True),
    ],
)
def test_bytes_that_are_refused(
    changes: dict[str, Any], length: int, crc: int, facts: tuple[Any, ...], is_new_session: bool
) -> None:
    rig = Rig()
    nonce = rig.stream()
    actions = rig.replica.frame("b", bytes_frame(nonce, **changes), length, crc)
    assert refused(actions)[: len(facts)] == facts
    hellos = frames_in(actions, Hello)
    assert [each.nonce > nonce for each in hellos] == [True] * is_new_session


def test_bytes_from_somebody_else_are_refused() -> None:
    rig = Rig()
    nonce = rig.stream()
    assert refused(rig.replica.frame("c", bytes_frame(nonce), 10, 7))[0] is Why.OTHER_SESSION


def test_a_lost_frame_is_noticed_by_the_next_beat() -> None:
    rig = Rig()
    nonce = rig.stream()
    actions = rig.replica.frame("b", Beat("g", 5, nonce, 110, 0, 1))
    assert refused(actions) == (Why.GAP, 100, 110)
    assert frames_in(actions, Hello)


def test_a_new_master_in_the_record_ends_the_session() -> None:
    rig = Rig()
    nonce = rig.stream()
    assert frames_in(rig.learn(8, a_record(epoch=6, master="c")), Hello)
    assert refused(rig.replica.frame("b", bytes_frame(nonce), 10, 7))[0] is Why.OTHER_SESSION


def test_a_master_that_was_elected_again_is_another_one() -> None:
    rig = Rig()
    nonce = rig.stream()
    assert not frames_in(rig.learn(8, a_record(iss=("a", "b"))), Hello)
    (hello,) = frames_in(rig.learn(9, a_record(epoch=7)), Hello)
    assert hello.nonce > nonce


# --- electing -------------------------------------------------------------------------------------


def elect(rig: Rig, record: GroupRecord, alive: list[tuple[str, str, int]]) -> list[Action]:
    rig.replica.session(100.0)
    rig.replica.sessions(alive)
    rig.learn(7, record)
    return [*rig.replica.tick(2.0), *rig.replica.tick(2.3)]


def test_a_member_of_the_set_takes_the_place_of_a_master_that_is_gone() -> None:
    (cas,) = of_kind(elect(Rig(), a_record(), lives("a", "c")), Cas)
    assert (cas.version, cas.record.epoch, cas.record.master) == (7, 6, "a")
    assert cas.record.iss == ("a", "c")


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, "abc"),  # the master is there
        ({"iss": ("b", "c")}, "ac"),  # not in the set
        ({"iss": ("c",), "elr": ("a",)}, "ac"),  # eligible, but one of the set is alive
    ],
)
def test_who_may_not_be_elected(changes: dict[str, Any], alive: str) -> None:
    assert not of_kind(elect(Rig(), a_record(**changes), lives(*alive)), Cas)


def test_who_has_no_session_is_no_candidate() -> None:
    rig = Rig()
    rig.replica.sessions(lives("a", "c"))
    rig.learn(7, a_record())
    assert not of_kind([*rig.replica.tick(2.0), *rig.replica.tick(9.0)], Cas)


def test_an_eligible_replica_is_elected_when_the_whole_set_is_away() -> None:
    record = a_record(iss=("b",), elr=("a",))
    (cas,) = of_kind(elect(Rig(), record, lives("a", "c")), Cas)
    assert (cas.record.iss, cas.record.elr) == (("a",), ("b",))


def test_a_new_master_keeps_its_whole_log_and_promises_first() -> None:
    actions = Rig(flushed=90).lead()
    assert [type(each) for each in actions] == [Keep, Lead, Serve]
    assert actions[0].promises.promised_epoch == 6  # type: ignore[attr-defined]
    assert actions[0].promises.epochs == (*TABLE, EpochStart(6, 100))  # type: ignore[attr-defined]
    assert actions[1:] == [Lead(6, 100), Serve(6, Service.OPEN)]


def test_an_epoch_that_was_led_is_not_led_again() -> None:
    rig = Rig()
    rig.lead()
    actions = rig.replica.frame("c", Hello("g", 7, 1, "uc", 1))
    assert of_kind(actions, StepDown) == [StepDown(6)]
    assert not of_kind(rig.replica.stopped(100), Lead)
    assert not of_kind(rig.learn(10, a_record(epoch=6, master="a")), Lead)
    assert rig.replica.leads == 0


# --- leading --------------------------------------------------------------------------------------


def test_only_a_replica_of_the_record_is_a_follower() -> None:
    """apache/rocketmq#3015: whatever connects is no slave, and its bytes are no word."""
    rig = Rig()
    rig.lead()
    for hello in (Hello("g", 4, 1, "ux", 1), Hello("g", 4, 1, "uc", 2)):
        actions = rig.replica.frame("c", hello)
        assert refused(actions)[0] is Why.UNKNOWN_REPLICA
        assert frames_in(actions, Refused)
    assert refused(rig.replica.frame("x", Hello("g", 4, 1, "ux", 1)))[0] is Why.UNKNOWN_REPLICA
    assert refused(rig.replica.frame("c", Ack("g", 6, 1, 100, 0)))[0] is Why.OTHER_SESSION


def test_all_that_count_have_to_hold_it() -> None:
    rig = Rig()
    rig.lead()
    assert not of_kind(rig.join("b", 100), Confirmed)
    assert of_kind(rig.join("c", 70), Confirmed) == [Confirmed(70)]
    assert of_kind(rig.replica.frame("c", Ack("g", 6, 1, 100, 0)), Confirmed) == [Confirmed(100)]
    assert of_kind(rig.replica.appended(110), Ship) == [
        Ship("b", 6, 1, 100, 10, 100),
        Ship("c", 6, 1, 100, 10, 100),
    ]
    for name in "bc":
        assert not of_kind(rig.replica.frame(name, Ack("g", 6, 1, 110, 0)), Confirmed)
    assert rig.replica.flushed(110) == [Confirmed(110)]


def test_a_master_that_was_replaced_and_removed_has_confirmed_nothing_alone() -> None:
    """By an operator, while its session holds and before it has heard of either: whoever takes its
    place counts for it, and has promised another epoch."""
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    rig.join("c", 100)
    rig.replica.appended(110)
    rig.replica.flushed(110)
    assert not of_kind(rig.replica.frame("c", Ack("g", 6, 1, 110, 0)), Confirmed)  # as b never will
    assert not of_kind(rig.replica.tick(2.0), Confirmed)
    others = {name: each for name, each in a_record().replicas.items() if name != "a"}
    actions = rig.learn(11, a_record(epoch=7, master="b", iss=("b", "c"), replicas=others))
    assert of_kind(actions, StepDown) or of_kind(actions, Stop)
    assert not of_kind(rig.replica.frame("b", Ack("g", 6, 1, 110, 0)), Confirmed)
    assert rig.replica.local.confirm == 100


@pytest.mark.parametrize(
    ("ack", "facts"),
    [
        (Ack("g", 5, 1, 100, 0), (Why.OLD_EPOCH, 6, 5)),
        (Ack("g", 6, 9, 100, 0), (Why.OTHER_SESSION, 1, 9)),
        (Ack("g", 6, 1, 101, 0), (Why.BEYOND_END, 100, 101)),
    ],
)
def test_words_that_do_not_count(ack: AnyFrame, facts: tuple[Why, int, int]) -> None:
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    rig.join("c", 60)
    assert refused(rig.replica.frame("c", ack)) == facts
    assert rig.replica.local.confirm == 60


def test_records_that_differ_are_walked_back_over() -> None:
    """Equal epochs, other bytes: the CRC of the last record decides."""
    rig = Rig()
    rig.lead()
    rig.log.changed.add(100)
    rig.replica.frame("b", Hello("g", 4, 1, "ub", 1))
    marks = (Mark(100, 90, 1100), Mark(60, 50, 1060))
    (agreed,) = frames_in(rig.replica.frame("b", Marks("g", 6, 1, marks)), Agreed)
    assert agreed.offset == 60
    rig.replica.frame("c", Hello("g", 4, 1, "uc", 1))
    (apart,) = frames_in(rig.replica.frame("c", Marks("g", 6, 1, marks[:1])), Apart)
    assert apart.offset == 0


def test_what_is_under_way_is_bounded() -> None:
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    ships = of_kind(rig.replica.appended(200), Ship)
    assert [(each.offset, each.length) for each in ships] == [(100, 10), (110, 10), (120, 10)]
    ships = of_kind(rig.replica.frame("b", Ack("g", 6, 1, 110, 0)), Ship)
    assert [each.offset for each in ships] == [130]


def test_a_joining_member_counts_from_before_it_is_asked_for() -> None:
    rig = Rig()
    rig.lead(iss=("a", "b"))
    rig.join("b", 100)
    rig.join("c", 100)
    (cas,) = of_kind(rig.replica.tick(2.0), Cas)
    assert cas.record.iss == ("a", "b", "c")
    rig.replica.appended(110)
    rig.replica.flushed(110)
    rig.replica.frame("b", Ack("g", 6, 1, 110, 0))
    rig.replica.cas_unknown(cas.ticket)
    rig.learn(9, a_record(epoch=6, master="a", iss=("a", "b")))
    assert rig.replica.local.confirm == 100  # it may still be on its way
    later = rig.learn(10, a_record(epoch=6, master="a", iss=("a", "b"), elr=()))
    assert of_kind(later, Confirmed) == [Confirmed(110)]


@pytest.mark.parametrize(("held", "joins"), [(90, False), (100, True)])
def test_who_lacks_something_of_earlier_epochs_does_not_join(held: int, joins: bool) -> None:
    rig = Rig()
    rig.lead(iss=("a", "b"))
    rig.join("b", 100)
    rig.join("c", held)
    assert bool(of_kind(rig.replica.tick(2.0), Cas)) is joins


def test_who_lags_leaves_and_counts_until_the_engine_says_so() -> None:
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    rig.join("c", 60)
    for tenth in range(11, 110):
        assert not of_kind(rig.replica.tick(tenth / 10), Cas)
        rig.replica.frame("b", Ack("g", 6, 1, 100, 1))
        rig.replica.frame("c", Ack("g", 6, 1, 60, 1))
    (cas,) = of_kind(rig.replica.tick(11.0), Cas)
    assert cas.record.iss == ("a", "b")
    assert rig.replica.local.confirm == 60
    assert of_kind(rig.replica.cas_applied(cas.ticket, 10), Confirmed) == [Confirmed(100)]


def pass_time(
    rig: Rig, until: float, *speaking: str, held: int = 100, since: float = 1.0
) -> list[Cas]:
    """Some replicas answer each beat; what the master wanted changed until then."""
    wanted = []
    for tenth in range(round(since * 10) + 1, round(until * 10) + 1):
        wanted += of_kind(rig.replica.tick(tenth / 10), Cas)
        for name in speaking:
            rig.replica.frame(name, Ack("g", 6, 1, held, 1))
    return wanted


def test_a_silent_one_leaves_sooner_where_enough_others_are() -> None:
    """Its machine is cut off from us and not from the engine: it has a session."""
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    rig.join("c", 100)
    assert not pass_time(rig, 4.9, "b")
    (cas,) = of_kind(rig.replica.tick(5.0), Cas)
    assert (cas.record.master, cas.record.iss) == ("a", ("a", "b"))
    rig.replica.cas_applied(cas.ticket, 10)
    assert not pass_time(rig, 20.0, "b", since=5.0)  # nor does it join again by old words
    assert [each.record.iss for each in pass_time(rig, 20.2, "b", "c", since=20.0)] == [
        ("a", "b", "c")
    ]


@pytest.mark.parametrize("silent", ["b", "c"])
def test_a_silent_one_that_is_needed_is_waited_for(silent: str) -> None:
    rig = Rig()
    rig.lead(iss=("a", silent))
    rig.replica.sessions(lives("a", silent))
    assert not pass_time(rig, 10.9)


def test_what_was_deleted_is_sent_to_nobody() -> None:
    """One that left the set lags: the rest of what it was to get is old, and goes."""
    rig = Rig()
    rig.lead(iss=("a", "b"))
    rig.join("b", 100)
    rig.join("c", 20)  # of the 80 bytes that it lacks 30 are under way
    assert not rig.replica.cleaned(50)
    assert of_kind(rig.replica.frame("c", Ack("g", 6, 1, 30, 0)), Ship) == [
        Ship("c", 6, 1, 50, 10, 100)
    ]
    rig.replica.cleaned(70)
    assert not of_kind(rig.replica.frame("c", Ack("g", 6, 1, 60, 0)), Ship)
    assert refused(rig.replica.frame("c", Ack("g", 6, 1, 60, 0)))[0] is Why.OTHER_SESSION
    rig.replica.frame("c", Hello("g", 4, 2, "uc", 1))
    actions = rig.replica.frame("c", Marks("g", 6, 2, (Mark(60, 50, 1060),)))
    assert frames_in(actions, Apart) == [Apart("g", 6, 2, 70)]


# --- a master without followers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iss", "left", "eligible"),
    [
        (("a", "b", "c"), ("b", "c"), ()),
        (("a", "b"), ("b",), ("a",)),
        (("a",), (), ("a", "c")),
    ],
)
def test_a_master_that_reaches_nobody_gives_up(
    iss: tuple[str, ...], left: tuple[str, ...], eligible: tuple[str, ...]
) -> None:
    """Those that it does not reach are alive, and may reach each other."""
    rig = Rig()
    rig.lead(iss=iss, elr=("c",) if len(iss) == 1 else ())
    assert not pass_time(rig, 4.9)
    actions = rig.replica.tick(5.0)
    (cas,) = of_kind(actions, Cas)
    assert (cas.record.master, cas.record.epoch) == ("", 6)
    assert (cas.record.iss, cas.record.elr) == (left, eligible)
    if len(iss) > 1:  # whoever is elected now may lock and hide messages
        assert Serve(6, Service.UNSURE) in actions
    assert of_kind(rig.replica.cas_applied(cas.ticket, 10), StepDown) == [StepDown(6)]


def test_who_has_given_up_lets_others_go_first() -> None:
    rig = Rig()
    rig.lead(iss=("a",), elr=("c",))
    (cas,) = pass_time(rig, 5.0)
    rig.replica.cas_applied(cas.ticket, 10)
    rig.replica.stopped(100)
    rig.replica.session(100.0)
    assert not pass_time(rig, 5.6, since=5.0)
    (again,) = pass_time(rig, 6.0, since=5.6)  # but if nobody does, it is there
    assert again.record.master == "a"


def test_who_may_have_given_up_is_unsure_until_another_change_came_first() -> None:
    rig = Rig()
    rig.lead()
    (cas,) = pass_time(rig, 5.0)
    rig.replica.cas_unknown(cas.ticket)
    rig.replica.tick(5.1)  # a beat that is younger than the doubt
    for name in "bc":
        rig.join(name, 100, number=99)
    assert rig.replica.local.confirm == 100  # which holds whoever is elected
    (cas,) = pass_time(rig, 5.3, "b", "c", since=5.1)
    assert cas.record.master == ""
    actions = rig.replica.cas_refused(cas.ticket, 10, a_record(epoch=6, master="a"))
    assert actions == [Serve(6, Service.OPEN)]
    assert not pass_time(rig, 9.0, "b", "c", since=5.3)


@pytest.mark.parametrize("alive", ["a", "ab", "ac"])
def test_a_master_is_not_given_up_for_too_few(alive: str) -> None:
    rig = Rig()
    rig.lead()
    rig.replica.sessions(lives(*alive))
    assert not [each for each in pass_time(rig, 30.0) if not each.record.master]


def test_who_comes_back_has_the_time_to_begin() -> None:
    rig = Rig()
    rig.lead()
    rig.replica.sessions(lives("a"))
    (cas,) = pass_time(rig, 6.0)
    rig.replica.cas_applied(cas.ticket, 10)
    pass_time(rig, 20.0, since=6.0)
    rig.replica.sessions(lives("a", "b", "c"))
    assert not pass_time(rig, 24.0, since=20.0)
    assert pass_time(rig, 24.2, since=24.0)[0].record.master == ""


@pytest.mark.parametrize("speaking", ["b", "c"])
def test_a_master_that_reaches_enough_stays(speaking: str) -> None:
    rig = Rig()
    rig.lead()
    rig.join(speaking, 100)
    assert not [each for each in pass_time(rig, 30.0, speaking) if not each.record.master]


def test_a_follower_that_hears_nothing_begins_again_and_again_and_is_not_reached() -> None:
    """Only one direction is cut: its hellos come, our welcome does not get there."""
    rig = Rig()
    rig.lead()
    wanted = []
    for nonce in range(2, 60):
        for name in "bc":
            rig.replica.frame(name, Hello("g", 4, nonce, f"u{name}", 1))
        wanted += pass_time(rig, nonce / 2 + 0.5, since=nonce / 2)
    assert wanted[0].record.master == ""


def test_a_master_that_did_not_get_on_blames_nobody() -> None:
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    rig.replica.session(1000.0)
    assert not of_kind(rig.replica.tick(500.0), Cas)


def test_a_set_that_is_too_small_confirms_nothing() -> None:
    rig = Rig()
    assert Serve(6, Service.SHORT) in rig.lead(iss=("a",), elr=("b",))
    rig.replica.appended(110)
    assert rig.replica.flushed(110) == []


def test_an_older_session_of_a_follower_does_not_come_back() -> None:
    rig = Rig()
    rig.lead()
    rig.join("b", 100, nonce=5)
    assert refused(rig.replica.frame("b", Hello("g", 4, 4, "ub", 1))) == (Why.OTHER_SESSION, 5, 4)
    assert frames_in(rig.replica.frame("b", Hello("g", 4, 6, "ub", 1)), Welcome)


def test_a_follower_that_started_anew_has_to_begin_anew() -> None:
    rig = Rig()
    rig.lead(iss=("a", "b"))
    rig.join("b", 100)
    rig.join("c", 100)
    replicas = {**a_record().replicas, "c": Member("host-c:1", "uc", 2)}
    rig.learn(10, a_record(epoch=6, master="a", iss=("a", "b"), replicas=replicas))
    rig.replica.sessions([*lives("a", "b"), ("c", "uc", 2)])
    assert not of_kind(rig.replica.tick(2.0), Cas)
    assert refused(rig.replica.frame("c", Ack("g", 6, 1, 100, 0)))[0] is Why.OTHER_SESSION


def test_a_master_without_a_session_confirms_nothing_until_the_record_was_read() -> None:
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    assert rig.replica.session(None) == [Serve(6, Service.DEPOSED)]
    rig.join("c", 100)
    assert rig.replica.local.confirm == 40
    (get,) = rig.replica.session(200.0)
    assert isinstance(get, Get)
    same = a_record(epoch=6, master="a")
    assert rig.replica.learned(9, same, get.number - 1) == []
    assert rig.replica.learned(9, same, get.number) == [Serve(6, Service.OPEN)]


def test_a_master_that_was_stopped_past_its_session_wants_fresh_words() -> None:
    """What lies in its sockets when it wakes was said before others may have been elected."""
    rig = Rig()
    rig.lead()
    rig.join("b", 100)
    actions = rig.replica.tick(500.0)
    assert Serve(6, Service.UNSURE) in actions
    (beat,) = frames_in(actions, Beat)
    rig.replica.frame("b", Ack("g", 6, 1, 100, beat.number))
    rig.join("c", 100, number=beat.number - 1)
    assert rig.replica.local.confirm == 40
    actions = rig.replica.frame("c", Ack("g", 6, 1, 100, beat.number + 5))  # as far as was sent
    assert of_kind(actions, Confirmed) == [Confirmed(100)]


def test_who_is_no_master_says_so() -> None:
    rig = Rig()
    rig.follow()
    actions = rig.replica.frame("c", Hello("g", 3, 1, "uc", 1))
    assert refused(actions) == (Why.NOT_LEADING, 4, 3)
    assert frames_in(actions, Refused) == [Refused("g", 4, 1)]


def test_a_deposed_master_follows_only_when_its_log_stands_still() -> None:
    rig = Rig()
    rig.lead()
    deposed = a_record(epoch=7, master="c")
    assert rig.learn(10, deposed) == [StepDown(6)]
    assert rig.replica.tick(3.0)[0:0] == []
    assert rig.replica.leads == 0
    actions = rig.replica.stopped(130)
    (hello,) = frames_in(actions, Hello)
    table = (*TABLE, EpochStart(7, 100))
    actions = rig.replica.frame("c", Welcome("g", 7, hello.nonce, table, 0, 120))
    assert frames_in(actions, Marks)[0].marks[0] == Mark(100, 90, 1100)


# --- the source -----------------------------------------------------------------------------------

CORE = {
    "record", "promises", "frames", "actions", "settings", "local", "link", "registering",
    "electing", "following", "leading", "contact", "replica",
}  # fmt: skip
PURE = {"__future__", "collections", "enum", "itertools", "typing", "zlib", "msgspec"}
DECLARED = ("cometmq.protocol.", "cometmq.conf.group")


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_core_is_pure(name: str) -> None:
    """It knows the protocol's declarations and itself: no I/O, no clock, no chance."""
    tree = ast.parse((ROOT / f"actors/replication/core/{name}.py").read_text())
    modules = [
        module
        for node in ast.walk(tree)
        for module in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    for module in modules:
        own = module.removeprefix("cometmq.actors.replication.core.") in CORE
        assert own or module.startswith(DECLARED) or module.split(".")[0] in PURE
