"""Progress of a running stream: its lag, and its group's offsets in the broker."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from cometmq.protocol.errors import CometError
from cometmq.spark.catalog import COUNT_MAX, RemoteBrokers
from cometmq.spark.offsets import Offsets, Queue
from cometmq.spark.options import OptionError, ReadOptions

log = logging.getLogger(__name__)


class LagRow(NamedTuple):
    """How far a query is behind in one queue, after one batch. None: not known."""

    query: str
    batch: int
    topic: str
    broker: str
    queue_id: int
    end: int  # the next message that it will read
    latest: int  # the next message to come
    lag_messages: int
    lag_bytes: int | None
    lag_ms: int | None  # age of the first message that was not read


class LagListener(StreamingQueryListener):
    """Counts the lag of streams, and commits a group's progress after each of their batches.

        listener = LagListener("127.0.0.1:9876", "billing")
        spark.streams.addListener(listener)

    Spark tells it of a batch after that is in the checkpoint's commit log, so the group's progress
    never runs ahead. It only moves forward. What cannot be reached is a line in the log: the next
    batch tries again, and the end of the query as well.

    Args:
        name_server: where the brokers are found.
        group: whose progress follows; "" = only lag.
        query: the name of the query, "" for all that read with this source.
        on_rows: takes the rows of each batch; `rows` keeps the last.
    """

    def __init__(
        self,
        name_server: str,
        group: str = "",
        *,
        query: str = "",
        on_rows: Callable[[Sequence[LagRow]], None] | None = None,
    ) -> None:
        self._options = ReadOptions(namesrv=name_server, retries=1)
        self._brokers: RemoteBrokers | None = None
        self._group = group
        self._query = query
        self._on_rows = on_rows
        self._late: dict[Queue, int] = {}  # read, and not committed yet
        self.rows: list[LagRow] = []

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is known yet."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        self._commit({})

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        name = progress.name or str(progress.id)
        if self._query not in ("", name):
            return
        for source in progress.sources:
            end = _offsets(source.endOffset)
            if end is not None:
                self._commit(end.queues)
                self._count(name, progress.batchId, end, _offsets(source.latestOffset))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._commit({})

    def close(self) -> None:
        """Let go of the lines to the brokers."""
        if self._brokers is not None:
            self._brokers.close()
            self._brokers = None

    def _commit(self, offsets: Mapping[Queue, int]) -> None:
        if not self._group:
            return
        self._late |= offsets
        if not self._late:
            return
        try:
            self._connected().commit(self._group, self._late)
        except (CometError, OptionError) as error:
            log.error("progress of group %s is not committed yet: %s", self._group, error)
        else:
            self._late = {}

    def _count(self, name: str, batch: int, end: Offsets, latest: Offsets | None) -> None:
        rows = [
            self._row(name, batch, queue, offset, (latest or end).queues.get(queue, offset))
            for queue, offset in end.queues.items()
        ]
        self.rows = rows
        if self._on_rows is not None:
            self._on_rows(rows)

    def _row(self, name: str, batch: int, queue: Queue, end: int, latest: int) -> LagRow:
        lag = max(0, latest - end)
        size: int | None = 0
        age_ms: int | None = 0
        if lag:
            try:
                brokers = self._connected()
                _, size = brokers.parts(queue, end, latest, COUNT_MAX)
                stored = brokers.store_time(queue, end)
                age_ms = None if stored is None else max(0, int(time.time() * 1000) - stored)
            except (CometError, OptionError) as error:
                log.warning("lag of %s: %s", queue, error)
                size = age_ms = None
        return LagRow(
            name, batch, queue.topic, queue.broker, queue.queue_id, end, latest, lag, size, age_ms
        )

    def _connected(self) -> RemoteBrokers:
        if self._brokers is None:
            self._brokers = RemoteBrokers(self._options)
        return self._brokers


def _offsets(text: Any) -> Offsets | None:
    """None for another source's."""
    try:
        return Offsets.from_json(json.loads(text)) if text else None
    except (ValueError, OptionError):
        return None
