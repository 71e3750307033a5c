"""What bench/spark shares: a topic of a known size, and rivals that take turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import Report
from pyspark.sql import DataFrame

from cometmq import Broker
from cometmq.client import Admin

TOPIC = "bench"
QUEUES = 16
BATCH = 1000


def fill(broker: Broker, count: int, body_bytes: int = 200) -> None:
    """Half of each body is random; what compresses is not all noise, nor all the same."""
    half = body_bytes // 2
    with Admin(broker.name_server) as admin:
        admin.create_topic(TOPIC, QUEUES)
    with broker.producer() as producer:
        for at in range(0, count, BATCH):
            bodies = [os.urandom(half) + b"x" * (body_bytes - half) for _ in range(BATCH)]
            producer.send_many(
                TOPIC, bodies, tags="paid", keys=f"k{at}", queue_id=at // BATCH % QUEUES
            )


class Turns:
    """Seconds that rivals took. They go round and round, so that a busy minute hits all.

    Args:
        at_most: rounds of those that take long.
    """

    def __init__(
        self,
        rivals: Mapping[str, Callable[[], Any]],
        rounds: int,
        at_most: Mapping[str, int] | None = None,
    ) -> None:
        self._took: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(rounds):
            for name, run in rivals.items():
                if len(self._took[name]) < (at_most or {}).get(name, rounds):
                    began = time.perf_counter()
                    run()
                    self._took[name].append(time.perf_counter() - began)

    def rates(self, report: Report, count: int) -> None:
        """What each does in its median round, and in its best."""
        for name, took in self._took.items():
            report(name, count / statistics.median(took) / 1e6, "M messages/s")
            report(f"{name}, best round", count / min(took) / 1e6, "M messages/s")

    def ratio(self, report: Report, ours: str, *theirs: str) -> None:
        """Our speed by the fastest of theirs: of the median rounds, and of the best ones."""
        for which, text in ((statistics.median, "median"), (min, "best")):
            rival = min(which(self._took[name]) for name in theirs)
            what = f"{ours} : {theirs[0]}, {text} rounds"
            report(what, rival / which(self._took[ours]), "times its speed")


def drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def same_rows(frame: DataFrame, body: str = "body") -> tuple[int, int]:
    """How many rows, and a checksum of all bodies: rivals must have read the same."""
    row = frame.selectExpr("count(*)", f"sum(crc32({body}))").first()
    assert row is not None
    return row[0], row[1]
