"""RocketMQ's store classes in the worker's own process: DefaultMessageStore, without a broker.

There is no server, so producers and consumers of one run take turns: a worker opens the store in the
System's folder and closes it at its end. One call a message (`async`), or a batch of RocketMQ's own
(`batch`), with the dispatch to the queues running; a result has `dispatch_lag_s`, the time that the
dispatch went on behind the last put. Under SYNC_FLUSH `async` is `in_flight` threads with one call
each. Reading is getMessage in slices of at most 1,024 messages, whose bodies are copied out and
checked. The role `recover` opens what is there and says how long that took.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cometmq.bench.peers.rocketmq import (
    FLUSHES,
    JARS,
    SETTINGS,
    SOURCES,
    STORE_SETTINGS,
    VERSION,
    WORKER_FLAGS,
)
from cometmq.bench.systems import Durability, System

READING = {
    "maxTransferCountOnMessageInMemory": "1024",
    "maxTransferBytesOnMessageInMemory": str(4 << 20),
}


class RocketMQStore:
    """
    Args:
        settings: of the store, by MessageStoreConfig's own names, beside ours.
    """

    name = "rocketmq_store"
    clients = ("java",)

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.settings = settings or {}
        self._endpoint: dict[str, Any] = {}

    def missing(self) -> str | None:
        return JARS.missing and f"{JARS.missing} (cometmq bench fetch)"

    def fetch(self) -> None:
        JARS.classes(SOURCES)

    def start(self, folder: Path, durability: Durability) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        store = {
            **STORE_SETTINGS,
            **READING,
            "timerWheelEnable": "false",
            "enableCompaction": "false",
            "flushDiskType": FLUSHES[durability],
            **self.settings,
        }
        self._endpoint = {"folder": str(folder / "store"), "store": store, "settings": SETTINGS}
        self._home = f"-Duser.home={folder}"

    def create(self, topic: str, queues: int) -> None:
        """Nothing to do: a store makes its queues when it writes to them."""

    def command(self, client: str) -> list[str]:
        assert client in self.clients, client
        flags = [*WORKER_FLAGS, self._home]
        return JARS.java("StoreWorker", JARS.classes(SOURCES), flags=flags)

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
