"""The ledger: small durable state as a stream of changes, each a record of one topic of the log.

What a coordinator keeps (topics, groups, their members, how far each has come) changes all the
time, a little each time. Each round of changes is one *entry*: one record of LEDGER_TOPIC,
appended, made durable and replicated as messages are. Folding the entries in their order gives the
state; RocketMQ's files in config/ are snapshots of it, from which a start goes on.

An entry names the coordinator's life (*epoch*) and its number in it. An entry that was sent twice,
or comes late from a coordinator that is dead, is recognized by that, and changes nothing (`Fold`).

Changes are MessagePack arrays [tag, fields ...]. They only ever get more fields, at the end, with a
default; a change whose tag is not known here is passed over, and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Union

import msgspec

from cometmq.protocol.configs import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.takes import Take

# RocketMQ takes topics that begin with rmq_sys_ for its own: no client may send to one, and no
# command removes the queue of one that is in no topics.json.
LEDGER_TOPIC: Final = "rmq_sys_COMETMQ_LEDGER"
LEDGER_QUEUE: Final = 0
FORMAT: Final = 1
ENTRY_BYTES_MAX: Final = 262_144  # of its changes
ENTRY_HEAD_MAX: Final = 512  # bytes, of an entry and its record, beside them
CHANGE_BYTES_MIN: Final = 512  # an entry may have so many in any case: more than one change takes


def entry_bytes_max(segment_bytes: int, message_bytes_max: int) -> int:
    """Bytes of the changes of an entry, in a log with such segments and such largest messages."""
    room = min(segment_bytes // 2, message_bytes_max)
    return max(min(ENTRY_BYTES_MAX, room - ENTRY_HEAD_MAX), CHANGE_BYTES_MIN)


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One change of a book."""


class OffsetSet(Change, frozen=True, tag=1, gc=False):
    """A group goes on there in that queue."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int


class OffsetsForgotten(Change, frozen=True, tag=2, gc=False):
    """No group has come anywhere in this topic: it was deleted."""

    topic: str


class TopicPut(Change, frozen=True, tag=3, gc=False):
    """A topic is there, with this configuration."""

    config: TopicConfig


class TopicRemoved(Change, frozen=True, tag=4, gc=False):
    topic: str


class GroupPut(Change, frozen=True, tag=5, gc=False):
    """A group is there, with this configuration."""

    config: SubscriptionGroupConfig


class GroupRemoved(Change, frozen=True, tag=6, gc=False):
    """Nothing is known of the group any more: no configuration, no member, no offset."""

    group: str


class MemberJoined(Change, frozen=True, tag=7, gc=False):
    """A group has this member, which subscribes to nothing yet."""

    group: str
    member: str


class MemberLeft(Change, frozen=True, tag=8, gc=False):
    group: str
    member: str


class Subscribed(Change, frozen=True, tag=9, gc=False):
    """A member subscribes to a topic by that tag expression."""

    group: str
    member: str
    topic: str
    tags: str


class Unsubscribed(Change, frozen=True, tag=10, gc=False):
    group: str
    member: str
    topic: str


class QueueOwned(Change, frozen=True, tag=11, gc=False):
    """A queue belongs to that member of the group, in that epoch; to nobody, if it is empty."""

    group: str
    topic: str
    queue_id: int
    member: str
    epoch: int


class VersionGiven(Change, frozen=True, tag=12, gc=False):
    """The highest version of a share, or epoch, that was given out in the group."""

    group: str
    version: int


class TopicAsked(Change, frozen=True, tag=13, gc=False):
    """A member of the group has asked for that topic: its messages count as the group's lag."""

    group: str
    topic: str


class HoldPut(Change, frozen=True, tag=14, gc=False):
    """Nothing at or above that physical offset is deleted, until that time if it is not 0."""

    name: str
    physical_offset: int
    expires_ms: int  # since 1970


class HoldDropped(Change, frozen=True, tag=15, gc=False):
    name: str


class MessagesPopped(Change, frozen=True, tag=16, gc=False):
    """Somebody of the group has the messages [first, end) of the queue, until that time."""

    group: str
    topic: str
    queue_id: int
    first: int
    end: int
    handle: int
    until_ms: int  # since 1970
    attempt: str = ""  # the consumer's name for its request


class PopsAcked(Change, frozen=True, tag=17, gc=False):
    """The group is done with the messages [first, end) of the queue, which were popped under that
    handle; 0: under none."""

    group: str
    topic: str
    queue_id: int
    handle: int
    first: int
    end: int


class PopExtended(Change, frozen=True, tag=18, gc=False):
    """What was popped under that handle is its owner's until another time."""

    group: str
    topic: str
    queue_id: int
    handle: int
    until_ms: int  # since 1970


class PopsForgotten(Change, frozen=True, tag=19, gc=False):
    """Somebody else has set the group's progress in the queue: what was popped counts no more."""

    group: str
    topic: str
    queue_id: int


class FilterPut(Change, frozen=True, tag=20, gc=False):
    """Members of the group want of that topic what the SQL92 expression lets pass; RocketMQ's
    ConsumerFilterData."""

    group: str
    topic: str
    expression: str
    version: int
    born_ms: int  # since 1970: the expression is registered since then
    dead_ms: int  # no member wants it since then; 0: some do


class FilterDropped(Change, frozen=True, tag=21, gc=False):
    """It has been dead for too long."""

    group: str
    topic: str


class QueueTaken(Change, frozen=True, tag=22, gc=False):
    """A group that takes messages in order has this of the queue; nothing, if none is left."""

    group: str
    topic: str
    queue_id: int
    take: Take


class PopsReleased(Change, frozen=True, tag=23, gc=False):
    """Messages in [first, end) of the queue that were popped under that handle are released: no
    handler has begun with them."""

    group: str
    topic: str
    queue_id: int
    handle: int
    first: int
    end: int


KINDS: Final = (
    OffsetSet, OffsetsForgotten, TopicPut, TopicRemoved, GroupPut, GroupRemoved,
    MemberJoined, MemberLeft, Subscribed, Unsubscribed, QueueOwned, VersionGiven, TopicAsked,
    HoldPut, HoldDropped, MessagesPopped, PopsAcked, PopExtended, PopsForgotten,
    FilterPut, FilterDropped, QueueTaken, PopsReleased,
)  # fmt: skip
AnyChange = Union[KINDS]  # type: ignore[valid-type]  # noqa: UP007


class Place(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An entry's place in the order of all entries."""

    epoch: int = 0
    number: int = 0


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What one record of the ledger holds."""

    format: int
    place: Place
    changes: list[msgspec.Raw]


class _KnownEntry(msgspec.Struct, frozen=True, array_like=True):
    """The same, where all changes are of a kind that is known here."""

    format: int
    place: Place
    changes: list[AnyChange]


class LedgerDamaged(StoreDamaged):
    """A record of the ledger that is no entry."""


_ARRAY: Final = struct.Struct(">BI")  # MessagePack array 32
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_known: Final = msgspec.msgpack.Decoder(_KnownEntry).decode
_decode_any: Final = msgspec.msgpack.Decoder(Entry).decode
_decode_change: Final = msgspec.msgpack.Decoder(AnyChange).decode


def pack_change(change: Change) -> bytes:
    """As it stands in an entry."""
    return _encode(change)


def entry_of(place: Place, packed: Sequence[bytes]) -> bytes:
    """The body of an entry's record, of changes that are packed."""
    return b"".join(
        (b"\x93", _encode(FORMAT), _encode(place), _ARRAY.pack(0xDD, len(packed)), *packed)
    )


def decode_entry(body: bytes | memoryview) -> tuple[Place, list[Change], int]:
    """(place, changes, how many more there are of kinds that are not known here).

    Raises LedgerDamaged for what is no entry.
    """
    try:
        known = _decode_known(body)
        return known.place, known.changes, 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_one_by_one(body)


def _decode_one_by_one(body: bytes | memoryview) -> tuple[Place, list[Change], int]:
    try:
        entry = _decode_any(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LedgerDamaged(f"a record of {LEDGER_TOPIC} is no entry: {error}") from None
    changes: list[Change] = []
    unknown = 0
    for raw in entry.changes:
        try:
            changes.append(_decode_change(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            unknown += 1
    return entry.place, changes, unknown


class Fold:
    """Lets each entry pass once, in the order of the log.

    Args:
        last: the place of the last entry that counts already.
    """

    def __init__(self, last: Place) -> None:
        self.last = last

    def admit(self, place: Place) -> bool:
        """Whether the entry counts: it may be there twice, or come from a life that was over."""
        if place <= self.last:
            return False
        self.last = place
        return True
