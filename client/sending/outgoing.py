"""Validation of a message on its way into a batch: what can be said without asking a broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from cometmq.client.arguments import check
from cometmq.protocol.commands import TIMED
from cometmq.protocol.errors import ArgumentIllegal, MessageIllegal, MessageTooLarge
from cometmq.protocol.names import check_properties, check_tag, check_topic, joined_keys
from cometmq.protocol.timed import RECALL_TAG, Handle
from cometmq.shm.kernel import codec

Body = bytes | bytearray | memoryview
Keys = str | Iterable[str] | None

PROPERTIES_BYTES_MAX: Final = 32_767
UNIQ_KEY_BYTES: Final = 42  # the property that the encoder adds
KEY_MAX: Final = 1_024  # bytes, of a key by which a message is stored once
ENCODED_BYTES_MAX: Final = 16_777_216  # of one message in a batch


class Target(msgspec.Struct, gc=False):
    """Where a message is meant to go."""

    topic: str
    ordering_key: str | None
    queue_id: int | None
    broker: str | None = None  # that alone


class Outgoing(msgspec.Struct, gc=False):
    """A message as the encoder takes it."""

    body: Any
    tags: str | None
    keys: str | None
    properties: dict[str, str] | None
    flag: int
    wait: bool
    delay_level: int = 0  # TIMED: a property says when
    sys_flag: int | None = None  # of the batch it goes into; None: see `Sender.prepare`
    producer_group: str = ""  # it is part of a transaction

    def add_to(self, encoder: codec.BatchEncoder) -> int:
        try:
            return encoder.add(self.body, self.tags, self.keys, self.properties, self.flag)
        except BufferError as error:  # every other step of a memoryview, say
            raise TypeError(f"a body is bytes-like, in one piece: {error}") from None

    @property
    def properties_bytes(self) -> int:
        named = {"TAGS": self.tags or "", "KEYS": self.keys or "", **(self.properties or {})}
        return UNIQ_KEY_BYTES + sum(
            len(f"{name}{value}".encode()) + 2 for name, value in named.items() if value
        )


def compose(
    topic: str,
    body: Any,
    tags: str | None,
    keys: Keys,
    properties: Mapping[str, str] | None,
    ordering_key: str | None,
    queue_id: int | None,
    flag: int,
    wait: bool,
    delay_level: int = 0,
    deliver_at: datetime | None = None,
    deliver_after: timedelta | float | None = None,
) -> tuple[Target, Outgoing]:
    """What the arguments of a `send` mean. Raises ArgumentIllegal, NameIllegal, MessageIllegal."""
    if topic.__class__ is not str:
        check_topic(topic)
    if tags is not None:
        if tags.__class__ is not str:
            check("tags", tags, str | None)
        check_tag(tags)
    if keys is not None and keys.__class__ is not str:
        check("keys", keys, str | Iterable[str] | None)
        keys = joined_keys(keys)
    if properties is not None:
        check("properties", properties, Mapping[str, str] | None)
        check_properties(properties)
        properties = properties if isinstance(properties, dict) else dict(properties)
    if ordering_key is not None and ordering_key.__class__ is not str:
        check("ordering_key", ordering_key, str | None)
    if queue_id is not None and queue_id.__class__ is not int:
        check("queue_id", queue_id, int | None)
    if flag.__class__ is not int or not -0x80000000 <= flag <= 0x7FFFFFFF:
        check("flag", flag, int)
        raise ArgumentIllegal(f"flag={flag}: a number of 32 bits")
    if wait is not True and wait is not False:
        check("wait", wait, bool)
    if delay_level.__class__ is not int or not 0 <= delay_level <= 0x7FFFFFFF:
        check("delay_level", delay_level, int)
        raise ArgumentIllegal(f"delay_level={delay_level}: 0, or a level of messageDelayLevel")
    if deliver_at is not None or deliver_after is not None:
        if delay_level:
            raise ArgumentIllegal(f"delay_level={delay_level}, and a time to deliver it as well")
        name, value = codec.timing(deliver_at, deliver_after)
        properties = {**(properties or {}), name: value}
        delay_level = TIMED
    return (
        Target(topic, ordering_key, queue_id),
        Outgoing(body, tags, keys, properties, flag, wait, delay_level),
    )


def recalling(handle: Handle) -> tuple[Target, Outgoing]:
    """What takes back a message that waits: RocketMQ's delete record, beside it in the wheel."""
    properties = {
        "TIMER_DEL_UNIQKEY": f"{handle.topic}+{handle.msg_id}",
        "TIMER_DELIVER_MS": str(handle.due_ms),
    }
    target = Target(handle.topic, None, None, handle.broker)
    return target, Outgoing(b"0", RECALL_TAG, None, properties, 0, True, TIMED)


def check_body(body: Body, bytes_max: int) -> None:
    if not body or isinstance(body, str) or not hasattr(body, "__len__"):
        raise no_body(body)
    if len(body) > bytes_max:
        raise MessageTooLarge(f"body of {len(body)} bytes, at most {bytes_max}")


def check_key(message: Outgoing) -> None:
    """Raise ArgumentIllegal unless the message can be stored once by its key."""
    if not message.keys or " " in message.keys:
        raise ArgumentIllegal(
            f"keys={message.keys!r:.100}: with dedup='keys' a message has one key, without spaces"
        )
    size = len(message.keys.encode(errors="surrogatepass"))  # what is no text the encoder refuses
    if size > KEY_MAX:
        raise ArgumentIllegal(f"keys has {size} bytes, at most {KEY_MAX} with dedup='keys'")
    if message.delay_level or message.producer_group:
        raise ArgumentIllegal(
            "with dedup='keys' a message is neither delayed nor part of a transaction: it would be "
            "stored elsewhere first"
        )


def no_body(body: object) -> Exception:
    """Why something that is false is no body."""
    if isinstance(body, (bytes, bytearray, memoryview)):
        return MessageIllegal("a message needs a body of at least one byte")
    return ArgumentIllegal(f"a body is bytes-like, not {type(body).__name__}: encode it first")


def illegal(
    error: ValueError | TypeError, message: Outgoing, largest_body: Body
) -> MessageIllegal | ArgumentIllegal:
    """The typed error for what the encoder refused."""
    if isinstance(error, TypeError):
        return ArgumentIllegal(str(error))
    if isinstance(error, UnicodeError):
        return MessageIllegal(f"a text that UTF-8 cannot hold: {error}")
    too_large = (
        message.properties_bytes > PROPERTIES_BYTES_MAX
        or message.properties_bytes + len(largest_body) > ENCODED_BYTES_MAX - 100
    )
    return MessageTooLarge(str(error)) if too_large else MessageIllegal(str(error))
