"""The rival of bench/spark: a source that hands Spark a tuple for each message."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from cometmq.shm.kernel.codec import decode
from cometmq.shm.live.queue_table import QueueRange
from cometmq.shm.reading.column_reader import ColumnReader, FixedPositions
from cometmq.spark.schema import default_schema


class Everything(FixedPositions):
    """Every queue holds as many, none has expired."""

    def __init__(self, log_max: int, queue_max: int) -> None:
        super().__init__(0, log_max)
        self._queue = QueueRange(0, queue_max)

    def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        return self._queue


class TupleSource(DataSource):
    """The same columns out of the same store, as tuples: what a source in plain Python does."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return default_schema()

    def reader(self, schema: Any) -> DataSourceReader:
        return TupleReader(dict(self.options))


class TupleReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.store, self.topic = Path(options["store"]), options["topic"]
        self.log_max, self.queues = int(options["log_max"]), int(options["queues"])
        self.each = int(options["count"]) // self.queues

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(queue_id) for queue_id in range(self.queues)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        reader = ColumnReader.at(self.store, Everything(self.log_max, self.each))
        at = 0
        while at < self.each:
            found = reader.get_message(self.topic, partition.value, at, 32)
            at = found.next_queue_offset
            for one in decode(found.payload, None, False):
                yield (
                    one.topic, "broker", one.queue_id, one.queue_offset,
                    datetime.fromtimestamp(one.store_timestamp_ms / 1000, UTC),
                    datetime.fromtimestamp(one.born_timestamp_ms / 1000, UTC),
                    one.keys, one.tags, one.msg_id, one.body, one.properties, one.reconsume_times,
                )  # fmt: skip
