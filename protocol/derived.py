"""Derived writes: records that come of what was read before, stored once, and how far it was read.

A *deriver* reads something (a queue, a stage, a table of timers) and has records written that come
of it. "Having come from position P to position Q, it wrote these N records" is one write: a *mark*,
which is a record of DERIVED_TOPIC, and the N records behind it, in one piece. So what was written
and the fact that it was cannot come apart, whatever dies.

The log alone remembers positions: who starts folds the marks, from the last snapshot on.

A mark is a MessagePack array [format, [kind, fields ...]]. Kinds only ever get more fields, at the
end, with a default.
"""

from __future__ import annotations

from typing import Final, Union

import msgspec

from cometmq.protocol.commands.inner import Position
from cometmq.protocol.errors import StoreDamaged

# RocketMQ takes topics that begin with rmq_sys_ for its own, see protocol/ledger.py.
DERIVED_TOPIC: Final = "rmq_sys_COMETMQ_DERIVED"
DERIVED_QUEUE: Final = 0
FORMAT: Final = 1
DERIVER_MAX: Final = 250  # characters of a name
# In the log, of a mark and the records behind it: replicas are sent them in one frame. Whoever
# gathers them counts what they come of, 4 MiB at most or one record. Of the smallest messages to a
# topic with the longest name the records have more than four times as much.
WRITE_BYTES_MAX: Final = 33_554_432
MARK_BYTES_MAX: Final = 1_024  # of a mark's record in the log, beside its note
SNAPSHOT_HEAD_MAX: Final = 512  # bytes, of a snapshot and its record, beside what is known
KNOWN_HEAD_MAX: Final = 64  # bytes in a snapshot of one deriver, beside its name and note


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The deriver has come from `before` to `after`, and wrote the `count` records behind this."""

    deriver: str
    before: Position
    after: Position
    count: int
    note: bytes | None = None  # what it wants to know when it asks where it is; None: as before


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a deriver."""

    deriver: str
    position: Position
    note: bytes
    at_ms: int  # store time of its last mark


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All derivers; what lies before this does not count any more."""

    known: list[Known]


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Nothing is known of the deriver any more."""

    deriver: str


KINDS: Final = (Mark, Snapshot, Forgotten)
AnyMark = Union[KINDS]  # type: ignore[valid-type]  # noqa: UP007


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    format: int
    mark: AnyMark


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Entry).decode


def pack_mark(mark: Mark | Snapshot | Forgotten) -> bytes:
    """The body of its record."""
    return _encode(_Entry(FORMAT, mark))


def read_mark(body: bytes | memoryview) -> Mark | Snapshot | Forgotten:
    """Raises StoreDamaged for what is none, or of a kind that is not known here."""
    try:
        entry = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreDamaged(f"a record of {DERIVED_TOPIC} is no mark: {error}") from None
    mark: Mark | Snapshot | Forgotten = entry.mark
    return mark


def snapshot_bytes_max(segment_bytes: int, message_bytes_max: int) -> int:
    """Of what is known, in a log with such segments and such largest messages."""
    room = min(segment_bytes // 2, message_bytes_max)
    return max(room - SNAPSHOT_HEAD_MAX, SNAPSHOT_HEAD_MAX)
