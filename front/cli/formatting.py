"""A message as text: kcat's format strings, and JSON."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from cometmq.protocol.errors import BodyIllegal

if TYPE_CHECKING:
    from cometmq.client import Message

Render = Callable[["Message"], bytes]

# RocketMQ's own properties, which have fields of their own.
_SHOWN_APART: Final = frozenset({"TAGS", "KEYS", "UNIQ_KEY"})


def _body(message: Message) -> bytes:
    """Unfolded; as it was sent, with a word to stderr, where that cannot be done."""
    try:
        return message.body
    except BodyIllegal as error:
        click.echo(f"cometmq: {error}; shown as it was sent", err=True)
        return message.stored_body


_FIELDS: Final[dict[str, Render]] = {
    "s": _body,
    "S": lambda message: b"%d" % len(_body(message)),
    "k": lambda message: (message.keys or "").encode(),
    "K": lambda message: b"%d" % len((message.keys or "").encode()),
    "t": lambda message: message.topic.encode(),
    "p": lambda message: b"%d" % message.queue_id,
    "o": lambda message: b"%d" % message.queue_offset,
    "T": lambda message: b"%d" % message.store_timestamp_ms,
    "g": lambda message: (message.tags or "").encode(),
    "h": lambda message: ",".join(f"{k}={v}" for k, v in own_properties(message)).encode(),
    "i": lambda message: message.msg_id.encode(),
    "I": lambda message: message.offset_msg_id.encode(),
    "b": lambda message: message.born_host.encode(),
}
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_TOKEN: Final = re.compile(r"%(.?)|\\(.?)", re.DOTALL)


def compile_format(template: str) -> Render:
    """A function from a message to bytes. Raises UsageError for an unknown token."""
    parts: list[bytes | Render] = []
    at = 0
    for match in _TOKEN.finditer(template):
        parts.append(template[at : match.start()].encode())
        parts.append(_part(match))
        at = match.end()
    parts.append(template[at:].encode())
    if parts == [b"", _FIELDS["s"], b"", b"\n", b""]:
        return lambda message: _body(message) + b"\n"
    return lambda message: b"".join(
        part if isinstance(part, bytes) else part(message) for part in parts
    )


def _part(match: re.Match[str]) -> bytes | Render:
    token = match[1]
    if token is None:
        escaped = _ESCAPES.get(match[2])
        if escaped is None:
            raise click.UsageError(f"format: \\{match[2]} is none of \\n \\t \\r \\0 \\\\")
        return escaped
    if token == "%":
        return b"%"
    field = _FIELDS.get(token)
    if field is None:
        known = " ".join(f"%{name}" for name in _FIELDS)
        raise click.UsageError(f"format: %{token} is none of {known} %%")
    return field


def own_properties(message: Message) -> list[tuple[str, str]]:
    """What the sender gave, without the properties that have names of their own."""
    return [(k, v) for k, v in message.properties.items() if k not in _SHOWN_APART]


def as_record(message: Message) -> dict[str, Any]:
    """A message for JSON. A body that is no UTF-8 stands in `body_base64`."""
    record: dict[str, Any] = {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "msg_id": message.msg_id,
        "offset_msg_id": message.offset_msg_id,
        "tags": message.tags,
        "keys": message.keys,
        "properties": dict(own_properties(message)),
        "born_timestamp_ms": message.born_timestamp_ms,
        "store_timestamp_ms": message.store_timestamp_ms,
        "born_host": message.born_host,
        "store_host": message.store_host,
        "flag": message.flag,
        "reconsume_times": message.reconsume_times,
    }
    body = _body(message)
    try:
        record["body"] = body.decode()
    except UnicodeDecodeError:
        record["body_base64"] = base64.b64encode(body).decode()
    return record
