"""Reading into Spark, against Spark's Kafka connector on a Kafka broker with the same messages.

Canonical load: 2 M messages of 200 B in 16 queues or partitions, with the same keys, and headers
for our properties; both brokers run on this machine and have all in the page cache; sink `noop`.
Seven columns are what both have: topic, queue, offset, time, key, body, headers. All rivals take
turns in one run and one JVM; the ratio of their medians counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import Report
from pyspark.sql import DataFrame, SparkSession
from spark_kafka import add_connector, kafka_broker
from spark_rounds import QUEUES, TOPIC, Turns, drain, fill, same_rows

from cometmq import Broker
from cometmq.bench.peers.maven import NotAvailable

pytestmark = pytest.mark.slow

OURS = (
    "topic string, queue_id int, queue_offset bigint, store_ts timestamp, keys string, "
    "body binary, properties map<string,string>"
)
THEIRS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
# As a consumer of large topics is set; the connector's own setting hands out 500 at a time.
CONSUMER = {"kafka.max.poll.records": "10000", "kafka.max.partition.fetch.bytes": str(10 << 20)}


@pytest.mark.timeout(1200)  # --full on a busy machine
def test_kafka(spark: SparkSession, full: bool, tmp_path: Path, report: Report) -> None:
    if not full:
        pytest.skip("a Kafka broker takes its time: --full only")
    count = 2_000_000
    try:
        version = add_connector(spark, fetch=True)
    except NotAvailable as why:
        pytest.skip(f"a comparison with Spark's Kafka connector: {why}")
    with Broker(tmp_path / "store") as broker, kafka_broker(tmp_path / "kafka", QUEUES) as address:
        fill(broker, count)

        def comet(schema: str = "", **options: str) -> DataFrame:
            reader = spark.read.format("cometmq").option("subscribe", TOPIC)
            reader = reader.schema(schema) if schema else reader
            return reader.options(isolation="dispatched", **options).load()

        def kafka(topic: str, **options: str) -> DataFrame:
            reader = spark.read.format("kafka").option("kafka.bootstrap.servers", address)
            reader = reader.options(subscribe=topic, includeHeaders="true", **options)
            return reader.load().select(*THEIRS)

        file, rpc = {"store": str(tmp_path / "store")}, {"namesrv": broker.name_server}
        for codec in ("none", "lz4"):
            send(comet(**file), address, codec)
        theirs = {
            f"kafka {version}": kafka("none"),
            f"kafka {version}, tuned": kafka("none", **CONSUMER),
            f"kafka {version}, tuned, lz4": kafka("lz4", **CONSUMER),
        }
        ours = {
            "file": comet(OURS, **file),
            "rpc": comet(OURS, **rpc),
            "file, 12 columns": comet(**file),
            "rpc, 12 columns": comet(**rpc),
        }
        frames = ours | theirs
        seen = {name: same_rows(frame) for name, frame in ours.items()}
        seen |= {name: same_rows(frame, "value") for name, frame in theirs.items()}
        assert set(seen.values()) == {(count, seen["file"][1])}, seen
        rivals = {name: lambda frame=frame: drain(frame) for name, frame in frames.items()}
        turns = Turns(rivals, 7 if full else 1)
    turns.rates(report, count)
    turns.ratio(report, "rpc", *theirs)
    turns.ratio(report, "file", *theirs)


def send(frame: DataFrame, address: str, codec: str) -> None:
    """The messages into a Kafka topic that is called like the codec."""
    headers = (
        "transform(map_entries(properties), e -> struct(e.key, cast(e.value as binary) value))"
    )
    rows = frame.selectExpr(
        "cast(keys as binary) key", "body value", "queue_id partition", f"{headers} headers"
    )
    writer = rows.write.format("kafka").option("kafka.bootstrap.servers", address)
    # A topic that comes to be as it is written to confuses an idempotent producer.
    writer = writer.options(**{"kafka.acks": "all", "kafka.enable.idempotence": "false"})
    writer.options(topic=codec, **{"kafka.compression.type": codec}).save()
