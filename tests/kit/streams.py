"""Streaming queries that end by themselves. No tests here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

#: Spark gives the process of a streaming source 10 s to start, and a busy machine may take longer.
TOO_LATE: Final = "Python worker failed to connect back"
STARTS: Final = 5


def finished(start: Callable[[], StreamingQuery], wait_s: float) -> StreamingQuery:
    """The query at its end; it is started again, from its checkpoint, where Spark has not waited
    for its source. Raises what it ended with."""
    left = STARTS
    while True:
        left -= 1
        query = start()
        try:
            assert query.awaitTermination(wait_s), f"the stream has not ended after {wait_s} s"
        except StreamingQueryException as error:
            if TOO_LATE not in str(error) or not left:
                raise
        else:
            return query
