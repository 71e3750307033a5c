"""What replicas say to each other, and how it is written. Pure: no I/O.

Each frame names its group, the sender's epoch, and the session that it belongs to (`nonce`, drawn
by the follower: its incarnation and a number, so later sessions have higher ones, also those of
another store under the same name).

    follower                       master
    Hello            ------->              who I am, by store and incarnation
                     <-------      Welcome its epoch table
    Marks            ------->              the last record before each end that we may share
                     <-------      Agreed  the first of them that is the same here; or
                     <-------      Apart   none is
    (cuts its log)
                     <-------      Bytes   records, from where the last frame ended
    Ack              ------->              how far they are held
                     <-------      Beat    nothing new, or only that more is confirmed

The bytes of the log travel behind a Bytes frame, and never come through here.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

from cometmq.actors.replication.core.promises import Epochs
from cometmq.actors.replication.core.record import Incarnation, StoreUuid, Whole
from cometmq.conf.group import Id
from cometmq.protocol.errors import BadRequest

FRAME_BYTES_MAX: Final = 64 << 10  # without the bytes of the log
MARKS_MAX: Final = 64
TROUBLE_MAX: Final = 1_000  # characters

Crc = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Mark(NamedTuple):
    """The last whole record before an offset. It is empty, if the log begins there."""

    end: Whole
    start: Whole
    crc: Crc  # of all its bytes


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """What all of them have."""

    group: Id
    epoch: Whole
    nonce: Whole


class Hello(Frame, frozen=True, tag=1):
    """A follower begins a session. `epoch`: what it has promised."""

    store_uuid: StoreUuid
    incarnation: Incarnation


class Welcome(Frame, frozen=True, tag=2):
    """The master's log."""

    epochs: Epochs
    begin: Whole  # of what it keeps
    end: Whole


class Marks(Frame, frozen=True, tag=3):
    """Where the follower's log may be the same as the master's; the furthest first."""

    marks: Annotated[tuple[Mark, ...], msgspec.Meta(max_length=MARKS_MAX)]


class Agreed(Frame, frozen=True, tag=4):
    """Up to where the logs are the same: the end of one of the marks."""

    offset: Whole


class Bytes(Frame, frozen=True, tag=5):
    """Records follow."""

    offset: Whole
    length: Whole
    crc: Crc  # of the bytes that follow
    confirm: Whole


class Beat(Frame, frozen=True, tag=6):
    """The master is there."""

    offset: Whole  # up to here Bytes were sent
    confirm: Whole
    number: Whole  # comes back in the Ack


class Ack(Frame, frozen=True, tag=7):
    """A follower holds all below `held`: flushed, where messages are flushed before they are
    acknowledged."""

    held: Whole
    number: Whole  # of the latest Beat


class Bid(Frame, frozen=True, tag=8):
    """The master is gone, and this replica might be the next. The longest log is preferred."""

    last_epoch: Whole
    end: Whole


class Refused(Frame, frozen=True, tag=9):
    """A Hello was none for this replica now. `epoch` may be news."""


class Apart(Frame, frozen=True, tag=10):
    """No mark is the same. The master's log begins at `offset`."""

    offset: Whole


class WantBooks(Frame, frozen=True, tag=11):
    """The follower begins with an empty store: it wants the master's books (state_copy.py), from
    this byte of the copy on. `nonce` names the copy; at byte 0 one is made. Not for the core."""

    offset: Whole


class Books(Frame, frozen=True, tag=12):
    """A piece of that copy follows."""

    offset: Whole
    length: Whole
    total: Whole  # bytes of the copy


class Trouble(Frame, frozen=True, tag=13):
    """Why the sender is away from its group, for who looks at that. Not for the core."""

    why: Annotated[str, msgspec.Meta(max_length=TROUBLE_MAX)]


AnyFrame = (
    Hello
    | Welcome
    | Marks
    | Agreed
    | Apart
    | Bytes
    | Beat
    | Ack
    | Bid
    | Refused
    | WantBooks
    | Books
    | Trouble
)
WithContent = Bytes | Books  # something follows behind the frame

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[msgspec.msgpack.Decoder[AnyFrame]] = msgspec.msgpack.Decoder(AnyFrame)


def encode_frame(frame: AnyFrame) -> bytes:
    return _encode(frame)


def decode_frame(content: bytes) -> AnyFrame:
    """Raises BadRequest."""
    if len(content) > FRAME_BYTES_MAX:
        raise BadRequest(
            f"a frame of replication has {len(content)} bytes, at most {FRAME_BYTES_MAX}"
        )
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"a frame of replication cannot be read: {error}") from None
