"""Spark's Kafka connector and a Kafka broker for it, from Maven Central."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyspark
from pyspark.sql import SparkSession

from cometmq.bench.peers.kafka import JARS, Kafka
from cometmq.bench.peers.maven import Bundle, NotAvailable
from cometmq.bench.systems import Durability

SQL: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
TOKENS: Final = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
# Central may lag behind the package index. What is pinned reads from the same Spark 4; its token
# provider, which only logs in, was last published there as 4.0.0.
PINNED: Final = "4.2.0"
BUNDLES: Final = (
    Bundle(f"spark-kafka-{pyspark.__version__}", (f"{SQL}:{pyspark.__version__}",)),
    Bundle(f"spark-kafka-{PINNED}", (f"{SQL}:{PINNED}", f"{TOKENS}:4.0.0")),
)


def add_connector(spark: SparkSession, fetch: bool) -> str:
    """Make the format `kafka` known to a running session: its version. Raises NotAvailable.

    Args:
        fetch: what is not in the cache yet; a broker is got too.
    """
    _jars(JARS, fetch)
    why = []
    for bundle in BUNDLES:
        try:
            jars = _jars(bundle, fetch)
        except NotAvailable as error:
            why.append(str(error))
            continue
        for jar in _lacking(jars):
            spark.sql(f"ADD JAR '{jar}'")
        return bundle.artifacts[0].rpartition(":")[2]
    raise NotAvailable("; ".join(why))


def _jars(bundle: Bundle, fetch: bool) -> list[Path]:
    if not fetch and bundle.missing:
        raise NotAvailable(bundle.missing)
    return bundle.fetch()


def _lacking(jars: list[Path]) -> list[Path]:
    """Those that PySpark does not bring, in whatever version."""
    there = {_name(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    return [jar for jar in jars if _name(jar) not in there]


def _name(jar: Path) -> str:
    return jar.stem.rpartition("-")[0]


@contextmanager
def kafka_broker(folder: Path, partitions: int) -> Iterator[str]:
    """Its address. Topics come to be when they are written to."""
    settings = {"auto.create.topics.enable": "true", "num.partitions": str(partitions)}
    broker = Kafka(settings)
    broker.start(folder, Durability.PAGE_CACHE)
    try:
        yield str(broker.endpoint()["bootstrap"])
    finally:
        broker.stop()
