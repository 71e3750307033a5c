"""Every row of the stores that a real RocketMQ wrote, as Spark reads it."""

from __future__ import annotations

import base64
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import golden
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from cometmq.spark.schema import full_schema

pytestmark = pytest.mark.slow


def as_listed(row: Any) -> dict[str, Any]:
    return {
        "topic": row.topic,
        "queueId": row.queue_id,
        "queueOffset": row.queue_offset,
        "physicalOffset": row.physical_offset,
        "storeSize": row.store_size,
        "sysFlag": row.sys_flag,
        "flag": row.flag,
        "bornTimestamp": ms(row.born_ts),
        "bornHost": golden.host(row.born_host),
        "storeTimestamp": ms(row.store_ts),
        "storeHost": golden.host(row.store_host),
        "reconsumeTimes": row.reconsume_times,
        "preparedTransactionOffset": row.prepared_txn_offset,
        "bodyCRC": row.body_crc,
        "body": base64.b64encode(row.body_raw).decode(),
        "properties": row.properties,
        "msgId": row.msg_id,
    }


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def listed(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in (
        "topic", "queueId", "queueOffset", "physicalOffset", "storeSize", "sysFlag", "flag",
        "bornTimestamp", "storeTimestamp", "reconsumeTimes", "preparedTransactionOffset",
        "bodyCRC", "body", "properties", "msgId",
    )}  # fmt: skip
    return kept | {
        "bornHost": golden.host(row["bornHost"]),
        "storeHost": golden.host(row["storeHost"]),
    }


def read(spark: SparkSession, store: Path, **options: str) -> dict[int, dict[str, Any]]:
    """Every message of every topic, by its physical offset; none twice."""
    reader = spark.read.format("cometmq").schema(full_schema())
    given = {"subscribePattern": ".*", "includeInternal": "true", "decompress": "false", **options}
    rows = reader.options(store=str(store), **given).load().collect()
    found = {row.physical_offset: as_listed(row) for row in rows}
    assert len(found) == len(rows)
    return found


def queued(name: str) -> dict[int, dict[str, Any]]:
    """What RocketMQ lists and has in a queue, or would have if it had rebuilt its queues."""
    prepared, rolled_back = 0x4, 0xC
    return {
        row["physicalOffset"]: listed(row)
        for row in golden.listing(name)
        if row["sysFlag"] & 0xC not in (prepared, rolled_back) and "foundAt" not in row
    }


@pytest.mark.parametrize("name", [*golden.CLEAN, *golden.ABORT, *golden.BATCH_QUEUES])
def test_every_row(spark: SparkSession, name: str, tmp_path: Path) -> None:
    """As they are; those that were not closed, or have another kind of queue, by their log."""
    assert read(spark, golden.unpack(name, tmp_path)) == queued(name)


@pytest.mark.parametrize("name", golden.CLEAN)
def test_every_row_of_a_log(spark: SparkSession, name: str, tmp_path: Path) -> None:
    assert read(spark, golden.unpack(name, tmp_path), layout="log") == queued(name)


@pytest.mark.parametrize("name", [name for name in golden.DAMAGED if "bitflip" not in name])
def test_every_row_of_a_damaged_store(spark: SparkSession, name: str, tmp_path: Path) -> None:
    """A torn tail is not read, what lost its queue is; see docs/recovery.md."""
    assert read(spark, golden.unpack(name, tmp_path)) == queued(name)


@pytest.mark.parametrize("name", ["damaged-bitflip", "damaged-bitflip-early"])
def test_a_flipped_bit(spark: SparkSession, name: str, tmp_path: Path) -> None:
    """All but that message; RocketMQ loses those behind it, or delivers it as it is."""
    store = golden.unpack(name, tmp_path)
    with pytest.raises(PythonException) as raised:
        read(spark, store)
    found = re.search(
        r"commitlog/(\d{20}), physical offset (\d+): wrong body CRC: "
        r"expected (0x[0-9a-f]{8}), it has (0x[0-9a-f]{8})", str(raised.value)
    )  # fmt: skip
    assert found, raised.value
    whole = queued("damaged-base")
    broken = int(found[2])
    assert int(found[3], 16) == whole[broken]["bodyCRC"] != int(found[4], 16)
    rest = {at: row for at, row in whole.items() if at != broken}
    assert read(spark, store, onCorrupt="skip") == rest
    nulled = spark.read.format("cometmq").schema("physical_offset bigint, body binary, tags string")
    nulled = nulled.options(store=str(store), subscribePattern=".*", onCorrupt="null-body").load()
    rows = {row.physical_offset: row for row in nulled.collect()}
    assert rows.keys() == whole.keys()
    assert [at for at, row in rows.items() if row.body is None] == [broken]
    assert rows[broken].tags == whole[broken]["properties"].get("TAGS")
    as_stored = read(spark, store, verifyCrc="false")
    assert as_stored.keys() == whole.keys()
    assert {at: row for at, row in as_stored.items() if at != broken} == rest


def test_compressed_bodies(spark: SparkSession, tmp_path: Path) -> None:
    """Unfolded as RocketMQ does; one that is only said to be compressed is damage."""
    store = golden.unpack("special", tmp_path)
    rows = {row["physicalOffset"]: row for row in golden.listing("special") if row["cq"]}
    liar = next(at for at, row in rows.items() if row.get("bodyDecompressed", 0) is None)
    reader = spark.read.format("cometmq").schema("physical_offset bigint, body binary")
    reader = reader.options(store=str(store), subscribePattern=".*", includeInternal="true")
    with pytest.raises(PythonException, match=f"physical offset {liar}: .*ZLIB"):
        reader.load().collect()
    found = {row[0]: bytes(row[1]) for row in reader.option("onCorrupt", "skip").load().collect()}
    assert found == {
        at: base64.b64decode(row.get("bodyDecompressed") or row["body"])
        for at, row in rows.items()
        if at != liar
    }
