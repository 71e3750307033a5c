"""Streaming queries that end by themselves or by Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

# What Spark says when the process of a streaming source has not started within 10 s, as it may on a
# busy machine. No setting changes that time.
TOO_LATE: Final = "Python worker failed to connect back"
STARTS: Final = 5


def finished(start: Callable[[], StreamingQuery], wait_s: int | None = None) -> StreamingQuery:
    """The query once it has ended; Ctrl-C stops it.

    Where Spark has not waited for the source's process, the query is started again and goes on from
    its checkpoint.

        writer = frame.writeStream.option("checkpointLocation", "at")
        finished(writer.trigger(availableNow=True).start)

    Args:
        wait_s: whole seconds after which a start's query is stopped; None: never.

    Raises what the query ended with, and TimeoutError.
    """
    from pyspark.errors import StreamingQueryException

    failures = 0  # in a row
    while True:
        query = start()
        try:
            if wait_s is None:
                query.awaitTermination()
            elif not query.awaitTermination(wait_s):
                query.stop()
                raise TimeoutError(f"the stream has not ended after {wait_s} s")
        except KeyboardInterrupt:
            query.stop()
            return query
        except StreamingQueryException as error:
            if TOO_LATE not in str(error):
                raise
            failures = 1 if query.recentProgress else failures + 1
            if failures == STARTS:
                raise
            log.warning("Spark has not waited for the process of the stream's source: this machine "
                        "is busy; the stream is started again")  # fmt: skip
        else:
            return query
