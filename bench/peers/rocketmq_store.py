"""RocketMQ's store without a broker: DefaultMessageStore in the worker's own process.

One call a message (`async`), or a batch of RocketMQ's own (`batch`), with the dispatch to the
queues running; a result has `dispatched_after_s`, the time that dispatch went on behind the puts of
each group of bodies. A JVM puts 0.2 M messages in its first second, and is at its best after 2 M:
`warm_up` puts go before each measurement, and the heap has its full size from the beginning.

Under SYNC_FLUSH `async` is `in_flight` threads with one call each. Reading is getMessage in
slices of at most 1,024 messages, whose bodies are copied out and checked. The store has one owner
at a time, so a consumer cannot read beside a producer. The role `recover` opens what is there and
says how long that took.

The store has its own defaults but for the looks at the disk (as the broker, cometmq.bench.peers.
rocketmq), for the larger slices, and for the timer wheel and compaction, which nobody uses here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from cometmq.bench.peers.rocketmq import (
    FLUSHES,
    FULL_DISK,
    JARS,
    OPENED,
    SOURCES,
    STORE_SETTINGS,
    VERSION,
    missing_jars,
)
from cometmq.bench.systems import Durability, System

SETTINGS: Final = {
    **STORE_SETTINGS,
    "maxTransferCountOnMessageInMemory": "1024",
    "maxTransferBytesOnMessageInMemory": str(4 << 20),
    "timerWheelEnable": "false",
    "enableCompaction": "false",
}


FLAGS: Final = ["-Xms2g", "-Xmx2g", "-XX:+UseG1GC", *OPENED, *FULL_DISK]
WARM_UP: Final = 3_000_000


class RocketMQStore:
    """
    Args:
        settings: of the store, by MessageStoreConfig's own names, beside ours.
    """

    name = "rocketmq_store"
    clients: tuple[str, ...] = ("java",)
    warm_up = WARM_UP

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.settings = settings or {}
        self._endpoint: dict[str, Any] = {}

    def missing(self) -> str | None:
        return missing_jars()

    def fetch(self) -> None:
        JARS.classes(SOURCES)

    def start(self, folder: Path, durability: Durability) -> None:
        """Only says where, and how it flushes: each worker opens the store and closes it."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**SETTINGS, "flushDiskType": FLUSHES[durability], **self.settings}
        self._endpoint = {"folder": str(folder / "store"), "settings": settings}

    def create(self, topic: str, queues: int) -> None:
        """Nothing to do: a store makes its queues when it writes to them."""

    def command(self, client: str) -> list[str]:
        main = {"java": "StoreWorker"}[client]
        return JARS.java(main, JARS.classes(SOURCES), flags=FLAGS)

    def endpoint(self) -> dict[str, Any]:
        return self._endpoint

    def processes(self) -> list[int]:
        return []

    def version(self) -> str:
        return VERSION

    def stop(self) -> None:
        """There is nothing that runs."""


def system() -> System:
    return RocketMQStore()
