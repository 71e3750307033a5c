"""A stream is started again where Spark has not waited for its source; the queries are scripted."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
from pyspark.errors import StreamingQueryException

from cometmq.spark.streams import STARTS, TOO_LATE, finished


class Query:
    """It ends with that error, after so many batches."""

    def __init__(self, error: str = "", batches: int = 0) -> None:
        self._error = error
        self.recentProgress = [{}] * batches

    def awaitTermination(self, _wait_s: int | None = None) -> bool:
        if self._error:
            raise StreamingQueryException(self._error)
        return True


def run(*queries: Query) -> tuple[Query, int]:
    """What `finished` returns, and how many it has started."""
    left = list(queries)
    found: Any = finished(cast("Any", partial(left.pop, 0)))
    return found, len(queries) - len(left)


def late(batches: int = 0) -> Query:
    return Query(f"org.apache.spark.SparkException: {TOO_LATE}.", batches)


def test_it_is_started_again() -> None:
    last = Query()
    assert run(late(), late(), last, Query()) == (last, 3)


def test_not_for_ever() -> None:
    queries = [late() for _ in range(STARTS + 1)]
    with pytest.raises(StreamingQueryException, match=TOO_LATE):
        finished(cast("Any", queries.pop))
    assert len(queries) == 1


def test_a_stream_that_has_worked_has_all_its_starts_again() -> None:
    last = Query()
    most = [late() for _ in range(STARTS - 2)]
    begun = [*most, late(batches=3), *most, late(batches=1), *most, last]
    assert run(*begun) == (last, len(begun))


def test_another_error() -> None:
    wrong = Query("no such column", batches=1)
    with pytest.raises(StreamingQueryException, match="no such column"):
        run(wrong, Query())
