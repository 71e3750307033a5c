"""Single messages: by offset message id, by UNIQ_KEY, and by key and time."""

from __future__ import annotations

import ipaddress
from datetime import datetime
from typing import Final

import msgspec

from cometmq.client.administration.brokers import Brokers, milliseconds
from cometmq.client.arguments import checked
from cometmq.client.routes import broker_routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    GetMessageAt,
    PullResult,
    QueryMessages,
    QueryResult,
)
from cometmq.protocol.errors import ArgumentIllegal, MessageNotFound
from cometmq.protocol.names import check_search_key
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.reading.selection import carries

OFFSET_MAX: Final = (1 << 63) - 1  # RocketMQ's are Java longs
ID_DIGITS: Final = {32: 4, 56: 16}  # hex digits of an offset message id -> bytes of its address


class MessageAdmin(Brokers):
    """See Admin."""

    @checked
    def get_message(
        self, message_id: str, *, topic: str | None = None, broker: str | None = None
    ) -> Message:
        """The message of an id.

        Args:
            message_id: an offset message id, RocketMQ's hex of host, port and physical offset (the
                host in it is what the broker calls itself; among several brokers each is asked
                until one has the very message); with `topic` also a `msg_id`, the UNIQ_KEY that
                its producer gave it.
            topic: of the message.

        Raises MessageNotFound, ValueError for what can be no id.
        """
        try:
            _, physical_offset = parse_offset_msg_id(message_id)
        except ValueError:
            if topic is None:
                raise
        else:
            message = self._message_at(message_id.upper(), physical_offset, broker)
            if message is not None:
                return message
        if topic is None:
            raise MessageNotFound(
                f"no broker has a message {message_id}; if its producer made that id, say in which "
                "topic it is"
            )
        found = self.query_messages(topic, message_id, unique=True, max_count=1, broker=broker)
        if not found:
            raise MessageNotFound(f"topic {topic} has no message {message_id}")
        return found[0]

    def _message_at(self, wanted: str, physical_offset: int, broker: str | None) -> Message | None:
        if physical_offset > OFFSET_MAX:
            return None  # 32 digits of another kind, such as many a `msg_id`
        for master in self._masters(broker):
            channel = self._routes.channel(master.readers[0], f"a reader of {master.broker}")
            try:
                answer, payload = channel.ask(
                    GetMessageAt(physical_offset), timeout_s=self._timeout_s
                )
            except MessageNotFound:
                continue
            if isinstance(answer, PullResult) and payload:
                for message in decode(payload[0].buffer):
                    if message.offset_msg_id == wanted:
                        return message
        return None

    @checked
    def query_messages(
        self,
        topic: str,
        key: str,
        *,
        begin: datetime | int | None = None,
        end: datetime | int | None = None,
        max_count: int = 64,
        unique: bool = False,
        broker: str | None = None,
    ) -> list[Message]:
        """The newest messages of a topic that have a key, oldest first.

        What was sent a moment ago may not be found yet: keys are indexed behind the messages.

        Args:
            key: one key, without spaces, that the messages have.
            begin, end: store times, both inclusive: datetimes or milliseconds. None: any.
            max_count: of all brokers. They are all in memory at once; a broker hands them over in
                answers of at most 1,024, or 4 MiB.
            unique: `key` is the message's UNIQ_KEY, which its producer gave it.
            broker: only there; None = on all that have the topic.
        """
        if not unique:
            check_search_key(key)
        command = QueryMessages(
            topic,
            key,
            max_count,
            0 if begin is None else milliseconds(begin),
            OFFSET_MAX if end is None else milliseconds(end),
            unique,
        )
        found: list[Message] = []
        for each in broker_routes(self._routes.find(topic, self._timeout_s)):
            if broker in (None, each.endpoints.broker):
                found += self._query(each.endpoints, command)
        found.sort(key=lambda message: message.store_timestamp_ms)  # stable: of one broker's order
        return found[-max_count:] if max_count > 0 else []

    def _query(self, endpoints: BrokerEndpoints, command: QueryMessages) -> list[Message]:
        """One broker's, page by page from the newest back, until there are enough."""
        pages: list[list[Message]] = []
        left = command.max_count
        while left > 0:
            page, more_below = self._query_page(endpoints, command)
            pages.append(page)
            left -= len(page)
            if not 0 < more_below < command.below:
                break
            command = msgspec.structs.replace(command, max_count=left, below=more_below)
        return [message for page in reversed(pages) for message in page]

    def _query_page(
        self, endpoints: BrokerEndpoints, command: QueryMessages
    ) -> tuple[list[Message], int]:
        channel = self._routes.channel(endpoints.readers[0], f"a reader of {endpoints.broker}")
        answer, payload = channel.ask(command, timeout_s=self._timeout_s)
        if not isinstance(answer, QueryResult):
            return [], 0
        messages = decode(payload[0].buffer) if payload else ()
        asked = (command.topic, command.key)
        page = [each for each in messages if carries(each, *asked, unique=command.unique)]
        return page, answer.more_below


def parse_offset_msg_id(text: str) -> tuple[str, int]:
    """("ip:port", physical offset) of an offset message id."""
    host_bytes = ID_DIGITS.get(len(text))
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        host_bytes = None
    if host_bytes is None:
        raise ArgumentIllegal(f"{text[:80]!r} is no offset message id: 32 or 56 hex digits")
    address = ipaddress.ip_address(raw[:host_bytes])
    port = int.from_bytes(raw[host_bytes : host_bytes + 4], "big")
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{port}", int.from_bytes(raw[host_bytes + 4 :], "big")
