"""The group's record, a replica's promises, and frames: what they take, and what they refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cometmq.actors.replication.core import frames, record
from cometmq.actors.replication.core.frames import (
    FRAME_BYTES_MAX,
    MARKS_MAX,
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
    decode_frame,
    encode_frame,
)
from cometmq.actors.replication.core.promises import (
    EPOCHS_MAX,
    EpochStart,
    Promises,
    common_ends,
    decode_promises,
    encode_promises,
    with_epoch,
    within,
)
from cometmq.actors.replication.core.record import (
    GroupRecord,
    Member,
    added,
    changed,
    decode_record,
    elected,
    encode_record,
    faults_of,
    impossible,
    new_record,
    registered,
    removed,
)
from cometmq.errors import BadRequest, ConfigError, StoreDamaged

THREE = [("a", "host-a:1"), ("b", "host-b:1"), ("c", "host-c:1")]


def a_record(**changes: Any) -> GroupRecord:
    return msgspec.structs.replace(new_record("g", THREE), **changes)


# --- the record -----------------------------------------------------------------------------------


def test_a_new_group_begins_with_one_store() -> None:
    made = new_record("g", THREE, first="b")
    assert (made.epoch, made.master, made.iss, made.elr) == (0, "", ("b",), ())
    assert decode_record(encode_record(made)) == made


@pytest.mark.parametrize(
    ("replicas", "min_iss", "says"),
    [
        (THREE, 4, "min_iss = 4, but there are 3 replicas"),
        (THREE, 1, "one disk alone"),
        (THREE, 0, "one disk alone"),
        (THREE[:2], 2, "2 replicas: a group that fails over by itself has 3 to 15"),
        ([], 2, "0 replicas"),
        ([(f"r{n}", f"h{n}") for n in range(16)], 2, "16 replicas"),
        ([*THREE, ("a", "host-d:1")], 2, "2 replicas have the id a"),
        ([*THREE, ("d", "host-a:1")], 2, "2 replicas have the address host-a:1"),
        ([*THREE[:2], ("../c", "host-c:1")], 2, "replica '../c'"),
        ([*THREE[:2], ("", "host-c:1")], 2, "replica ''"),
    ],
)
def test_impossible_groups(replicas: list[tuple[str, str]], min_iss: int, says: str) -> None:
    assert any(says in problem for problem in impossible(replicas, min_iss))
    with pytest.raises(ConfigError, match=says.split(":")[0].split("/")[0]):
        new_record("g", replicas, min_iss=min_iss)


def test_all_that_is_impossible_is_told_at_once() -> None:
    problems = impossible([("a", "h"), ("a", "h")], 5)
    assert len(problems) == 4


def test_the_first_one_has_to_be_a_replica() -> None:
    with pytest.raises(ConfigError, match="first = 'd'"):
        new_record("g", THREE, first="d")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iss": ("a", "x")}, "iss names x"),
        ({"elr": ("x",)}, "elr names x"),
        ({"iss": ("a", "a")}, "twice"),
        ({"elr": ("a",)}, "both in iss and in elr"),
        ({"iss": ()}, "nobody could ever be elected"),
        ({"master": "x", "epoch": 1}, "master = x"),
        ({"master": "a"}, "epoch 0"),
        ({"min_iss": 4}, "min_iss = 4"),
    ],
)
def test_impossible_records_are_not_believed(changes: dict[str, Any], says: str) -> None:
    wrong = a_record(**changes)
    assert any(says in problem for problem in faults_of(wrong))
    with pytest.raises(ConfigError, match=r"\w"):
        decode_record(encode_record(wrong))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"group":"g"}', b" " * (record.RECORD_BYTES_MAX + 1)],
)
def test_what_is_no_record(content: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_record(content)


def test_a_record_with_a_field_more_is_of_another_version() -> None:
    content = encode_record(a_record()).replace(b'{"', b'{"later":1,"', 1)
    with pytest.raises(ConfigError, match="later"):
        decode_record(content)


def test_the_largest_group_fits() -> None:
    names = [("r" * 118 + f"{n:02}", "a" * 253 + f"{n:02}") for n in range(15)]
    large = new_record("g" * 120, names, min_iss=15)
    assert len(encode_record(large)) < record.RECORD_BYTES_MAX


def test_a_restart_ends_the_mastership_and_keeps_the_place() -> None:
    led = a_record(epoch=3, master="a", iss=("a", "b"))
    member = Member("host-a:2", "u", 7)
    again = registered(led, "a", member, stays=True)
    assert (again.master, again.epoch, again.iss) == ("", 3, ("a", "b"))
    assert again.replicas["a"] == member
    gone = registered(led, "a", member, stays=False)
    assert (gone.iss, gone.elr) == (("b",), ())
    other = registered(led, "b", Member("host-b:1", "v", 1), stays=False)
    assert (other.master, other.iss, other.elr) == ("a", ("a",), ())


def test_who_leaves_a_set_that_is_too_small_stays_eligible() -> None:
    led = a_record(epoch=3, master="a", iss=("a", "b"))
    small = changed(led, (), {"b"})
    assert (small.iss, small.elr) == (("a",), ("b",))
    grown = changed(small, {"c"}, ())
    assert (grown.iss, grown.elr) == (("a", "c"), ())
    large = a_record(epoch=3, master="a", iss=("a", "b", "c"))
    assert changed(large, (), {"c"}).elr == ()
    both = changed(led, {"c"}, {"b"})
    assert (both.iss, both.elr) == (("a", "c"), ())


def test_an_election_leaves_out_who_is_away() -> None:
    led = a_record(epoch=3, master="a", iss=("a", "b", "c"))
    won = elected(led, "b", {"b", "c"})
    assert (won.epoch, won.master, won.iss, won.elr) == (4, "b", ("b", "c"), ())
    alone = elected(led, "b", {"b"})
    assert (alone.iss, alone.elr) == (("b",), ("a", "c"))
    from_elr = elected(a_record(epoch=3, iss=("a",), elr=("b",)), "b", {"b"})
    assert (from_elr.iss, from_elr.elr) == (("b",), ("a",))


FOUR = added(a_record(master="a", epoch=3, iss=("a", "b")), "d", "host-d:1")


def test_one_more_replica_is_not_in_sync() -> None:
    assert FOUR.replicas["d"] == Member("host-d:1")
    assert (FOUR.epoch, FOUR.master, FOUR.iss, FOUR.elr) == (3, "a", ("a", "b"), ())


@pytest.mark.parametrize(
    ("replica", "address", "says"),
    [
        ("a", "host-e:1", "a is a replica of g already, at host-a:1"),
        ("e", "host-a:1", "2 replicas have the address host-a:1"),
        ("e", "host-e", "e at host-e: must be an id .* at a host:port"),
        ("e", "host-e:0", "e at host-e:0: must be"),
        ("e", "tcp://host-e:1", "e at tcp://host-e:1: must be"),
        ("e", "host-e:1;f-host-f:1", "must be"),
        ("e-f", "host-e:1", "e-f at host-e:1: must be"),
        ("e f", "host-e:1", "must be an id"),
        ("", "host-e:1", "must be an id"),
        ("e", "h" * 256, "must be an id"),
        ("e", "h" * 256 + ":1", "cannot be read"),
    ],
)
def test_replicas_that_cannot_be_added(replica: str, address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        added(a_record(), replica, address)


def test_a_group_has_at_most_so_many_replicas() -> None:
    full = FOUR
    for each in range(4, 15):
        full = added(full, f"x{each}", f"host-x:{each}")
    with pytest.raises(ConfigError):
        added(full, "x15", "host-x:15")


@pytest.mark.parametrize("replica", ["c", "d"])
def test_who_is_not_needed_is_removed(replica: str) -> None:
    left = removed(FOUR, replica)
    assert set(left.replicas) == {"a", "b", "c", "d"} - {replica}
    assert (left.epoch, left.master, left.iss) == (3, "a", ("a", "b"))


def test_who_is_in_sync_is_removed_where_enough_others_are() -> None:
    left = removed(msgspec.structs.replace(FOUR, iss=("a", "b", "c")), "b")
    assert left.iss == ("a", "c")


@pytest.mark.parametrize(
    ("changes", "replica", "says"),
    [
        ({}, "e", ["g has no replica e"]),
        ({"iss": ("a", "b", "c")}, "a", ["a is the master"]),
        ({}, "b", ["b is one of 2 replicas in sync, of which the group needs 2"]),
        ({}, "a", ["a is the master", "a is one of 2 replicas in sync"]),
        ({"iss": ("a",), "elr": ("b",)}, "b", ["b has all that is confirmed, and too few"]),
        ({"min_iss": 4, "iss": ("a",)}, "c", ["without c: min_iss = 4, but there are 3 replicas"]),
    ],
)
def test_who_is_needed_is_not_removed(
    changes: dict[str, Any], replica: str, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        removed(msgspec.structs.replace(FOUR, **changes), replica)
    assert [said[: len(each)] for said, each in zip(raised.value.problems, says, strict=True)] == (
        says
    )


def test_three_stay() -> None:
    with pytest.raises(
        ConfigError, match="without c: 2 replicas: a group that fails over by itself has 3"
    ):
        removed(a_record(), "c")


# --- promises -------------------------------------------------------------------------------------

PROMISED = Promises(
    group="g",
    replica="a",
    store_uuid="u",
    incarnation=3,
    promised_epoch=9,
    epochs=(EpochStart(1, 0), EpochStart(4, 100), EpochStart(9, 100)),
    confirm_offset=77,
)


def test_promises_come_back() -> None:
    assert decode_promises(encode_promises(PROMISED)) == PROMISED


def test_every_flipped_bit_of_promises_is_found() -> None:
    """Never another value; the line end that closes them says nothing."""
    content = encode_promises(PROMISED)
    for index in range(len(content) - 1):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[index] ^= 1 << bit
            with pytest.raises(StoreDamaged):
                decode_promises(bytes(flipped))


def test_promises_that_are_cut_off_are_found() -> None:
    content = encode_promises(PROMISED)
    for length in range(len(content) - 1):
        with pytest.raises(StoreDamaged):
            decode_promises(content[:length])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"epochs": (EpochStart(4, 0), EpochStart(1, 100))},
        {"epochs": (EpochStart(1, 100), EpochStart(4, 50))},
        {"epochs": (EpochStart(1, 0), EpochStart(1, 0))},
        {"epochs": tuple(EpochStart(n, n) for n in range(EPOCHS_MAX + 1))},
        {"store_uuid": "u" * 70_000},
    ],
)
def test_promises_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(StoreDamaged):
        decode_promises(encode_promises(msgspec.structs.replace(PROMISED, **changes)))


def test_the_largest_table_fits() -> None:
    epochs = tuple(EpochStart(n, (1 << 62) + n) for n in range(EPOCHS_MAX))
    large = msgspec.structs.replace(PROMISED, epochs=epochs)
    assert decode_promises(encode_promises(large)) == large
    welcome = Welcome("g" * 120, 1 << 62, 1 << 62, epochs, 1 << 62, 1 << 62)
    assert len(encode_frame(welcome)) < FRAME_BYTES_MAX


# --- the epoch table ------------------------------------------------------------------------------


def table(*entries: tuple[int, int]) -> tuple[EpochStart, ...]:
    return tuple(EpochStart(*entry) for entry in entries)


def test_a_table_tells_of_what_is_there() -> None:
    epochs = table((1, 0), (2, 50), (5, 50), (7, 90))
    assert within(epochs, 0, 89) == epochs[:3]
    assert within(epochs, 0, 90) == epochs
    assert within(epochs, 60, 100) == epochs[2:]
    assert within(epochs, 49, 100) == epochs
    assert within((), 0, 0) == ()
    assert with_epoch(epochs, 9, 0, 70) == table((1, 0), (2, 50), (5, 50), (9, 70))
    many = tuple(EpochStart(n, n) for n in range(EPOCHS_MAX))
    assert len(with_epoch(many, 5000, 0, 9000)) == EPOCHS_MAX


@pytest.mark.parametrize(
    ("own", "own_end", "other", "other_end", "ends"),
    [
        (table((1, 0)), 50, table((1, 0)), 80, [50]),
        (table((1, 0)), 80, table((1, 0)), 50, [50]),
        (table((1, 0)), 80, table((1, 0), (2, 60)), 100, [60]),
        (table((1, 0), (2, 60)), 80, table((1, 0), (3, 70)), 100, [60]),
        (table((1, 0), (2, 60)), 80, table((1, 0), (2, 60), (3, 70)), 100, [70, 60]),
        (table((1, 0), (2, 60)), 80, table((1, 0), (2, 50)), 100, [50]),
        (table((2, 0)), 80, table((3, 0)), 100, []),
        ((), 0, table((1, 0)), 100, []),
        # Taken over from the master, and not caught up yet.
        (table((1, 0), (2, 60), (3, 90)), 40, table((1, 0), (2, 60), (3, 90)), 99, [40, 40, 40]),
    ],
)
def test_where_logs_may_be_the_same(
    own: tuple[EpochStart, ...],
    own_end: int,
    other: tuple[EpochStart, ...],
    other_end: int,
    ends: list[int],
) -> None:
    assert common_ends(own, own_end, other, other_end) == ends


def test_logs_are_the_same_up_to_where_their_tables_say() -> None:
    """Against the bytes themselves: random histories of masterships, each from some older log."""
    for seed in range(300):
        rng = random.Random(seed)
        logs: list[tuple[list[int], tuple[EpochStart, ...]]] = [([], ())]
        for epoch in range(1, 12):
            log, epochs = rng.choice(logs)
            kept = log[: rng.randint(0, len(log))]  # a follower may lack its end
            epochs = with_epoch(epochs, epoch, 0, len(kept))
            logs.append((kept + [epoch] * rng.randint(0, 4), epochs))
        for _ in range(20):
            (one, own), (two, other) = rng.choice(logs), rng.choice(logs)
            ends = common_ends(own, len(one), other, len(two))
            assert sorted(ends, reverse=True) == ends
            for end in ends:
                assert one[:end] == two[:end], seed
            same = next(
                (at for at, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
                min(len(one), len(two)),
            )
            if same and own and other and own[0] == other[0]:
                assert ends, seed


# --- frames ---------------------------------------------------------------------------------------

FRAMES: list[AnyFrame] = [
    Hello("g", 3, 7, "u", 4),
    Welcome("g", 3, 7, table((1, 0), (3, 9)), 0, 20),
    Marks("g", 3, 7, (Mark(9, 5, 0xFFFFFFFF), Mark(4, 0, 0))),
    Agreed("g", 3, 7, 9),
    Apart("g", 3, 7, 9),
    Bytes("g", 3, 7, 9, 11, 0x12345678, 9),
    Beat("g", 3, 7, 20, 9, 5),
    Ack("g", 3, 7, 20, 5),
    Bid("g", 3, 7, 2, 20),
    Refused("g", 3, 7),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_come_back(frame: AnyFrame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


def test_hostile_frames_are_refused_and_never_anything_else() -> None:
    rng = random.Random(5)
    for _ in range(4000):
        content = bytearray(encode_frame(rng.choice(FRAMES)))
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        del content[rng.randint(1, len(content)) :]
        try:
            found = decode_frame(bytes(content))
        except BadRequest:
            continue
        assert isinstance(found, frames.Frame)
        assert found.epoch >= 0
        assert found.nonce >= 0


OUT_OF_BOUNDS: list[Callable[[], Any]] = [
    lambda: Ack("g", 3, 7, -1, 0),
    lambda: Ack("g", -3, 7, 1, 0),
    lambda: Ack("g", 3, 1 << 63, 1, 0),
    lambda: Ack("", 3, 7, 1, 0),
    lambda: Ack("../g", 3, 7, 1, 0),
    lambda: Bytes("g", 3, 7, 0, 1, 1 << 32, 0),
    lambda: Marks("g", 3, 7, (Mark(1, 0, 0),) * (MARKS_MAX + 1)),
    lambda: Welcome("g", 3, 7, (EpochStart(1, 1),) * (EPOCHS_MAX + 1), 0, 0),
]


@pytest.mark.parametrize("frame", OUT_OF_BOUNDS)
def test_frames_out_of_bounds(frame: Callable[[], Any]) -> None:
    with pytest.raises(BadRequest):
        decode_frame(encode_frame(frame()))


def test_a_frame_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(BadRequest, match="65537 bytes, at most 65536"):
        decode_frame(b"\x00" * (FRAME_BYTES_MAX + 1))
