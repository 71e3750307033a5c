"""What clients do, and what has to have come of it: for rigs of one broker and of a group.

work = TimedWork()                          # timed_work.py; ConsumingWork in consuming_work.py
with work.clients(name_server, folder, seed=7) as clients:
    ...faults...
    clients.stop_producers()
    work.drain(clients, values)
    clients.stop(clients.children)
verdict = work.judge(read_histories(folder), store)     # of the stopped store
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol

from fault.checker import Rules, Verdict, check, stored_in
from fault.history import Op
from fault.reading import Values
from fault.rig import PACE_S, SETTINGS
from fault.workload import QUEUES, TOPICS, Workload
from patience import patient

from cometmq.client import Admin

GROUPS: Final = ("billing",)
PRODUCERS: Final = ("single", "impatient", "linger", "batch")
ASK_S: Final = patient(30.0)


class Work(Protocol):
    """
    topics: -> queues; others may come by what the clients do.
    settings: of the brokers.
    """

    topics: ClassVar[Mapping[str, int]]
    settings: ClassVar[Mapping[str, object]]

    def clients(
        self, name_server: str, folder: Path, *, seed: int, transport: str = "auto"
    ) -> Workload:
        """Not started yet."""

    def drain(self, clients: Workload, values: Values) -> None:
        """Until all has come that has to; producers have ended, everything is healed."""

    def judge(self, ops: Sequence[Op], store: Path) -> Verdict:
        """What the clients saw, by what the stopped store has."""


@dataclass(frozen=True)
class PlainWork(Work):
    """Producers that send each in its way, and a group that reads everything.

    Args:
        pace_s: of each client.
    """

    topics: ClassVar[Mapping[str, int]] = dict.fromkeys(TOPICS, QUEUES)
    settings: ClassVar[Mapping[str, object]] = SETTINGS

    producers: Sequence[str] = PRODUCERS
    pace_s: float = max(0.02, 2 * PACE_S)

    def clients(
        self, name_server: str, folder: Path, *, seed: int, transport: str = "auto"
    ) -> Workload:
        return Workload(
            name_server, folder, seed=seed, producers=self.producers, groups=GROUPS,
            pace_s=self.pace_s, transport=transport,
        )  # fmt: skip

    def drain(self, clients: Workload, values: Values) -> None:
        with Admin(clients.name_server, timeout_s=ASK_S) as admin:
            ends = {
                (topic, queue): admin.queue_range(topic, queue).stop
                for topic, queues in self.topics.items()
                for queue in range(queues)
            }
        clients.drain(ends)

    def judge(self, ops: Sequence[Op], store: Path) -> Verdict:
        return check(ops, stored_in(store), Rules(groups=GROUPS))
