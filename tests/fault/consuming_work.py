"""Groups of all kinds as the work of a rig's clients: handlers, order, pops, broadcasting.

The rules are those of consuming_checker.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec
from fault.checker import Rules, Verdict, check, stored_in
from fault.consuming_checker import Finished, Group, check_consuming, copies_in
from fault.consuming_clients import (
    HANDLERS,
    JOBS,
    MODULE,
    NEWS,
    PICKERS,
    PICKS,
    POPPERS,
    SCREENS,
    STEPPERS,
    STEPS,
    TASKS,
)
from fault.history import Op
from fault.reading import Values
from fault.rig import SETTINGS
from fault.work import ASK_S, Work
from fault.workload import Spec, Workload, committed
from patience import patient

from cometmq.client import Admin
from cometmq.protocol.errors import TopicNotExist
from cometmq.protocol.names import DLQ_PREFIX, RETRY_PREFIX

SESSION_S: Final = 3.0
MEMBERS: Final[Mapping[str, tuple[str, str, int]]] = {  # group -> kind, topic, how many
    HANDLERS: ("handler", JOBS, 3),
    STEPPERS: ("stepper", STEPS, 3),
    POPPERS: ("popper", TASKS, 3),
    PICKERS: ("picker", PICKS, 3),
}
SCREEN_NAMES: Final = ("left", "right")
NO_PROGRESS_S: Final = patient(90.0)


class ConsumingWork(Work):
    """See the module."""

    topics: ClassVar[Mapping[str, int]] = {
        JOBS: 4, STEPS: 4, TASKS: 3, PICKS: 2, NEWS: 2,
    }  # fmt: skip
    settings: ClassVar[Mapping[str, object]] = {
        **SETTINGS,
        "consumerSessionTimeout": round(SESSION_S * 1000),
    }

    @staticmethod
    def groups() -> list[Group]:
        return [
            Group(
                group, topic, orderly=group in (STEPPERS, PICKERS), pops=group in (POPPERS, PICKERS)
            )
            for group, (_, topic, _) in MEMBERS.items()
        ]

    def clients(
        self, name_server: str, folder: Path, *, seed: int, transport: str = "auto"
    ) -> Workload:
        work = Workload(
            name_server, folder, seed=seed, producers=(), groups=(), watch=False,
            transport=transport,
        )  # fmt: skip
        sending = msgspec.structs.replace(
            work.spec("by-key"), module=MODULE, topics=tuple(self.topics), queues=2, pace_s=0.02,
            size_max=2_000,
        )  # fmt: skip
        work.first += [sending, msgspec.structs.replace(sending, kind="linger")]
        for group, (_, _, count) in MEMBERS.items():
            work.first += [self.member(work, group)] * count
        for name in SCREEN_NAMES:
            spec = work.spec("screen", screen(name))
            work.first.append(
                msgspec.structs.replace(spec, module=MODULE, name=name, topics=(NEWS,))
            )
        watcher = work.spec("watcher")
        work.first += [
            msgspec.structs.replace(watcher, topics=(topic,), groups=(group,))
            for group, (_, topic, _) in MEMBERS.items()
            if group not in (POPPERS, PICKERS)
        ]
        return work

    @staticmethod
    def member(work: Workload, group: str) -> Spec:
        kind, topic, _ = MEMBERS[group]
        return msgspec.structs.replace(work.spec(kind, group), module=MODULE, topics=(topic,))

    # --- the end ---

    def drain(self, clients: Workload, values: Values) -> None:
        """Until each message is done with, or a dead letter, and progress says so."""
        self._wait_finished(clients, values)
        self._wait_committed(clients)

    def _wait_finished(self, clients: Workload, values: Values) -> None:
        finished = Finished(clients.folder)
        left, since = -1, time.monotonic()
        while missing := self._missing(finished, values):
            count = sum(map(len, missing.values()))
            if count != left:
                left, since = count, time.monotonic()
            clients.check_alive()
            some = {group: sorted(each)[:5] for group, each in missing.items()}
            assert time.monotonic() - since < NO_PROGRESS_S, f"nothing becomes of {some}"
            time.sleep(0.2)  # files tell nobody that they have grown

    def _missing(self, finished: Finished, values: Values) -> dict[str, set[str]]:
        """By group, what was stored and is neither done nor a dead letter."""
        finished.look()
        missing = {}
        for group, (_, topic, _) in MEMBERS.items():
            stored = values.of(topic, self.topics[topic])
            dead = values.of(DLQ_PREFIX + group, 1)
            missing[group] = stored - dead - finished.done[group]
        for group in map(screen, SCREEN_NAMES):
            missing[group] = values.of(NEWS, self.topics[NEWS]) - finished.done[group]
        return {group: each for group, each in missing.items() if each}

    def _wait_committed(self, clients: Workload) -> None:
        since, before = time.monotonic(), None
        with Admin(clients.name_server, timeout_s=ASK_S) as admin:
            while behind := self._behind(admin):
                if behind != before:
                    before, since = behind, time.monotonic()
                assert time.monotonic() - since < NO_PROGRESS_S, f"not committed: {behind}"
                time.sleep(0.05)  # nothing tells of a commit

    def _behind(self, admin: Admin) -> list[str]:
        """Where a group has not come to the end, retries included."""
        found = self._committed(admin)
        behind = []
        for group, topic in self._read_by():
            for queue in range(self.topics.get(topic, 1)):
                try:
                    end = admin.queue_range(topic, queue).stop
                except TopicNotExist:
                    break  # nothing has come again
                at = found.get((group, topic, queue), -1)
                if end and at != end:
                    behind.append(f"{group} {topic}/{queue}: {at} of {end}")
        return behind

    def committed(self, name_server: str) -> dict[tuple[str, str, int], int]:
        """The progress of all groups, by topic and queue."""
        with Admin(name_server, timeout_s=ASK_S) as admin:
            return self._committed(admin)

    def _committed(self, admin: Admin) -> dict[tuple[str, str, int], int]:
        return {
            (group, topic, queue): at
            for group, topic in self._read_by()
            for queue, at in committed(admin, group, topic).items()
        }

    @staticmethod
    def _read_by() -> list[tuple[str, str]]:
        pairs = [(group, topic) for group, (_, topic, _) in MEMBERS.items()]
        return pairs + [(group, RETRY_PREFIX + group) for group in MEMBERS]

    def judge(self, ops: Sequence[Op], store: Path) -> Verdict:
        stored = [one for one in stored_in(store) if one.topic in self.topics]
        screens = [screen(name) for name in SCREEN_NAMES]
        verdict = check(ops, stored, Rules(groups=screens, seen=(NEWS,)))
        check_consuming(verdict, ops, copies_in(store), self.groups())
        return verdict


def screen(name: str) -> str:
    """The group of one member that broadcasting gives everything, as the history has it."""
    return f"{SCREENS}.{name}"
