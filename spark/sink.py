"""The sink `cometmq`: rows of batches and streams become messages.

    df.write.format("cometmq").mode("append").option("namesrv", ...).option("topic", "t").save()

Which of it runs where: `write` in the executors' workers, the rest on the driver's machine, the
commit of a stream's batch on an object of its own: what it needs travels in the commit messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from cometmq.client.bodies import BodySender
from cometmq.protocol.errors import CometError
from cometmq.spark.encoding import Encoding, batches_of, check_columns
from cometmq.spark.options import OptionError
from cometmq.spark.sink_options import WriteOptions


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task has sent."""

    rows: int


class _Writing:
    """What batches and streams share."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema, has_topic=bool(options.topic))
        self.options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        options = self.options
        with BodySender(
            options.namesrv,
            timeout_s=options.timeout_ms / 1000,
            max_in_flight_bytes=options.max_in_flight_bytes,
        ) as sender:
            encoding = Encoding(
                sender, options.topic, options.batch_bytes, options.max_message_bytes
            )
            with named_by_partition():
                rows = encoding.send_all(batches_of(iterator))
                sender.flush()
        return Written(rows)


class named_by_partition:
    """Errors of a task say of which partition the row is."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        context = TaskContext.get()
        if isinstance(error, CometError) and context is not None:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise type(error)(f"partition {context.partitionId()}: {error}{notes}") from None


class BatchWriter(_Writing, DataSourceArrowWriter):
    """One batch. Tasks that Spark starts again send again."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What was sent is stored."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What was sent stays: it has been delivered."""


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """What was sent is stored."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """What was sent stays: it has been delivered."""


def refuse_overwrite(*, stream: bool) -> None:
    if stream:
        raise OptionError(
            "outputMode complete would send the whole result with every batch: use append, or "
            "write the changes of a batch in foreachBatch"
        )
    raise OptionError('a topic cannot be overwritten, messages are only added: .mode("append")')
