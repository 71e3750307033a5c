"""The source `cometmq`: batches and streams of messages for Spark.

    spark.read.format("cometmq").option("store", "./store").option("subscribe", "orders").load()

Which of it runs where: everything but `read` on the driver's machine, in short-lived processes for
batches and in one process for the life of a stream; `read` in the executors' workers.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cometmq.protocol.errors import NotOwner
from cometmq.protocol.tags import parse_tags
from cometmq.spark.arrow import arrow_schema
from cometmq.spark.catalog import COUNT_MAX, LocalStore, RemoteBrokers, open_catalog
from cometmq.spark.offsets import (
    MessagesMissing,
    Offsets,
    Queue,
    check_reaches,
    check_stores,
)
from cometmq.spark.options import (
    CommitOffsets,
    Layout,
    OnMissing,
    OptionError,
    ReadOptions,
    milliseconds,
    parse,
)
from cometmq.spark.planning import LogSpan, Span, coalesce, part_bytes, shares, split
from cometmq.spark.pushdown import NOT_PUSHED, PER_SCAN, Pushed, push
from cometmq.spark.quiet import keep_quiet
from cometmq.spark.reading import MS_MAX, FileTask, LogTask, RpcTask, Task, Wanted, read_task
from cometmq.spark.schema import columns_of, default_schema
from cometmq.spark.selecting import Bounds, choose, present
from cometmq.spark.sink import BatchWriter, StreamWriter, refuse_overwrite
from cometmq.spark.sink_options import parse_write

log = logging.getLogger(__name__)

Ranges = Mapping[Queue, tuple[int, int]]
NOTHING: Final = InputPartition(None)
_REMEDY: Final = "Start a broker on it, or run `cometmq store repair`"


# Workers of pyspark's own daemon plan queries; this is the first code of ours that they run.
keep_quiet()


class CometDataSource(DataSource):
    """Registered as `cometmq`."""

    @classmethod
    def name(cls) -> str:
        return "cometmq"

    def schema(self) -> str:
        return default_schema(metadata=parse(self.options).metadata)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse(self.options)
        if options.pushdown and not PER_SCAN:
            log.warning("%s", NOT_PUSHED)
        kind = PushdownBatchReader if options.pushdown and PER_SCAN else BatchReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            refuse_overwrite(stream=False)
        return BatchWriter(parse_write(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        if overwrite:
            refuse_overwrite(stream=True)
        return StreamWriter(parse_write(self.options), schema)


class _Reading:
    """What batches and streams share: what is wanted of each record, and how tasks are made."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.spark_schema = schema
        tags = parse_tags(options.tags)
        self.wanted = Wanted(
            names=columns_of(schema),
            tags=None if tags is None else tuple(sorted(tags)),
            where=options.where,
            decompress=options.decompress,
            verify_crc=options.verify_crc,
            batch_rows=options.batch_rows,
            batch_bytes=options.batch_bytes,
            on_corrupt=options.on_corrupt,
            on_missing=options.on_missing,
        )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read a partition. It contains the filters, since Spark copies the reader before it calls
        `partitions`."""
        if partition.value is None:
            return iter(())
        task, wanted = partition.value
        return read_task(task, wanted, arrow_schema(self.spark_schema))

    def tasks(self, catalog: LocalStore | RemoteBrokers, ranges: Ranges) -> list[Task]:
        """The ranges, cut and put together to the size that the options say."""
        options = self.options
        ranges = {queue: each for queue, each in ranges.items() if each[0] < each[1]}
        bytes_max = options.max_bytes_per_partition
        count_max = options.max_messages_per_partition or COUNT_MAX
        if options.min_partitions:
            total = sum(catalog.parts(queue, *each, COUNT_MAX)[1] for queue, each in ranges.items())
            bytes_max = part_bytes(total, bytes_max, options.min_partitions)
        spans: list[Span] = []
        for queue, (begin, end) in ranges.items():
            marks, size = catalog.parts(queue, begin, end, bytes_max, count_max)
            spans += split(queue, begin, end, marks, size)
        return [self._task(catalog, part) for part in coalesce(spans, bytes_max, count_max)]

    def _task(self, catalog: LocalStore | RemoteBrokers, spans: tuple[Span, ...]) -> Task:
        broker = spans[0].queue.broker
        if isinstance(catalog, LocalStore):
            return FileTask(broker, str(catalog.path), catalog.log_range()[1], spans)
        return RpcTask(
            broker,
            tuple(catalog.endpoints(broker).readers),
            catalog.segment_bytes(broker),
            spans,
            self.options.timeout_ms,
            self.options.retries,
        )


def _partitions(tasks: list[Task], wanted: Wanted) -> list[InputPartition]:
    return [InputPartition((task, wanted)) for task in tasks] or [NOTHING]


class BatchReader(_Reading, DataSourceReader):
    """One batch: planned once, read by tasks."""

    pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        catalog = open_catalog(self.options)
        try:
            return self._plan(catalog)
        finally:
            catalog.close()

    def _plan(self, catalog: LocalStore | RemoteBrokers) -> list[InputPartition]:
        log_layout = _uses_log(self.options, catalog)
        queues = [queue for queue in choose(catalog, self.options) if self.pushed.takes(queue)]
        found = catalog.ranges(queues)
        bounds = Bounds(catalog, self.options, found, by_filter=log_layout)
        starts, ends = bounds.starts(default="earliest"), bounds.ends()
        ranges = {}
        for queue in queues:
            begin, end = self._pushed_range(bounds, queue, starts[queue], ends[queue])
            if starts[queue] < found[queue][0]:
                begin, end = present(queue, begin, end, found[queue][0], self.options.on_missing)
            ranges[queue] = begin, end
        if log_layout:
            assert isinstance(catalog, LocalStore)
            tasks = _log_tasks(catalog, ranges)
        else:
            tasks = self.tasks(catalog, ranges)
        return _partitions(tasks, self._narrowed(bounds))

    def _narrowed(self, bounds: Bounds) -> Wanted:
        """Return `wanted`, limited by the filters for tags, keys and time."""
        options, pushed, wanted = self.options, self.pushed, self.wanted
        begin_ms, end_ms = pushed.begin_ms, pushed.end_ms
        if bounds.by_filter and options.starting_timestamp:
            begin_ms = max(begin_ms, milliseconds(options.starting_timestamp, "startingTimestamp"))
        if bounds.by_filter and options.ending_timestamp:
            end_ms = min(end_ms, milliseconds(options.ending_timestamp, "endingTimestamp"))
        tags = wanted.tags
        if pushed.tags is not None:
            both = pushed.tags if tags is None else pushed.tags & frozenset(tags)
            tags = tuple(sorted(both))
        keys = None if pushed.keys is None else tuple(sorted(pushed.keys))
        return replace(wanted, tags=tags, keys=keys, begin_ms=begin_ms, end_ms=end_ms)

    def _pushed_range(self, bounds: Bounds, queue: Queue, begin: int, end: int) -> tuple[int, int]:
        pushed = self.pushed
        begin, end = max(begin, pushed.offset_begin), min(end, pushed.offset_end)
        if bounds.by_filter or begin >= end:
            return begin, end
        if pushed.begin_ms > 0:
            begin = max(begin, bounds.catalog.offset_by_time(queue, pushed.begin_ms))
        if pushed.end_ms < MS_MAX:
            end = min(end, bounds.catalog.offset_by_time(queue, pushed.end_ms))
        return begin, end


class PushdownBatchReader(BatchReader):
    """Batch reader with filter pushdown, for a Spark that plans each scan separately. Spark refuses
    a reader with `pushFilters` while its switch is off, so there are two classes."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        self.pushed, left = push(filters)
        return left


def _uses_log(options: ReadOptions, catalog: LocalStore | RemoteBrokers) -> bool:
    if not isinstance(catalog, LocalStore):
        if options.layout is Layout.LOG:
            raise OptionError("layout = log needs the files: transport = file")
        return False
    if options.layout is Layout.QUEUE and catalog.distrust:
        raise OptionError(f"{catalog.distrust}. {_REMEDY}; layout = log reads it as it is")
    if options.layout is Layout.LOG or catalog.distrust:
        catalog.survey()
        return True
    return False


def _log_tasks(catalog: LocalStore, ranges: Ranges) -> list[Task]:
    """One a segment: only there is it known, without a walk, that a record begins."""
    queues = tuple(
        (queue.topic, queue.queue_id, begin, end)
        for queue, (begin, end) in sorted(ranges.items())
        if begin < end
    )
    low, high = catalog.log_range()
    size = catalog.reader.segment_bytes
    tasks: list[Task] = []
    while queues and low < high:
        end = min(high, low // size * size + size)
        tasks.append(LogTask(str(catalog.path), LogSpan(catalog.broker, low, end), queues))
        low = end
    return tasks


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Spark keeps one of these, in a process of its own, as long as the query runs."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        if options.layout is Layout.LOG:
            raise OptionError("layout = log is for batches")
        for name, value in (
            ("endingTimestamp", options.ending_timestamp),
            ("endingOffsets", options.ending_offsets != "latest"),
        ):
            if value:
                raise OptionError(f"{name} is for batches: a stream has no end")
        self._initial: Offsets | None = None
        self._pin: Offsets | None = None  # what the first, empty batch is to say
        self._target: Offsets | None = None  # of Trigger.AvailableNow
        self._triggered_at = time.monotonic()
        self._all_missing: set[Queue] = set()

    @cached_property
    def catalog(self) -> LocalStore | RemoteBrokers:
        found = open_catalog(self.options)
        if isinstance(found, LocalStore) and found.distrust:
            found.close()
            raise OptionError(f"{found.distrust}, and a stream needs them. {_REMEDY}")
        return found

    # --- positions ---

    def initialOffset(self) -> dict[str, Any]:
        """Spark asks twice, and remembers it only with the first batch: see `latestOffset`."""
        if self._initial is None:
            queues = choose(self.catalog, self.options)
            ranges = self.catalog.ranges(queues)
            starts = Bounds(self.catalog, self.options, ranges).starts(default="latest")
            self._initial = self._pin = Offsets(starts, self.catalog.store_ids())
        return self._initial.to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._now()

    def _now(self) -> Offsets:
        """The ends of all queues that are read."""
        ranges = self.catalog.ranges(choose(self.catalog, self.options))
        return Offsets(
            {queue: each.max_queue_offset for queue, each in ranges.items()},
            self.catalog.store_ids(),
        )

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._now().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self.options.max_bytes_per_trigger)

    def latestOffset(self, start: Any = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Where the next batch ends.

        The first batch of a new query is empty: with it Spark writes down where the query began, so
        that a crash before the first message cannot move that.
        """
        if self._pin is not None:
            pinned, self._pin = self._pin, None
            return pinned.to_json()
        begin = Offsets.from_json(start)
        target = self._target or self._now()
        check_stores(begin.stores, target.stores)
        check_reaches(begin, target.queues, target.stores)
        begin = self._with_new_queues(begin, target)
        if isinstance(limit, ReadAllAvailable):
            ends = {queue: max(end, begin.queues[queue]) for queue, end in target.queues.items()}
        else:
            ends = self._limited(begin, target)
        kept = {queue: offset for queue, offset in begin.queues.items() if queue not in ends}
        self._check_gone(kept)
        return Offsets({**kept, **ends}, target.stores).to_json()

    def _with_new_queues(self, begin: Offsets, target: Offsets) -> Offsets:
        """Queues that were not there before are read from their beginning."""
        new = [queue for queue in target.queues if queue not in begin.queues]
        starts = {queue: low for queue, (low, _) in self.catalog.ranges(new).items()}
        return Offsets({**begin.queues, **starts}, begin.stores)

    def _check_gone(self, kept: Mapping[Queue, int]) -> None:
        for queue in kept:
            if self.options.on_missing is OnMissing.FAIL:
                raise MessagesMissing(
                    f"{queue} is not there any more (onMissing = skip reads on without it)"
                )
            if queue not in self._all_missing:
                self._all_missing.add(queue)
                log.error("%s is not there any more; the stream goes on without it", queue)

    def _limited(self, begin: Offsets, target: Offsets) -> dict[Queue, int]:
        """The limits shared out by what waits in each queue; at least one message of each."""
        options = self.options
        waiting = {
            queue: (begin.queues[queue], end)
            for queue, end in target.queues.items()
            if end > begin.queues[queue]
        }
        ends = {queue: begin.queues[queue] for queue in target.queues}
        if self._waits_for_more(sum(end - low for low, end in waiting.values())):
            return ends
        self._triggered_at = time.monotonic()
        waiting = self._present(waiting)
        bytes_max = options.max_bytes_per_trigger
        backlog = {  # of each no more than the whole limit: nobody looks at all of a long queue
            queue: max(1, self.catalog.first_part(queue, *each, bytes_max)[1])
            for queue, each in waiting.items()
        }
        by_bytes = shares(backlog, bytes_max)
        by_count = dict.fromkeys(waiting, COUNT_MAX)
        if options.max_messages_per_trigger:
            counts = {queue: end - low for queue, (low, end) in waiting.items()}
            by_count = shares(counts, options.max_messages_per_trigger)
        for queue, each in waiting.items():
            ends[queue], _ = self.catalog.first_part(queue, *each, by_bytes[queue], by_count[queue])
        return ends

    def _waits_for_more(self, count: int) -> bool:
        wanted = self.options.min_messages_per_trigger
        if self._target is not None or count >= wanted:
            return False
        passed_ms = (time.monotonic() - self._triggered_at) * 1000
        return passed_ms < self.options.max_trigger_delay_ms

    def _present(self, waiting: Ranges) -> dict[Queue, tuple[int, int]]:
        lows = self.catalog.ranges(list(waiting))
        found = {
            queue: present(queue, low, end, lows[queue][0], self.options.on_missing)
            for queue, (low, end) in waiting.items()
        }
        return {queue: each for queue, each in found.items() if each[0] < each[1]}

    # --- batches ---

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        begin, until = Offsets.from_json(start), Offsets.from_json(end)
        now = self.catalog.ranges(list(until.queues))
        stores = self.catalog.store_ids()
        check_stores(until.stores, stores)
        check_reaches(until, {queue: each[1] for queue, each in now.items()}, stores)
        ranges = {
            queue: (begin.queues.get(queue, now[queue][0]), last)
            for queue, last in until.queues.items()
        }
        waiting = {queue: each for queue, each in ranges.items() if each[0] < each[1]}
        found = {
            queue: present(queue, low, last, now[queue][0], self.options.on_missing)
            for queue, (low, last) in waiting.items()
        }
        return _partitions(self.tasks(self.catalog, found), self.wanted)

    def commit(self, end: Any) -> None:
        """Spark calls this one batch late, and never for the last one: see LagListener."""
        if self.options.commit_offsets is not CommitOffsets.AFTER_BATCH:
            return
        group = self.options.consumer_group
        try:
            self._brokers.commit(group, Offsets.from_json(end).queues)
        except NotOwner as error:  # the stream goes on: its own progress is in the checkpoint
            log.error("progress of group %s is not committed: %s", group, error)

    @cached_property
    def _brokers(self) -> RemoteBrokers:
        catalog = self.catalog
        return catalog if isinstance(catalog, RemoteBrokers) else RemoteBrokers(self.options)

    def stop(self) -> None:
        for name in ("catalog", "_brokers"):
            if name in self.__dict__:
                self.__dict__[name].close()
        if isinstance(sys.exc_info()[1], EOFError):
            # This process serves this reader alone, and Spark has closed its end. pyspark would
            # now tell Spark of the EOFError, which fails, and users would see the traceback of
            # that after each stream (python_streaming_source_runner.main, daemon.worker).
            os._exit(0)
