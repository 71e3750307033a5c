"""Threads with transactions, whatever becomes of the broker, and what came of them."""

from __future__ import annotations

import threading
from types import TracebackType

from family import RunningBroker
from patience import patient
from waiting import until

from cometmq.client import PendingTransaction, Producer
from cometmq.protocol.errors import CometError

TOPIC, GROUP = "once", "once"
QUEUES = 2
THREADS = 4
WAIT_S = patient(90)
# A half is never given up: how long a broker is away is not to matter.
SETTINGS = {
    "transactionTimeOut": 100,
    "transactionCheckInterval": 200,
    "transactionCheckMax": 100_000,
}


class Decisions:
    """What a database would have: which transactions are to be seen. It outlives brokers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decided: dict[str, bool] = {}
        self.confirmed: set[str] = set()  # by the broker

    def decide(self, name: str, commits: bool) -> bool:
        """Who comes first decides."""
        with self._lock:
            return self._decided.setdefault(name, commits)

    def check(self, pending: PendingTransaction) -> bool:
        return self.decide(pending.id, False)

    def __len__(self) -> int:
        return len(self._decided)

    @property
    def wanted(self) -> set[str]:
        with self._lock:
            return {name for name, commits in self._decided.items() if commits}


class Transacting:
    """As long as it is there, threads begin and end transactions of one or two messages; some
    ends are lost."""

    def __init__(self, broker: RunningBroker, decisions: Decisions) -> None:
        self._decisions = decisions
        self._over = threading.Event()
        self._producer = Producer(
            broker.ready.name_server, name=GROUP, checker=decisions.check, timeout_s=2
        )
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        while not self._over.is_set():
            number += 1
            try:
                self._one(number)
            except (CometError, KeyError):
                self._over.wait(0.01)

    def _one(self, number: int) -> None:
        if number % 14 == 0:
            return self._lose(number)
        with self._producer.transaction(TOPIC, b"%d" % number) as tx:
            if number % 2:
                tx.send(TOPIC, b"more of %d" % number)
            commits = self._decisions.decide(tx.id, number % 3 > 0)
            if not commits:
                raise KeyError
        self._decisions.confirmed.add(tx.id)
        return None

    def _lose(self, number: int) -> None:
        """A transaction whose end never comes; the checker says what becomes of it."""
        tx = self._producer.transaction(TOPIC, b"%d" % number).__enter__()
        self._decisions.decide(tx.id, number % 3 > 0)
        self._producer._transactions.open.discard(tx.id)  # as if its process had died

    def __enter__(self) -> Transacting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._producer.close()


def delivered(broker: RunningBroker) -> dict[str, list[bytes]]:
    """Transaction -> its messages that can be consumed."""
    found: dict[str, list[bytes]] = {}
    for queue_id in range(QUEUES):
        for message in broker.read_queue(TOPIC, queue_id):
            found.setdefault(message.properties["__transactionId__"], []).append(message.body)
    return found


def assert_agrees(broker: RunningBroker, decisions: Decisions) -> None:
    """All messages of those that were decided so are there, once, and none of any other."""
    with Producer(broker.ready.name_server, name=GROUP, checker=decisions.check):
        until(lambda: decisions.wanted <= delivered(broker).keys(), says="all are delivered")
    found = delivered(broker)
    assert found.keys() == decisions.wanted
    for bodies in found.values():
        first = min(bodies, key=len)
        assert len(bodies) == 1 + int(first) % 2, bodies
        assert len(set(bodies)) == len(bodies), bodies
