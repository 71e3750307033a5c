"""Spark looks for modules `pyspark_*` with a `DefaultSource`, and one that fails hides all others.

So this module imports only modules that Spark has already loaded, or whose failure it suppresses.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pyspark.sql.datasource import DataSource

with suppress(Exception):
    from cometmq.spark.quiet import keep_quiet

    keep_quiet()


class DefaultSource(DataSource):
    """Makes the source `cometmq`. If that lacks something, it is an error when it is used."""

    def __new__(cls, options: Any) -> Any:
        from cometmq.spark import CometDataSource

        return CometDataSource(options)

    @classmethod
    def name(cls) -> str:
        return "cometmq"
