"""A message on its way into a batch, and what can be said of it without asking a broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from cometmq.protocol.errors import MessageIllegal, MessageTooLarge
from cometmq.protocol.names import RESERVED_PROPERTIES
from cometmq.shm import _kernel

Body = bytes | bytearray | memoryview
Keys = str | Iterable[str] | None

PROPERTIES_BYTES_MAX: Final = 32_767
UNIQ_KEY_BYTES: Final = 42  # the property that the encoder adds
ENCODED_BYTES_MAX: Final = 16_777_216  # of one message in a batch


class Target(msgspec.Struct, gc=False):
    """Where a message is meant to go."""

    topic: str
    sharding_key: str | None
    queue_id: int | None


class Outgoing(msgspec.Struct, gc=False):
    """A message as the encoder takes it."""

    body: Any
    tags: str | None
    keys: str | None
    properties: dict[str, str] | None
    flag: int
    wait: bool

    def add_to(self, encoder: _kernel.BatchEncoder) -> int:
        return encoder.add(self.body, self.tags, self.keys, self.properties, self.flag)

    @property
    def properties_bytes(self) -> int:
        named = {"TAGS": self.tags or "", "KEYS": self.keys or "", **(self.properties or {})}
        return UNIQ_KEY_BYTES + sum(
            len(f"{name}{value}".encode()) + 2 for name, value in named.items() if value
        )


def one_text(keys: Keys) -> str | None:
    """RocketMQ's KEYS: words with blanks between."""
    return keys if keys is None or isinstance(keys, str) else " ".join(keys)


def checked(properties: Mapping[str, str] | None) -> dict[str, str] | None:
    """Raises MessageIllegal for a property that has an argument of its own."""
    if properties is None:
        return None
    if not RESERVED_PROPERTIES.isdisjoint(properties):
        names = ", ".join(sorted(RESERVED_PROPERTIES.intersection(properties)))
        raise MessageIllegal(f"property {names}: use the argument of that name")
    return properties if isinstance(properties, dict) else dict(properties)


def check_body(body: Body, bytes_max: int) -> None:
    if not body or isinstance(body, str) or not hasattr(body, "__len__"):
        raise no_body(body)
    if len(body) > bytes_max:
        raise MessageTooLarge(f"body of {len(body)} bytes, at most {bytes_max}")


def no_body(body: object) -> Exception:
    """Why something that is false is no body."""
    if isinstance(body, (bytes, bytearray, memoryview)):
        return MessageIllegal("a message needs a body of at least one byte")
    return TypeError(f"a body is bytes-like, not {type(body).__name__}: encode it first")


def illegal(error: ValueError, message: Outgoing, largest_body: Body) -> MessageIllegal:
    """The typed error for what the encoder refused."""
    too_large = (
        message.properties_bytes > PROPERTIES_BYTES_MAX
        or message.properties_bytes + len(largest_body) > ENCODED_BYTES_MAX - 100
    )
    return MessageTooLarge(str(error)) if too_large else MessageIllegal(str(error))
