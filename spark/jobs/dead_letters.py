"""Dead letters of consumer groups (and their retries): what failed, where, and the same keys."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cometmq.client import Admin
from cometmq.protocol.errors import StoreError
from cometmq.protocol.names import DLQ_PREFIX, POP_RETRY_SIGNS, RETRY_PREFIX
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import SubscriptionGroupTable
from cometmq.spark.jobs.running import Progress, Watch
from cometmq.spark.sessions import messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = (
    "topic", "broker", "queue_id", "queue_offset", "store_ts", "born_ts", "keys", "tags",
    "unique_key", "body", "properties", "reconsume_times",
)  # fmt: skip
POISON: Final = 3
POPPED: Final = f"[{re.escape(POP_RETRY_SIGNS)}].*"  # of a retry topic: see pop_retry_topic
OLDER: Final = re.escape(POP_RETRY_SIGNS[1]) + ".*$"


class Failures(msgspec.Struct, frozen=True):
    """Messages of one topic that one group has failed of, with the same tags."""

    group: str
    kind: str  # "dead" or "retry"
    origin_topic: str
    tags: str
    messages: int
    keys: int  # distinct ones
    poison_keys: int  # of those, how many have failed `poison` times or more
    attempts_max: int
    first: str  # ISO 8601, UTC: when the first of them was given up, or back
    last: str


class DeadLetters(msgspec.Struct, frozen=True):
    rows: list[Failures]
    messages: int
    exported: str  # the directory, or ""
    seconds: float


def dead_letters(
    spark: SparkSession,
    groups: Sequence[str] = (),
    *,
    retries: bool = False,
    poison: int = POISON,
    export: Path | None = None,
    progress: Progress | None = None,
    **options: str,
) -> DeadLetters:
    """Count what groups have given up, and write it down before it expires.

    What was sent again or purged counts as long as it lies in the topic.

    Args:
        groups: else all.
        retries: also what was delivered again, however that ended.
        poison: a key is poison that has failed so often.
        export: a new directory for all of it, as Parquet: columns of `letters`.
        progress: told of Spark's tasks, stage by stage.
        options: the source's, without topics, such as store="./store".

    Raises StoreError where the directory is not empty.
    """
    from pyspark.sql import functions as f

    began = time.monotonic()
    if export is not None and export.exists() and any(export.iterdir()):
        raise StoreError(f"{export} is not empty: name a new directory")
    found = letters(spark, groups, retries=retries, **options)
    with Watch(spark, progress):
        if export is not None:
            found.write.mode("overwrite").parquet(str(export))
            found = spark.read.parquet(str(export))
        by = ["group", "kind", "origin_topic", "tags"]
        by_key = found.groupBy(*by, "keys").agg(
            f.count("*").alias("messages"),
            f.max("reconsume_times").alias("attempts_max"),
            f.min("store_ts").alias("first"),
            f.max("store_ts").alias("last"),
        )
        has_key = f.col("keys").isNotNull()
        rows = (
            by_key.groupBy(*by)
            .agg(
                f.sum("messages").alias("messages"),
                f.count("keys").alias("keys"),
                f.count_if(has_key & (f.col("messages") >= poison)).alias("poison_keys"),
                f.max("attempts_max").alias("attempts_max"),
                f.unix_micros(f.min("first")).alias("first"),
                f.unix_micros(f.max("last")).alias("last"),
            )
            .sort(*by)
            .collect()
        )
    made = [
        Failures(
            **row.asDict()
            | {"tags": row.tags or "", "first": _iso(row.first), "last": _iso(row.last)}
        )
        for row in rows
    ]
    total = sum(row.messages for row in made)
    return DeadLetters(made, total, str(export or ""), time.monotonic() - began)


def letters(
    spark: SparkSession, groups: Sequence[str] = (), *, retries: bool = False, **options: str
) -> DataFrame:
    """Dead letters as rows: `group`, `kind`, `origin_topic`, `origin_msg_id`, then the message."""
    from pyspark.sql import functions as f

    prefixes = (DLQ_PREFIX, RETRY_PREFIX) if retries else (DLQ_PREFIX,)
    names = "|".join(map(re.escape, groups)) or ".*"
    pattern = f"({'|'.join(map(re.escape, prefixes))})({names})({POPPED})?"
    known = _groups(options) if retries else set()
    frame = messages(
        spark,
        columns=COLUMNS,
        subscribePattern=pattern,
        includeInternal="true",
        **options,
    )
    is_dead = f.col("topic").startswith(DLQ_PREFIX)
    prefix = f.when(is_dead, len(DLQ_PREFIX)).otherwise(len(RETRY_PREFIX))
    name = f.substr("topic", prefix + 1)
    # Of popped messages, behind the group: a sign and the topic that they were sent to.
    behind = f.concat(f.lit(POP_RETRY_SIGNS[0]), f.col("properties")["RETRY_TOPIC"])
    by_default = f.endswith(name, f.coalesce(behind, f.lit(POP_RETRY_SIGNS[0])))
    own = is_dead | name.isin(sorted(known))
    group = (
        f.when(own, name)
        .when(name.contains(POP_RETRY_SIGNS[1]), f.regexp_replace(name, OLDER, ""))
        .when(by_default, f.substr(name, f.lit(1), f.length(name) - f.length(behind)))
        .otherwise(name)
    )
    if groups:
        frame = frame.where(group.isin([*groups]))
    return frame.select(
        group.alias("group"),
        f.when(is_dead, "dead").otherwise("retry").alias("kind"),
        f.coalesce(f.col("properties")["RETRY_TOPIC"], f.col("topic")).alias("origin_topic"),
        f.col("properties")["ORIGIN_MESSAGE_ID"].alias("origin_msg_id"),
        *(name for name in COLUMNS if name != "topic"),
    )


def _groups(options: Mapping[str, str]) -> set[str]:
    """Return the known groups: a group's own retry topic may look like that of a popping group."""
    if "store" not in options:
        with Admin(options["namesrv"]) as admin:
            return {each.group for each in admin.groups()}
    path = Path(options["store"]) / "config" / "subscriptionGroup.json"
    table = ConfigFile(path, SubscriptionGroupTable).load()
    return set() if table is None else {*table.subscription_group_table}


def _iso(micros: int) -> str:
    return datetime.fromtimestamp(micros // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
