# ruff: noqa: RUF009 - option() makes a dataclass field, it is not a default of its own.
"""The sink's options; see options.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cometmq.conf.option import Unit, option
from cometmq.protocol.errors import CometError
from cometmq.protocol.names import check_staging_name, check_writable_topic
from cometmq.spark.kafka import WRITE_OPTIONS
from cometmq.spark.options import MIB, OptionError, take_options

SPARKS_OWN: Final = frozenset({"checkpointlocation"})  # Spark hands it to sinks too


class SinkDelivery(StrEnum):
    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    namesrv: str = option(
        "", key="namesrv", help='The name server: "host:port", several separated by ";". Needed.'
    )
    topic: str = option("", key="topic", help="Where all rows go; goes before the column `topic`.")
    delivery: SinkDelivery = option(
        SinkDelivery.EXACTLY_ONCE,
        key="delivery",
        help="exactly_once: a batch is seen when it is committed, and then once. at_least_once: "
        "rows are seen as they are sent, and what is retried may stand in the queues twice.",
    )
    sink_id: str = option(
        "",
        key="sinkId",
        help="With `exactly_once`: who commits. What a sink has committed is not stored again: for "
        "streams a batch of that number, for batches anything. Empty: the query's id, which lives "
        "in the checkpoint; for batches a new one each time.",
    )
    broker_name: str = option(
        "",
        key="brokerName",
        help="With `exactly_once`: the broker that everything goes to, where there are several.",
    )
    batch_bytes: int = option(
        MIB // 4,
        key="batchBytes",
        unit=Unit.BYTES,
        at_least=1,
        at_most=8 * MIB,
        help="A batch of messages for one queue leaves when the next would take it over this.",
    )
    max_message_bytes: int = option(
        4 * MIB,
        key="maxMessageSize",
        unit=Unit.BYTES,
        at_least=1,
        at_most=15 * MIB,
        help="A larger body is refused before it is sent. The broker has a limit of its own.",
    )
    max_in_flight_bytes: int = option(
        8 * MIB,
        key="maxInFlightBytes",
        unit=Unit.BYTES,
        at_least=1,
        at_most=1 << 40,
        help="What a task has sent and the broker has not answered; with more it waits.",
    )
    multi_tags: bool = option(
        False,
        key="multiTags",
        help="Write tags joined by || as they are: a message that has several, as RocketMQ knows "
        "them. Else such a tag is refused: it is an expression, which belongs to a subscription.",
    )
    timeout_ms: int = option(
        30_000, key="timeoutMs", at_least=1, help="For one batch, retries included."
    )


def parse_write(given: Mapping[str, str]) -> WriteOptions:
    """The options of one write. Raises OptionError."""
    options = WriteOptions(
        **take_options(
            WriteOptions,
            {name: text for name, text in given.items() if name not in SPARKS_OWN},
            WRITE_OPTIONS,
        )
    )
    if not options.namesrv:
        raise OptionError("say where to write: namesrv (host:port)")
    if options.topic:
        try:
            check_writable_topic(options.topic)
        except CometError as error:
            raise OptionError(f"topic: {error}") from None
    if options.sink_id:
        try:
            check_staging_name("sink", options.sink_id)
        except CometError as error:
            raise OptionError(f"sinkId: {error}") from None
    once = options.delivery is SinkDelivery.EXACTLY_ONCE
    for name, value in (("sinkId", options.sink_id), ("brokerName", options.broker_name)):
        if value and not once:
            raise OptionError(f"{name} is for delivery = exactly_once")
    return options
