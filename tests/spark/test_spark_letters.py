"""Dead letters that a real RocketMQ broker left, counted by Spark and by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import golden
import pytest
from click.testing import CliRunner
from log_scan import scan_log
from patience import patient
from pyspark.sql import SparkSession

from cometmq import Broker
from cometmq.cli.spark.letters import dlq
from cometmq.protocol.errors import StoreError
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.spark.jobs.dead_letters import Failures, dead_letters, letters

pytestmark = pytest.mark.slow

Key = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.unpack("retry-dlq", tmp_path_factory.mktemp("letters"), golden.BROKERS)


def by_hand(store: Path) -> dict[Key, list[tuple[str, int]]]:
    """group, kind, origin topic and tags -> keys and attempts, from the records."""
    found: dict[Key, list[tuple[str, int]]] = defaultdict(list)
    reader = StoreReader.open_closed(store)
    for message in scan_log(reader):
        for prefix, kind in (("%DLQ%", "dead"), ("%RETRY%", "retry")):
            if message.topic.startswith(prefix):
                group = message.topic.removeprefix(prefix)
                key = group, kind, message.properties["RETRY_TOPIC"], message.tags or ""
                found[key].append((message.keys or "", message.reconsume_times))
    reader.close()
    return found


def key_of(row: Failures) -> Key:
    return row.group, row.kind, row.origin_topic, row.tags


@pytest.mark.parametrize("retries", [False, True])
def test_counts(spark: SparkSession, store: Path, retries: bool) -> None:
    wanted = {key: each for key, each in by_hand(store).items() if retries or key[1] == "dead"}
    found = dead_letters(spark, retries=retries, poison=2, store=str(store))
    assert found.messages == sum(map(len, wanted.values())) > 0
    assert {key_of(row) for row in found.rows} == set(wanted)
    for row in found.rows:
        times = Counter(keys for keys, _ in wanted[key_of(row)])
        assert row.messages == times.total()
        assert row.keys == len(times)
        assert row.poison_keys == sum(count >= 2 for count in times.values())
        assert row.attempts_max == max(attempts for _, attempts in wanted[key_of(row)])
        assert row.first <= row.last
    assert any(row.poison_keys for row in found.rows) is retries


def test_one_group_exported(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    found = dead_letters(spark, ["RetryGroup"], export=folder, store=str(store))
    rows = spark.read.parquet(str(folder)).collect()
    assert len(rows) == found.messages == 27
    assert {row.group for row in rows} == {"RetryGroup"}
    assert all(row.origin_msg_id and row.body and row.properties["fate"] for row in rows)
    with pytest.raises(StoreError, match="is not empty: name a new directory"):
        dead_letters(spark, export=folder, store=str(store))
    assert letters(spark, ["Retry"], store=str(store)).count() == 0  # a name is a whole one


def test_retries_of_what_was_popped(spark: SparkSession, tmp_path: Path) -> None:
    with Broker(tmp_path / "store", profile="test") as broker, broker.producer() as producer:
        producer.send("invoices", b"1")
        with broker.pop_consumer("billing", "invoices") as consumer:
            (message,) = consumer.poll(timeout_s=patient(60))
            consumer.nack(message, after=0)
            consumer.ack(*consumer.poll(timeout_s=patient(60)))
    for groups in (["billing"], []):
        rows = letters(spark, groups, retries=True, store=str(tmp_path / "store")).collect()
        assert [row[:3] for row in rows] == [("billing", "retry", "invoices")]
    assert letters(spark, ["bill"], retries=True, store=str(tmp_path / "store")).count() == 0


def test_the_plan_needs_no_java() -> None:
    done = CliRunner().invoke(dlq, ["--store", "./s", "-g", "a", "--dry-run", "-o", "json"])
    assert (done.exit_code, '"groups"' in done.output) == (0, True), done.output
    assert CliRunner().invoke(dlq, ["--dry-run"]).exit_code == 2
