"""How a command lies in ZeroMQ frames.

    [ head ][ payload ... ]          between a DEALER and a ROUTER (which adds the sender's id)

The head is one frame: HEAD (version, request id), then the command in MessagePack. An answer
repeats the request id. A head is small by nature, so it is refused over HEAD_MAX before parsing.
"""

from __future__ import annotations

import struct
from typing import Final, Union

import msgspec

from cometmq.protocol import commands
from cometmq.protocol.commands import COMMANDS, PROTOCOL_VERSION, Command, Failed
from cometmq.protocol.errors import BadRequest, CometError, UnsupportedVersion, from_code

HEAD: Final = struct.Struct(">BQ")  # protocol version, request id
HEAD_MAX: Final = 1_048_576  # bytes of a head frame
FRAME_MAX: Final = 16 * 1_048_576  # bytes of any frame; RocketMQ's transport limit as well

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Union[COMMANDS]).decode  # noqa: UP007


def pack(request_id: int, command: Command) -> bytes:
    return HEAD.pack(PROTOCOL_VERSION, request_id) + _encode(command)


def request_id_of(head: bytes | memoryview) -> int:
    """The request id, 0 if the frame is too short to hold one: for answering rubbish."""
    return int(HEAD.unpack_from(head)[1]) if len(head) >= HEAD.size else 0


def unpack(head: bytes | memoryview) -> tuple[int, Command]:
    """(request id, command). Raises BadRequest with what is wrong."""
    if len(head) < HEAD.size:
        raise BadRequest(f"head of {len(head)} bytes, at least {HEAD.size}")
    if len(head) > HEAD_MAX:
        raise BadRequest(f"head of {len(head)} bytes, at most {HEAD_MAX}")
    version, request_id = HEAD.unpack_from(head)
    if version != PROTOCOL_VERSION:
        raise UnsupportedVersion(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    try:
        return request_id, _decode(head[HEAD.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a command: {error}") from None


def failed(error: CometError) -> Failed:
    return Failed(error.code, str(error))


def raise_if_failed(answer: Command) -> Command:
    if isinstance(answer, commands.Failed):
        raise from_code(answer.code, answer.text)
    return answer
