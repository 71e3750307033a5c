"""Commits that the kernel makes as they came: as the codec reads them, and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.actors.tables.group_share import ConsumerGroup
from cometmq.actors.tables.offsets import OffsetBook
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    PROTOCOL_VERSION,
    Command,
    CommitOffsets,
    Ping,
    QueueKey,
    QueueOffset,
    tag_of,
)
from cometmq.protocol.configs import TopicConfig
from cometmq.protocol.errors import CometError
from cometmq.protocol.ledger import OffsetSet, Place, decode_entry, entry_of, pack_change
from cometmq.shm.kernel._kernel import (
    Commits,
    QueueOwners,
    is_late,
    is_queue_of,
    run_length,
)

TAG = tag_of(CommitOffsets)
QUEUES = 4
ROOM = 262_144
EDGES = [
    0, 1, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1,
]  # fmt: skip


@dataclass
class House:
    """A book, and what is around it."""

    book: OffsetBook = field(default_factory=lambda: OffsetBook({}))
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    groups: dict[str, object] = field(default_factory=dict)
    members: dict[str, ConsumerGroup] = field(default_factory=dict)
    popped: dict[tuple[str, str, int], object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commits = Commits(
            rows=self.book.table,
            topics=self.topics,
            groups=self.groups,
            members=self.members,
            popped=self.popped,
            queue_key=QueueKey,
            tag=TAG,
            change_tag=tag_of(OffsetSet),
            version=PROTOCOL_VERSION,
        )

    def put(self, group: str, topic: str, offset: int = 0, queues: int = QUEUES) -> None:
        self.groups[group] = object()
        self.topics[topic] = TopicConfig(
            topic_name=topic, read_queue_nums=queues, write_queue_nums=queues
        )
        for queue_id in range(queues):
            self.book.apply(OffsetSet(group, topic, queue_id, offset))

    def take(self, *said: Command | bytes, room: int = ROOM, now: float = 0) -> Any:
        heads = [each if isinstance(each, bytes) else frames.pack(7, each) for each in said]
        return self.commits.take(heads, 0, 0, room, now)

    def table(self) -> dict[str, dict[int, int]]:
        return {key: dict(row.items()) for key, row in self.book.table.items()}


@pytest.fixture
def house() -> House:
    house = House()
    house.put("g", "t")
    return house


def join(house: House, member: str, group: str = "g") -> dict[QueueKey, int]:
    """The member's queues, with their epochs."""
    counts = {topic: config.read_queue_nums for topic, config in house.topics.items()}
    share = house.members.setdefault(
        group, ConsumerGroup(group, counts, session_timeout_s=10, first_version=1_000)
    )
    share.join(member, dict.fromkeys(counts, "*"), [], version=-1, now=0)
    mine = share.share_of(member)
    return dict(zip(mine.queues, mine.epochs, strict=True))


def changes_in(packed: bytes, count: int) -> list[Any]:
    return list(decode_entry(entry_of(Place(1, 1), [packed], count))[1])


# --- what it makes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name_bytes", [1, 31, 32, 127, 255])
@pytest.mark.parametrize("offset", EDGES)
def test_the_change_is_the_codecs(name_bytes: int, offset: int) -> None:
    house, group, topic = House(), "g" * name_bytes, "t" * name_bytes
    house.put(group, topic, offset=0 if offset else 1)
    command = CommitOffsets(group, [QueueOffset(topic, 3, offset)])
    if not offset:  # set back: there is a line of the log to be written
        assert house.take(command) == (0, b"", [])
        return
    made, packed, undo = house.take(command)
    assert (made, undo) == (1, [(f"{topic}@{group}", 3, 0)])
    assert packed == pack_change(OffsetSet(group, topic, 3, offset))
    assert house.book.get(group, topic, 3) == offset


def test_a_queue_id_of_several_bytes() -> None:
    house = House()
    house.put("g", "t", queues=1_000)
    command = CommitOffsets("g", [QueueOffset("t", queue_id, 1) for queue_id in (127, 128, 999)])
    made, packed, _ = house.take(command)
    expected = [OffsetSet("g", "t", queue_id, 1) for queue_id in (127, 128, 999)]
    assert (made, packed) == (1, b"".join(map(pack_change, expected)))


def test_ids_that_hardly_any_topic_has_are_left_alone() -> None:
    """They lie in no array."""
    house = House()
    house.put("g", "t", queues=1_025)
    assert house.take(CommitOffsets("g", [QueueOffset("t", 1_024, 1)])) == (0, b"", [])
    assert house.take(CommitOffsets("g", [QueueOffset("t", 1_023, 1)]))[0] == 1


def test_several_offsets_of_several_topics(house: House) -> None:
    house.put("g", "ü")
    wanted = [("t", 0, 5), ("ü", 0, 6), ("t", 1, 7), ("t", 0, 9), ("ü", 3, 0)]
    made, packed, undo = house.take(CommitOffsets("g", [QueueOffset(*each) for each in wanted]))
    assert made == 1
    moved = [OffsetSet("g", topic, queue_id, offset) for topic, queue_id, offset in wanted[:4]]
    assert changes_in(packed, 4) == moved  # the last one says what stands there
    assert undo == [("t@g", 0, 0), ("ü@g", 0, 0), ("t@g", 1, 0), ("t@g", 0, 5)]
    before = House()
    before.put("g", "t")
    before.put("g", "ü")
    house.book.made(undo)
    house.book.undo(undo)
    assert house.table() == before.table()


def test_a_run_goes_on_to_the_first_that_is_not_plain(house: House) -> None:
    commits = [CommitOffsets("g", [QueueOffset("t", 0, n)]) for n in range(1, 6)]
    stranger = CommitOffsets("g", [QueueOffset("unknown", 0, 1)])
    heads = [frames.pack(n, each) for n, each in enumerate([*commits[:3], stranger, *commits[3:]])]
    made, packed, undo = house.commits.take(heads, 1, 0, ROOM, 0)
    assert (made, len(undo)) == (2, 2)
    assert changes_in(packed, 2) == [OffsetSet("g", "t", 0, 2), OffsetSet("g", "t", 0, 3)]
    assert house.commits.take(heads, 3, 0, ROOM, 0) == (0, b"", [])
    assert house.commits.take(heads, 4, 0, ROOM, 0)[0] == 2
    assert house.commits.take(heads, 6, 0, ROOM, 0) == (0, b"", [])
    assert house.commits.take(heads, 60, 0, ROOM, 0) == (0, b"", [])


def test_in_packets_of_a_line(house: House) -> None:
    packet = frames.join(frames.pack(7, CommitOffsets("g", [QueueOffset("t", 0, 5)])), ())
    assert packet is not None
    assert house.commits.take([packet], 0, frames.LONE_FRAME, ROOM, 0)[0] == 1
    two = frames.join(frames.pack(8, CommitOffsets("g", [QueueOffset("t", 0, 6)])), (b"more",))
    assert two is not None
    assert house.commits.take([two], 0, frames.LONE_FRAME, ROOM, 0)[0] == 0
    for wrong in (-1, 1, 4, 6):
        with pytest.raises(ValueError, match="behind"):
            house.commits.take([packet], 0, wrong, ROOM, 0)
        with pytest.raises(ValueError, match="behind"):
            run_length([packet], 0, wrong, TAG, ROOM)


def test_there_is_room_for_so_much(house: House) -> None:
    """What a change takes at most is counted, so that nothing is half made."""
    one = CommitOffsets("g", [QueueOffset("t", 0, (1 << 63) - 1), QueueOffset("t", 1, 1)])
    at_most = 2 * (len("g") + len("t") + 32)
    assert house.take(one, room=at_most - 1) == (0, b"", [])
    assert house.book.get("g", "t", 1) == 0
    made, packed, _ = house.take(one, one, room=at_most)
    assert made == 1
    assert len(packed) <= at_most


# --- what it leaves alone -------------------------------------------------------------------------


def not_plain() -> list[Any]:
    one = [QueueOffset("t", 0, 5)]
    return [
        pytest.param(Ping(), id="another command"),
        pytest.param(CommitOffsets("unknown", one), id="a group that is not known"),
        pytest.param(CommitOffsets("", one), id="no group"),
        pytest.param(CommitOffsets("g", [*one, QueueOffset("u", 0, 5)]), id="no such topic"),
        pytest.param(CommitOffsets("g", [*one, QueueOffset("t", QUEUES, 5)]), id="no such queue"),
        pytest.param(CommitOffsets("g", [*one, QueueOffset("t", -1, 5)]), id="a queue below 0"),
        pytest.param(CommitOffsets("g", [*one, QueueOffset("t", 1, -1)]), id="an offset below 0"),
        pytest.param(CommitOffsets("g", one, "m"), id="no member"),
        pytest.param(CommitOffsets("g", one, seek=True), id="a seek"),
        pytest.param(CommitOffsets("g", one, force=True), id="by force"),
        pytest.param(CommitOffsets("new", one), id="nothing committed in the topic"),
        pytest.param(CommitOffsets("g", [QueueOffset("wide", 2, 5)]), id="nothing in the queue"),
        pytest.param(CommitOffsets("g", [*one, QueueOffset("far", 0, 8)]), id="set back"),
    ]


@pytest.mark.parametrize("command", not_plain())
def test_what_is_not_plain_changes_nothing(house: House, command: Command) -> None:
    house.groups["new"] = object()
    house.put("g", "far", offset=9)
    house.put("g", "wide", queues=2)
    house.topics["wide"] = TopicConfig(topic_name="wide", read_queue_nums=3, write_queue_nums=1)
    before = house.table()
    assert house.take(command) == (0, b"", [])
    assert house.table() == before


def test_what_somebody_has_popped_is_not_plain(house: House) -> None:
    house.popped["g", "t", 1] = object()
    assert house.take(CommitOffsets("g", [QueueOffset("t", 1, 5)]))[0] == 0
    assert house.take(CommitOffsets("g", [QueueOffset("t", 0, 5)]))[0] == 1
    del house.popped["g", "t", 1]
    assert house.take(CommitOffsets("g", [QueueOffset("t", 1, 5)]))[0] == 1


def test_a_commit_is_an_owners(house: House) -> None:
    first = join(house, "a")
    mine, epoch = QueueKey("t", 0), first[QueueKey("t", 0)]
    share = house.members["g"]

    def commit(member: str, offset: int, epoch: int, queue_id: int = 0) -> bool:
        said = CommitOffsets("g", [QueueOffset("t", queue_id, offset, epoch)], member)
        return bool(house.take(said, now=offset)[0])

    assert commit("a", 1, epoch)
    assert commit("a", 2, 0)  # it knows of no epochs
    assert share.queue_owners.seen == {"a": 2}
    assert not commit("a", 3, epoch + 1)
    assert not commit("a", 3, epoch - 1)
    assert not commit("b", 3, epoch)
    assert not commit("", 3, 0)  # an administrator's, of an owned queue
    assert share.queue_owners.seen == {"a": 2}
    share.renew([mine])
    assert not commit("a", 4, epoch)
    assert commit("a", 4, share.queue_owners.epochs[mine])
    assert house.book.get("g", "t", 0) == 4
    share.leave("a")
    assert not commit("a", 5, 0)
    assert commit("", 5, 0)  # nobody owns it any more


def test_a_members_old_commit_is_passed_over(house: House) -> None:
    join(house, "a")
    house.book.apply(OffsetSet("g", "t", 0, 9))
    late = CommitOffsets("g", [QueueOffset("t", 0, 8), QueueOffset("t", 1, 1)], "a")
    made, packed, _ = house.take(late)
    assert (made, changes_in(packed, 1)) == (1, [OffsetSet("g", "t", 1, 1)])
    assert house.take(late) == (1, b"", [])
    assert house.book.get("g", "t", 0) == 9


def test_a_group_that_is_no_group_is_an_error(house: House) -> None:
    commit = CommitOffsets("g", [QueueOffset("t", 0, 1)])
    house.members["g"] = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        house.take(commit)
    assert house.book.get("g", "t", 0) == 0


def test_an_error_hides_nothing_that_was_made_before_it(house: House) -> None:
    house.put("broken", "t")
    house.members["broken"] = object()  # type: ignore[assignment]
    said = [CommitOffsets(group, [QueueOffset("t", 0, 1)]) for group in ("g", "broken")]
    made, packed, undo = house.take(*said)
    assert (made, changes_in(packed, 1), undo) == (1, [OffsetSet("g", "t", 0, 1)], [("t@g", 0, 0)])


# --- hostile bytes --------------------------------------------------------------------------------


def test_a_head_that_ends_early_is_not_plain(house: House) -> None:
    head = frames.pack(7, CommitOffsets("g", [QueueOffset("t", 0, 1 << 40)] * 3, ""))
    for end in range(len(head)):
        assert house.take(head[:end]) == (0, b"", []), end
    assert house.take(head + b"\0") == (0, b"", [])
    assert house.take(bytes([PROTOCOL_VERSION + 1]) + head[1:]) == (0, b"", [])
    assert house.take(head)[0] == 1


def test_more_offsets_than_there_are_take_no_memory(house: House) -> None:
    head = frames.pack(7, CommitOffsets("g", []))
    at = head.index(b"\xa1g") + 2
    assert house.take(head[:at] + b"\xdc\xff\xff" + head[at + 1 :]) == (0, b"", [])
    assert house.take(head)[0] == 1


NUMBERS = st.sampled_from([*EDGES, -1, -(1 << 63), (1 << 63) - 1]) | st.integers(0, 9)
OFFSETS = st.builds(
    QueueOffset,
    st.sampled_from(["t", "u", "ü", ""]),
    st.integers(-1, QUEUES) | st.sampled_from([-(1 << 31), (1 << 31) - 1]),
    NUMBERS,
    NUMBERS,
)
COMMITS = st.builds(
    CommitOffsets,
    st.sampled_from(["g", "h", "nobody"]),
    st.lists(OFFSETS, max_size=20),
    st.sampled_from(["", "a", "b"]),
    st.booleans() | st.just(False),
)


def checked(house: House, head: bytes) -> None:
    """What is made is what the codec reads in it, and nothing else is changed."""
    before = house.table()
    made, packed, undo = house.take(head)
    if not made:
        assert (packed, undo) == (b"", [])
        assert house.table() == before
        return
    _, command = frames.unpack(head)
    assert isinstance(command, CommitOffsets)
    after = OffsetBook({key: dict(row) for key, row in before.items()})
    wanted: list[OffsetSet] = []
    for each in command.offsets:
        found = after.get(command.group, each.topic, each.queue_id)
        config = house.topics[each.topic]
        assert is_queue_of(config, each.queue_id)
        if is_late(found, each.queue_offset, bool(command.member), seeks=False):
            continue
        wanted.append(OffsetSet(command.group, each.topic, each.queue_id, each.queue_offset))
        after.apply(wanted[-1])
    assert packed == b"".join(map(pack_change, wanted))
    assert house.table() == {key: dict(row.items()) for key, row in after.table.items()}


def furnished() -> House:
    house = House()
    for group in ("g", "h"):
        house.put(group, "t")
        house.put(group, "ü")
    join(house, "a", "h")
    return house


@given(st.lists(COMMITS, max_size=30))
@pytest.mark.slow
def test_it_does_what_the_codec_reads(commits: list[CommitOffsets]) -> None:
    house = furnished()
    for number, command in enumerate(commits):
        checked(house, frames.pack(number, command))


@given(st.lists(COMMITS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_any_bytes(commits: list[CommitOffsets], rng: random.Random) -> None:
    house = furnished()
    for command in commits:
        head = bytearray(frames.pack(1, command))
        for _ in range(rng.randrange(4)):
            head[rng.randrange(len(head))] = rng.choice([0, 0x90, 0xC2, 0xCF, 0xD9, 0xDC, 0xFF])
        try:
            frames.unpack(head)
        except CometError:
            before = house.table()
            assert house.take(bytes(head)) == (0, b"", [])
            assert house.table() == before
        else:
            checked(house, bytes(head))


def test_names_that_are_no_text(house: House) -> None:
    head = frames.pack(7, CommitOffsets("g", [QueueOffset("t", 0, 5)], "m"))
    for name in (b"\xa1g", b"\xa1t", b"\xa1m"):
        assert house.take(head.replace(name, b"\xa1\xff")) == (0, b"", [])


def test_lengths_that_nobody_writes_are_left_to_the_codec(house: House) -> None:
    raw = msgspec.msgpack.encode([TAG, "g", [["t", 0, 5]], "", False, False, "of a later release"])
    head = frames.pack(7, Ping())[:9] + raw
    assert isinstance(frames.unpack(head)[1], CommitOffsets)
    assert house.take(head) == (0, b"", [])


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_ends_where_another_command_comes() -> None:
    commit = frames.pack(1, CommitOffsets("g", [QueueOffset("t", 0, 5)]))
    ping = frames.pack(2, Ping())
    heads = [commit, commit, ping, b"", commit]
    assert [run_length(heads, at, 0, TAG, ROOM) for at in range(6)] == [2, 1, 0, 0, 1, 0]
    assert run_length(heads, 0, 0, tag_of(Ping), ROOM) == 0
    assert run_length([commit] * 9, 0, 0, TAG, len(commit) * 3) == 3
    assert run_length([commit] * 9, 0, 0, TAG, len(commit) * 3 + 1) == 4
    assert run_length([commit], 0, 0, TAG, 1) == 1  # one in any case
    packets = [frames.join(each, ()) for each in (commit, ping)]
    with_more = frames.join(commit, (b"x",))
    assert run_length([packets[0], with_more, packets[0]], 0, 5, TAG, ROOM) == 1  # type: ignore[list-item]
    assert run_length([packets[1]], 0, 5, TAG, ROOM) == 0  # type: ignore[list-item]
    with pytest.raises(TypeError):
        run_length([bytearray(commit)], 0, 0, TAG, ROOM)  # type: ignore[list-item]


def test_owners() -> None:
    owners = QueueOwners()
    owners.owners[1], owners.epochs[1] = "a", 5
    assert [owners.owns("a", 1, epoch) for epoch in (0, 4, 5, 6)] == [True, False, True, False]
    assert not owners.owns("b", 1, 5)
    assert not owners.owns("a", 2, 0)
    assert not owners.owns("", 2, 0)
