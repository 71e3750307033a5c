"""A SparkSession that knows the data source `cometmq`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

from cometmq.spark.schema import COLUMNS, SchemaError

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
# Between the JVM and its Python workers: nobody else can connect, and rows pass a little faster.
LOCAL_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
# What starts those workers; they begin in a third of the time with this one.
DAEMON: Final = "spark.python.daemon.module"
SHUFFLE: Final = "spark.sql.shuffle.partitions"
SPARKS_SHUFFLE: Final = "200"  # what it is by default


def session(
    master: str = "local[*]", *, name: str = "cometmq", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a SparkSession with the source registered; `conf` takes precedence.

    Filters are pushed down if Spark keeps them with their query, which 4.2 and 4.3 do not.

    Workers run this interpreter unless PYSPARK_PYTHON names another. A new session with a local
    master shuffles into as many partitions as it has threads, unless configured: with Spark's 200
    the first aggregated stream of a laptop takes a minute a batch. The session is stopped when
    Python ends, if not before.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    is_new = SparkSession.getActiveSession() is None
    builder = SparkSession.builder.master(master).appName(name)
    ours = {LOCAL_SOCKETS: "true"}
    if _pushes():  # otherwise each query with a filter would only plan its read twice
        ours[PUSHDOWN] = "true"
    if master.startswith("local"):  # elsewhere executors may have another version of the package
        ours[DAEMON] = "cometmq.spark.daemon"
    for key, value in {**ours, **(conf or {})}.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    if is_new and master.startswith("local") and made.conf.get(SHUFFLE) == SPARKS_SHUFFLE:
        made.conf.set(SHUFFLE, str(made.sparkContext.defaultParallelism))
    # Before the JVM: a worker that writes to one which has gone complains with a traceback.
    atexit.register(_stop, made)
    register(made)
    return made


def _pushes() -> bool:
    from cometmq.spark.pushdown import PER_SCAN

    return PER_SCAN


def _stop(session: SparkSession) -> None:
    with suppress(Exception):  # it may have ended by itself, as after Ctrl-C
        session.stop()


def register(spark: SparkSession) -> None:
    """Make `cometmq` known as a format. Every node needs the package installed.

    Writers look a format up in their thread's active session, which a thread of the caller's own
    does not have: it calls this too.
    """
    from cometmq.spark.source import CometDataSource

    if not _is_found(spark):
        spark.dataSource.register(CometDataSource)
    if spark.getActiveSession() is None:
        spark.createDataFrame([], "none int")  # makes it the active one


def _is_found(spark: SparkSession) -> bool:
    """Whether Spark knows it by itself, as it does of an installed package unless another module
    `pyspark_*` fails. It warns whenever what it has found is registered once more.
    """
    try:
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        return bool(manager.dataSourceExists("cometmq"))
    except Exception:  # nothing that pyspark promises, and a Connect session has none
        return False


def messages(
    spark: SparkSession, *, columns: Sequence[str] = (), **options: str | int | bool
) -> DataFrame:
    """Return a DataFrame of messages with only these columns; filters are pushed down if possible.

        messages(spark, store="./store", subscribe="orders", columns=["queue_id", "store_ts"])

    Spark does not tell a source which columns a query uses: only the columns named here are read.
    """
    reader = spark.read.format("cometmq")
    for name in columns:
        if name not in COLUMNS:
            raise SchemaError(f"there is no column {name!r}: {', '.join(COLUMNS)}")
    if columns:
        reader = reader.schema(", ".join(f"{name} {COLUMNS[name][0]}" for name in columns))
    if _pushes() and "pushdown" not in map(str.lower, options):
        reader = reader.option("pushdown", spark.conf.get(PUSHDOWN, "false") or "false")
    for key, value in options.items():
        reader = reader.option(key, value)
    return reader.load()
