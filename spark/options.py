# ruff: noqa: RUF009 - option() makes a dataclass field, it is not a default of its own.
"""The source's options: name, type, default and text, declared once; the sink's are alike.

Spark hands over texts, with names in lower case. docs/spark.md prints the table that comes from
here, and a test compares it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from cometmq.conf.option import Unit, option, options_of, readable
from cometmq.protocol.errors import CometError, ConfigError, SubscriptionIllegal
from cometmq.protocol.tags import check_expression
from cometmq.shm.reading.selection import filter_of
from cometmq.spark.kafka import READ_OPTIONS, counterpart

MIB: Final = 1 << 20


class OptionError(CometError, ValueError):
    """An option that does not exist, or has a value that cannot be used."""

    code = 9042


class Transport(StrEnum):
    AUTO = "auto"
    FILE = "file"
    RPC = "rpc"


class Isolation(StrEnum):
    DURABLE = "durable"
    DISPATCHED = "dispatched"


class OnMissing(StrEnum):
    FAIL = "fail"
    SKIP = "skip"


class OnCorrupt(StrEnum):
    FAIL = "fail"
    SKIP = "skip"
    NULL_BODY = "null-body"


class Layout(StrEnum):
    AUTO = "auto"
    QUEUE = "queue"
    LOG = "log"


class OnNoTimestamp(StrEnum):
    LATEST = "latest"
    ERROR = "error"


class GroupFallback(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"
    ERROR = "error"


class CommitOffsets(StrEnum):
    NONE = "none"
    AFTER_BATCH = "afterBatch"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    store: str = option(
        "",
        key="store",
        aliases=("path",),
        help="A store directory, served by a broker of this machine or by nobody. This or "
        "`namesrv` is needed; with both, tasks read the files and groups go through the broker.",
    )
    namesrv: str = option(
        "", key="namesrv", help='The name server: "host:port", several separated by ";".'
    )
    broker_name: str = option(
        "",
        key="brokerName",
        help="With `store`: what the column `broker` says and offsets name. Empty: what the "
        "broker that had the store open last is called, else `broker`.",
    )
    subscribe: str = option("", key="subscribe", help="Topics, separated by commas.")
    subscribe_pattern: str = option(
        "",
        key="subscribePattern",
        help="A regular expression that the whole name of a topic matches.",
    )
    assign: str = option(
        "", key="assign", help='Queues, as JSON: {"topic": {"broker": [0, 1]}}, or {"topic": [0]}.'
    )
    tags: str = option("*", key="tags", help='"a || b": only messages with one of these tags.')
    where: str = option(
        "",
        key="where",
        help="SQL92 over the messages' properties, as consumers have it: \"amount > 5 AND region "
        "IN ('eu', 'us')\". Evaluated where the records lie.",
    )
    starting_offsets: str = option(
        "",
        key="startingOffsets",
        help="earliest, latest, group (what `consumerGroup` has committed), or JSON "
        '{"topic": {"broker": {"0": 17, "1": -2}}}; -2 earliest, -1 latest. '
        "Empty: earliest in a batch, latest in a stream.",
    )
    ending_offsets: str = option(
        "latest", key="endingOffsets", help="In a batch: latest, or JSON as above; exclusive."
    )
    starting_timestamp: str = option(
        "",
        key="startingTimestamp",
        help="The first message stored then or later: ISO 8601 (UTC where no zone is said) or "
        "milliseconds. Goes before `startingOffsets`.",
    )
    ending_timestamp: str = option(
        "", key="endingTimestamp", help="In a batch: only messages stored before."
    )
    on_no_timestamp: OnNoTimestamp = option(
        OnNoTimestamp.LATEST,
        key="onNoTimestamp",
        help="A queue without a message as young as `startingTimestamp`: begin at its end or fail.",
    )
    max_messages_per_trigger: int = option(
        0,
        key="maxMessagesPerTrigger",
        at_least=0,
        help="Messages in one batch of a stream; 0 = no limit.",
    )
    max_bytes_per_trigger: int = option(
        256 * MIB,
        key="maxBytesPerTrigger",
        unit=Unit.BYTES,
        at_least=1,
        at_most=1 << 40,
        help="Bytes of records in one batch of a stream, shared out by backlog; each queue that "
        "has something gets one message at least.",
    )
    min_messages_per_trigger: int = option(
        0,
        key="minMessagesPerTrigger",
        at_least=0,
        help="A stream waits until there are so many, but not longer than `maxTriggerDelay`.",
    )
    max_trigger_delay_ms: int = option(
        900_000, key="maxTriggerDelay", at_least=0, help="See `minMessagesPerTrigger`."
    )
    min_partitions: int = option(
        0, key="minPartitions", at_least=0, at_most=65_536, help="At least so many tasks, if there "
        "is so much to read.",
    )  # fmt: skip
    max_bytes_per_partition: int = option(
        64 * MIB,
        key="maxBytesPerPartition",
        unit=Unit.BYTES,
        at_least=1,
        at_most=1 << 40,
        help="What one task reads; smaller ranges are put together up to this.",
    )
    max_messages_per_partition: int = option(
        0, key="maxMessagesPerPartition", at_least=0, help="The same in messages; 0 = no limit."
    )
    layout: Layout = option(
        Layout.AUTO,
        key="layout",
        help="queue: through the ConsumeQueues. log: whole log segments, in the log's order, for "
        "batches of a store that nobody serves. auto: log where the queues cannot be trusted "
        "because the store was not closed or they have lost something, else queue.",
    )
    transport: Transport = option(
        Transport.AUTO,
        key="transport",
        help="file: tasks map the segments read-only. rpc: through the readers. auto: file with "
        "`store`, else rpc.",
    )
    isolation: Isolation = option(
        Isolation.DURABLE,
        key="isolation",
        help="durable: only what a loss of power cannot take back. dispatched: all there is.",
    )
    on_missing: OnMissing = option(
        OnMissing.FAIL,
        key="onMissing",
        help="Messages of the range have expired, or a topic is not there: fail, or go on without "
        "them, with a line in the log.",
    )
    on_corrupt: OnCorrupt = option(
        OnCorrupt.FAIL,
        key="onCorrupt",
        help="A record that does not hold. fail: the query ends. skip: it is left out, with a line "
        "in the log. null-body: where only its body is wrong it is delivered with a null body; the "
        "query ends at others.",
    )
    verify_crc: bool = option(
        True, key="verifyCrc", help="Whether each body is checked against its CRC."
    )
    consumer_group: str = option("", key="consumerGroup", help="For the next two.")
    commit_offsets: CommitOffsets = option(
        CommitOffsets.NONE,
        key="commitOffsets",
        help="afterBatch: the group's progress follows the stream's. The source commits one batch "
        "late; cometmq.spark.LagListener commits the last one too.",
    )
    group_fallback: GroupFallback = option(
        GroupFallback.EARLIEST,
        key="groupFallback",
        help="Where the group has committed nothing.",
    )
    pushdown: bool = option(
        False,
        key="pushdown",
        help="Filters on topic, broker, queue_id, queue_offset, store_ts, tags and keys choose "
        "what a batch reads. No effect (and a warning) with Spark 4.2 and 4.3: see Filters. Later "
        "versions need spark.sql.python.filterPushdown.enabled, which cometmq.spark.session sets; "
        "cometmq.spark.messages then sets this.",
    )
    decompress: bool = option(True, key="decompress", help="Whether `body` is unfolded.")
    include_internal: bool = option(
        False,
        key="includeInternal",
        help="Whether `subscribePattern` finds the broker's own topics too.",
    )
    metadata: bool = option(
        False, key="metadata", help="The default schema without body and properties."
    )
    batch_rows: int = option(
        16_384, key="batchRows", at_least=1, at_most=1 << 20, help="Rows in one Arrow batch."
    )
    batch_bytes: int = option(
        MIB,
        key="batchBytes",
        at_least=1,
        at_most=256 * MIB,
        help="Bytes of records in one Arrow batch; one record always fits.",
    )
    timeout_ms: int = option(
        10_000, key="timeoutMs", at_least=1, help="For one answer of a broker."
    )
    retries: int = option(5, key="retries", at_least=0, at_most=1000, help="Of one request.")

    @property
    def transport_used(self) -> Transport:
        if self.transport is not Transport.AUTO:
            return self.transport
        return Transport.FILE if self.store else Transport.RPC


def parse(given: Mapping[str, str]) -> ReadOptions:
    """The options of one DataFrame. Raises OptionError, which never repeats a secret's value."""
    options = ReadOptions(**take_options(ReadOptions, given))
    _check_together(options)
    return options


def take_options(
    kind: type, given: Mapping[str, str], kafkas: dict[str, str] = READ_OPTIONS
) -> dict[str, Any]:
    """Return the given options by the names of the attributes of `kind`. Raises OptionError.

    Args:
        kafkas: Kafka's options and their counterparts here, for the error of an unknown option.
    """
    declared = options_of(kind)
    by_name = {name.lower(): entry for entry in declared.values() for name in entry.names}
    values: dict[str, Any] = {}
    for name, text in given.items():
        entry = by_name.get(name.lower())
        if entry is None:
            hint = counterpart(name, kafkas) or _nearest(kind, name)
            raise OptionError(f"there is no option {name!r}{hint}")
        try:
            value = entry.take(text)
        except ConfigError as error:
            raise OptionError(str(error)) from None
        if values.setdefault(entry.attribute, value) != value:
            raise OptionError(f"{' and '.join(entry.names)} are the same option, with two values")
    return values


def _nearest(kind: type, name: str) -> str:
    names = {key.lower(): key for entry in options_of(kind).values() for key in entry.names}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]}?" if close else "; docs/spark.md lists them"


def _check_together(options: ReadOptions) -> None:
    if not options.store and not options.namesrv:
        raise OptionError("say what to read: store (a directory) or namesrv (host:port)")
    for name in ("store", "namesrv"):
        transport = Transport.FILE if name == "store" else Transport.RPC
        if options.transport is transport and not getattr(options, name):
            raise OptionError(f"transport = {transport.value} needs {name}")
    chosen = [
        key
        for key, value in (
            ("subscribe", options.subscribe),
            ("subscribePattern", options.subscribe_pattern),
            ("assign", options.assign),
        )
        if value
    ]
    if len(chosen) != 1:
        found = "none is given" if not chosen else " and ".join(chosen) + " are"
        raise OptionError(
            f"one of subscribe, subscribePattern and assign says what to read; {found}"
        )
    try:
        check_expression(options.tags)
    except SubscriptionIllegal as error:
        raise OptionError(f"tags: {error}") from None
    try:
        filter_of(options.where)
    except SubscriptionIllegal as error:
        raise OptionError(f"where: {error}") from None
    by_group = options.starting_offsets == "group"
    if (
        by_group or options.commit_offsets is not CommitOffsets.NONE
    ) and not options.consumer_group:
        raise OptionError("startingOffsets = group and commitOffsets need consumerGroup")
    if options.commit_offsets is not CommitOffsets.NONE and not options.namesrv:
        raise OptionError("commitOffsets needs namesrv: a group's progress is the broker's to keep")


def milliseconds(text: str, name: str) -> int:
    """Of an ISO 8601 time, UTC where it names no zone, or of a number of milliseconds."""
    stripped = text.strip()
    if stripped.lstrip("-").isdigit() and len(stripped) < 18:
        return int(stripped)
    try:
        moment = datetime.fromisoformat(stripped)
    except ValueError:
        raise OptionError(f"{name} = {text[:80]!r}: neither ISO 8601 nor milliseconds") from None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return -((-int(aware.timestamp() * 1_000_000)) // 1000)  # up: never a message too early


def load_json(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{name} is JSON of the wrong shape: an object is wanted")
    return found


def as_table(kind: type = ReadOptions) -> str:
    """For docs/spark.md."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for entry in options_of(kind).values():
        default = entry.default
        if entry.unit is not None and isinstance(default, int):
            shown = readable(default, entry.unit)
        elif isinstance(default, bool):
            shown = str(default).lower()
        else:
            shown = str(getattr(default, "value", default)) if default != "" else ""
        names = ", ".join(f"`{name}`" for name in entry.names)
        text = entry.help.replace("|", "\\|")
        if isinstance(default, StrEnum):
            text += f" One of {', '.join(f'`{each}`' for each in type(default))}."
        lines.append(f"| {names} | {f'`{shown}`' if shown else ''} | {text} |")
    return "\n".join(lines) + "\n"
