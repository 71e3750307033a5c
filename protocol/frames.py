"""How a command lies in ZeroMQ frames.

    [ head ][ payload ... ]          between a DEALER and a ROUTER (which adds the sender's id)

The head is one frame: HEAD (version, request id), then the command in MessagePack. An answer
repeats the request id. A head is small by nature, so it is refused over HEAD_MAX before parsing.

On a local connection, which is a Unix socket (stream.py), each frame has its length before it:

    [ length: 4 bytes, big endian; the highest bit: another frame follows ][ frame ] ...
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import cache
from typing import Final, Protocol, Union

import msgspec

from cometmq.protocol import commands
from cometmq.protocol.commands import BY_TAG, COMMANDS, PROTOCOL_VERSION, Command, Done, Failed
from cometmq.protocol.errors import (
    ArgumentIllegal,
    BadRequest,
    CometError,
    UnknownCommand,
    UnsupportedVersion,
    from_code,
)

HEAD: Final = struct.Struct(">BQ")  # protocol version, request id
HEAD_MAX: Final = 1_048_576  # bytes of a head frame
FRAME_MAX: Final = 16 * 1_048_576  # bytes of any frame; RocketMQ's transport limit as well

MESSAGE_MAX: Final = 128 * 1_048_576  # bytes of a message on a local connection

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Union[COMMANDS]).decode  # noqa: UP007
_decode_elements: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_read_head: Final = HEAD.unpack_from
_HEAD_BYTES: Final = HEAD.size
_type_info: Final = cache(msgspec.inspect.type_info)
# Answer of a broker that does not know a command's number; the text is part of the protocol.
_UNKNOWN: Final = re.compile(r"not a command: Invalid value (\d+)( - at `\$\[0\]`)?")
_STEP: Final = re.compile(r"\[(\d+|\.\.\.)\]")  # of a path such as $[1][0][2]


def pack(request_id: int, command: Command) -> bytes:
    """Raises ArgumentIllegal for a command with a value that cannot be sent."""
    try:
        return HEAD.pack(PROTOCOL_VERSION, request_id) + _encode(command)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentIllegal(f"{type(command).__name__} cannot be sent: {error}") from None


def request_id_of(head: bytes | memoryview) -> int:
    """The request id, 0 if the frame is too short to hold one: for answering rubbish."""
    return int(HEAD.unpack_from(head)[1]) if len(head) >= HEAD.size else 0


def unpack(head: bytes | memoryview) -> tuple[int, Command]:
    """(request id, command). Raises BadRequest with what is wrong, and in which field."""
    if not _HEAD_BYTES <= len(head) <= HEAD_MAX:
        limit = f"at least {_HEAD_BYTES}" if len(head) < _HEAD_BYTES else f"at most {HEAD_MAX}"
        raise BadRequest(f"head of {len(head)} bytes, {limit}")
    version, request_id = _read_head(head)
    if version != PROTOCOL_VERSION:
        raise UnsupportedVersion(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    body = head[_HEAD_BYTES:]
    try:
        return request_id, _decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(_what_is_wrong(body, str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a command: {error}") from None


def _what_is_wrong(body: bytes | memoryview, text: str) -> str:
    """msgspec says by numbers where in a command something is wrong; fields have names."""
    what, _, path = text.partition(" - at `$")
    try:
        kind = BY_TAG.get(msgspec.msgpack.decode(_decode_elements(body)[0], type=int))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        kind = None
    if kind is None:
        return f"not a command: {text}"
    return f"not a command: {kind.__name__}{_named(kind, _STEP.findall(path))}: {what}"


def _named(kind: type[msgspec.Struct], steps: Sequence[str]) -> str:
    """The path by names: `.sections[0].count`."""
    shown, here = "", _type_info(kind)
    for step in steps:
        if isinstance(here, msgspec.inspect.UnionType):  # of something, or nothing
            here = here.types[0]
        match here:
            case msgspec.inspect.StructType(tag=tag, fields=fields):
                at = int(step) - (tag is not None)  # a command's tag is its first element
                shown, here = f"{shown}.{fields[at].name}", fields[at].type
            case msgspec.inspect.ListType(item_type=item):
                shown, here = f"{shown}[{step}]", item
            case _:
                shown = f"{shown}[{step}]"
    return shown


class Frame(Protocol):
    """A frame that was received: ZeroMQ's, or a Part."""

    @property
    def buffer(self) -> memoryview: ...

    def __len__(self) -> int: ...


class Part:
    """A frame that did not come through ZeroMQ."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer)


_LONE: Final = struct.Struct(">IBQ")  # of one frame: its size, protocol version, request id
_DONE: Final = _encode(Done())
_DONE_BYTES: Final = HEAD.size + len(_DONE)


def done_on_stream(request_id: int) -> bytes:
    """A Done on a local connection, which is what most requests are answered with."""
    return _LONE.pack(_DONE_BYTES, PROTOCOL_VERSION, request_id) + _DONE


def failed(error: CometError) -> Failed:
    return Failed(error.code, str(error))


def raise_if_failed(answer: Command) -> Command:
    if isinstance(answer, commands.Failed):
        if answer.code == BadRequest.code and (found := _UNKNOWN.fullmatch(answer.text)):
            raise _of_older(int(found[1]))
        raise from_code(answer.code, answer.text)
    return answer


def _of_older(tag: int) -> UnknownCommand:
    """Return the error for a command that an older broker does not know."""
    kind = BY_TAG.get(tag)
    what, since = f"command {tag}", "a later release"
    if kind is not None:
        what, since = kind.__name__, getattr(kind, "new_in", "") or since
    return UnknownCommand(
        f"the broker does not know {what}, which is new in {since}: it is older than this client; "
        "upgrade the broker first"
    )
