"""The sink `cometmq`: rows of batches and streams become messages.

    df.write.format("cometmq").mode("append").option("namesrv", ...).option("topic", "t").save()

Which of it runs where: `write` in the executors' workers, the rest on the driver's machine, the
commit of a stream's batch on an object of its own: what it needs travels in the commit messages.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from cometmq.client.sending.bodies import BodySender
from cometmq.client.sending.staging import SinkLine, StageWriter
from cometmq.protocol.errors import CometError
from cometmq.spark.encoding import Encoding, Outlet, batches_of, check_columns
from cometmq.spark.options import OptionError
from cometmq.spark.sink_options import SinkDelivery, WriteOptions

log = logging.getLogger(__name__)


QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task has sent, and the stage that it lies in; "" if there is none."""

    rows: int
    sink: str = ""
    epoch: int = 0
    stage: str = ""
    broker: str = ""


class _Writing:
    """What batches and streams share."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema, has_topic=bool(options.topic))
        self.options = options

    def whose(self, context: TaskContext) -> tuple[str, int]:
        """Sink and epoch of the task."""
        raise NotImplementedError

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        try:
            if self.options.delivery is SinkDelivery.AT_LEAST_ONCE:
                return self._send(iterator)
            return self._stage(iterator, context)
        except CometError as error:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            text = f"partition {context.partitionId()}: {error}{notes}"
            raise type(error)(text) from None

    def _send(self, iterator: Iterator[Any]) -> Written:
        with BodySender(
            self.options.namesrv,
            timeout_s=self.options.timeout_ms / 1000,
            max_in_flight_bytes=self.options.max_in_flight_bytes,
        ) as sender:
            rows = self._encoding(sender).send_all(batches_of(iterator))
            sender.flush()
        return Written(rows)

    def _stage(self, iterator: Iterator[Any], context: TaskContext) -> Written:
        sink, epoch = self.whose(context)
        # A name that no other attempt has: what a zombie writes is never mixed with ours.
        name = f"{context.partitionId()}-{context.attemptNumber()}-{secrets.token_hex(8)}"
        with self._line(sink, self.options.broker_name) as line:
            stage = StageWriter(line, epoch, name)
            rows = self._encoding(stage).send_all(batches_of(iterator))
            if not stage.batches:
                return Written(0)
            stage.finish()
            return Written(rows, sink, epoch, name, line.broker)

    def _line(self, sink: str, broker: str) -> SinkLine:
        options = self.options
        return SinkLine(options.namesrv, sink, broker=broker, timeout_s=options.timeout_ms / 1000)

    def _encoding(self, outlet: Outlet) -> Encoding:
        options = self.options
        return Encoding(
            outlet,
            options.topic,
            options.batch_bytes,
            options.max_message_bytes,
            options.multi_tags,
        )

    def commit_stages(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """One command, whatever happens to it and to us: it may come again."""
        staged = _staged(messages)
        if not staged:
            return
        brokers = sorted({each.broker for each in staged})
        if len(brokers) > 1:
            raise OptionError(
                f"rows went to {' and '.join(brokers)}; what is to be there exactly once goes "
                "through one broker: say which, brokerName"
            )
        sink, epoch = staged[0].sink, staged[0].epoch
        assert all((each.sink, each.epoch) == (sink, epoch) for each in staged)
        with self._line(sink, brokers[0]) as line:
            answer = line.commit(epoch, [each.stage for each in staged])
        if answer.already:
            log.warning("sink %s has committed epoch %d before: nothing is stored", sink, epoch)

    def drop_stages(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What is not reached here is dropped by its lease."""
        for each in _staged(messages):
            try:
                with self._line(each.sink, each.broker) as line:
                    line.drop(each.epoch, [each.stage])
            except CometError as error:
                log.warning("stage %s is left to its lease: %s", each.stage, error)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [each for each in messages if isinstance(each, Written) and each.stage]


class BatchWriter(_Writing, DataSourceArrowWriter):
    """One batch. With `at_least_once`, tasks that Spark starts again send again."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._sink = options.sink_id or f"batch-{secrets.token_hex(16)}"

    def whose(self, context: TaskContext) -> tuple[str, int]:
        return self._sink, 0

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self.commit_stages(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self.drop_stages(messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """One batch of a stream: Spark gives it the same number when it is run again."""

    def whose(self, context: TaskContext) -> tuple[str, int]:
        query, number = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        assert query is not None, "a task of a stream knows its query"
        assert number is not None, "and its batch"
        return self.options.sink_id or query, int(number)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        assert all(each.epoch == batchId for each in _staged(messages))
        self.commit_stages(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self.drop_stages(messages)


def refuse_overwrite(*, stream: bool) -> None:
    if stream:
        raise OptionError(
            "outputMode complete would send the whole result with every batch: use append, or "
            "write the changes of a batch in foreachBatch"
        )
    raise OptionError(
        'a topic cannot be overwritten, messages are only added: .mode("append"). For save() '
        "without a mode Spark also reports Overwrite, whatever the format; Append is the only mode "
        "here"
    )
