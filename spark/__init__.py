"""Messages in Spark: the source `cometmq`. Needs the extra `spark` and Java 17.

    from cometmq.spark import session

    spark = session("local[2]")
    df = spark.read.format("cometmq").option("store", "mq").option("subscribe", "orders").load()

What is named here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from cometmq.protocol.version import install

if TYPE_CHECKING:
    from cometmq.spark.listener import LagListener
    from cometmq.spark.sessions import messages, register, session
    from cometmq.spark.source import CometDataSource

__all__ = ["CometDataSource", "LagListener", "messages", "register", "session"]

_HOME: Final = {
    "CometDataSource": "source",
    "LagListener": "listener",
    "messages": "sessions",
    "register": "sessions",
    "session": "sessions",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("pyspark", "pyarrow"):
            raise
        raise ModuleNotFoundError(
            f"{error.name} is needed for this: {install('spark')}", name=error.name
        ) from error
