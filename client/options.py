"""Keyword arguments of producers and consumers, as types: for whoever hands them on.

They are declared by `Producer`, its methods and `Consumer`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypedDict

from cometmq.client.questions import Position
from cometmq.client.sending.outgoing import Keys
from cometmq.client.sending.pending import Checker


class ProducerOptions(TypedDict, total=False):
    """Of `Producer`, but for `name_server`."""

    linger_ms: float
    batch_bytes: int
    batch_count: int
    timeout_s: float | None
    retry_max: int | None
    max_in_flight_bytes: int
    max_message_bytes: int
    compress: str | None
    compress_over: int
    compress_level: int | None
    transport: str
    wait_for_broker: float
    name: str | None
    checker: Checker | None
    producer_id: str | None
    dedup: str | None
    dedup_window: timedelta | float


class OnewayOptions(TypedDict, total=False):
    """Of `Producer.send_oneway`."""

    tags: str | None
    keys: Keys
    properties: Mapping[str, str] | None
    ordering_key: str | None
    queue_id: int | None
    flag: int
    delay_level: int
    deliver_at: datetime | None
    deliver_after: timedelta | float | None


class TransactionOptions(TypedDict, total=False):
    """Of `Producer.transaction` and `Transaction.send`."""

    tags: str | None
    keys: Keys
    properties: Mapping[str, str] | None
    ordering_key: str | None
    queue_id: int | None
    flag: int


class SendOptions(OnewayOptions, total=False):
    """Of `Producer.send` and `send_many`."""

    wait: bool


class PopOptions(TypedDict, total=False):
    """Of `PopConsumer`, but for `name_server`, `group`, `topic` and `tags`."""

    sql: str
    orderly: bool
    invisible_s: float
    start: str
    max_reconsume_times: int | None
    timeout_s: float
    wait_for_broker: float


class ConsumerOptions(TypedDict, total=False):
    """Of `Consumer`, but for `name_server`, `group`, `topic` and `tags`."""

    sql: str
    start: Position
    auto_commit_ms: int
    pull_bytes: int
    prefetch_bytes: int
    prefetch_count: int
    member: str | None
    broadcast: bool | str | Path
    transport: str
    spin_us: float
    wait_for_broker: float
    max_reconsume_times: int | None
