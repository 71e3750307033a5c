"""Groups of all kinds while brokers and members are broken: handlers, order, pops, broadcasting.

    with ConsumingRig(folder, seed=7) as rig:
        rig.kill("coordinator")
        rig.stop_members(5)         # past their session, and on again
        rig.storm()                 # 20 members, of which some leave and some are killed
        rig.restart()
        outcome = rig.finish()

The rules are those of consuming_checker.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

import msgspec
import reference
from family import CHILDREN
from fault.availability import Availability
from fault.campaigns import Options, Tally, campaign
from fault.checker import Rules, Verdict, add_store_findings, check, stored_in
from fault.consuming_checker import Finished, Group, check_consuming, copies_in
from fault.consuming_clients import (
    HANDLERS,
    JOBS,
    MODULE,
    NEWS,
    POPPERS,
    SCREENS,
    STEPPERS,
    STEPS,
    TASKS,
)
from fault.history import read_histories
from fault.kills import rounds
from fault.reading import Values
from fault.rig import SETTINGS, WHOLE, Rig
from fault.workload import Child, Spec, Workload, committed

from cometmq.client import Admin
from cometmq.protocol.commands import GetQueueRange, QueueRange
from cometmq.protocol.errors import TopicNotExist
from cometmq.protocol.names import DLQ_PREFIX, RETRY_PREFIX
from cometmq.shm.tools.verify import verify_store

SESSION_S: Final = 3.0
MEMBERS: Final[Mapping[str, tuple[str, str, int]]] = {  # group -> kind, topic, how many
    HANDLERS: ("handler", JOBS, 3),
    STEPPERS: ("stepper", STEPS, 3),
    POPPERS: ("popper", TASKS, 3),
}
SCREEN_NAMES: Final = ("left", "right")
STORM_MEMBERS: Final = 20
STOPPED: Final = 5  # members, at a time
NO_PROGRESS_S: Final = 90.0
ROUND_FAULTS: Final = 100


class ConsumingRig(Rig):
    """See the module."""

    topics: ClassVar[Mapping[str, int]] = {JOBS: 4, STEPS: 4, TASKS: 3, NEWS: 2}
    settings: ClassVar[Mapping[str, object]] = {
        **SETTINGS,
        "consumerSessionTimeout": round(SESSION_S * 1000),
    }

    @staticmethod
    def groups() -> list[Group]:
        return [
            Group(group, topic, orderly=group == STEPPERS, pops=group == POPPERS)
            for group, (_, topic, _) in MEMBERS.items()
        ]

    def _new_work(self) -> Workload:
        work = Workload(
            self.name_server, self.histories, seed=self.seed, producers=(), groups=(), watch=False
        )
        sending = msgspec.structs.replace(
            work.spec("by-key"), module=MODULE, topics=tuple(self.topics), queues=2, pace_s=0.02,
            size_max=2_000,
        )  # fmt: skip
        work.first += [sending, msgspec.structs.replace(sending, kind="linger")]
        for group, (_, _, count) in MEMBERS.items():
            work.first += [self._member(work, group)] * count
        for name in SCREEN_NAMES:
            spec = work.spec("screen", screen(name))
            work.first.append(
                msgspec.structs.replace(spec, module=MODULE, name=name, topics=(NEWS,))
            )
        watcher = work.spec("watcher")
        work.first += [
            msgspec.structs.replace(watcher, topics=(topic,), groups=(group,))
            for group, (_, topic, _) in MEMBERS.items()
            if group != POPPERS
        ]
        return work

    def _member(self, work: Workload, group: str) -> Spec:
        kind, topic, _ = MEMBERS[group]
        spec = work.spec(kind, group)
        return msgspec.structs.replace(spec, module=MODULE, topics=(topic,))

    def _begin(self, stack: contextlib.ExitStack) -> None:
        self._storming: list[int] = []  # processes of members that came with a storm
        self._values = Values(lambda: self.broker.reader)
        stack.enter_context(Availability(lambda: self.broker, self.work.history))

    # --- faults ---

    def stop_members(self, count: int) -> None:
        """SIGSTOP for longer than their session, and on. Their queues go to others."""
        chosen = self.chance.sample(self.work.consumers, count)
        for child in chosen:
            self.work.fault("stop", f"members {child.spec.p}")
            os.kill(child.pid, signal.SIGSTOP)
        time.sleep(SESSION_S + self.chance.uniform(0.3, 1.5))  # the fault itself
        for child in chosen:
            self.work.fault("goes on", child.spec.p, f="goes_on")
            os.kill(child.pid, signal.SIGCONT)
        self.wait_resumed("members were stopped")

    def _a_client(self, target: str) -> Child:
        """None of a storm, whose next round has it."""
        those = [each for each in self.work.consumers if each.pid not in self._storming]
        return self.chance.choice(self.work.producers if target == "producer" else those)

    def storm(self) -> None:
        """Of 20 members a third leaves, a third is killed, and as many new ones come."""
        self.work.fault("storm", "members")
        known = [each for each in self.work.children if each.pid in self._storming]
        self.chance.shuffle(known)
        for child in known[: len(known) // 3]:
            self.work.fault("kill", f"consumer {child.spec.p}", f="killed")
            self.work.children.remove(child)
            child.kill()
        leaving = known[len(known) // 3 : 2 * len(known) // 3]
        for child in leaving:
            child.stop()
        groups = list(MEMBERS)
        for _ in range(STORM_MEMBERS - len(known) + 2 * (len(known) // 3)):
            child = self.work.start(self._member(self.work, self.chance.choice(groups)))
            self._storming.append(child.pid)
        self.work.stop(leaving)
        time.sleep(self.chance.random() ** 2 * 0.5)
        self.wait_resumed("a storm")

    # --- the end ---

    def _drain(self) -> list[str]:
        """Each message is done with, or a dead letter; progress says so, also after a restart."""
        self.work.stop_producers()
        self._wait_finished()
        self._wait_committed()
        self.work.stop(self.work.children)
        before = self._committed()
        status = self.broker.close()
        assert not status, f"the broker ended with {status}:\n{self.broker.log[-4000:]}"
        self.broker = self._start()
        after = self._committed()
        return [f"progress was {before}, and is {after} after a restart"] * (before != after)

    def _wait_finished(self) -> None:
        finished = Finished(self.histories)
        left, since = -1, time.monotonic()
        while missing := self._missing(finished):
            count = sum(map(len, missing.values()))
            if count != left:
                left, since = count, time.monotonic()
            self.work.check_alive()
            some = {group: sorted(each)[:5] for group, each in missing.items()}
            assert time.monotonic() - since < NO_PROGRESS_S, f"nothing becomes of {some}"
            time.sleep(0.2)  # files tell nobody that they have grown

    def _missing(self, finished: Finished) -> dict[str, set[str]]:
        """By group, what was stored and is neither done nor a dead letter."""
        finished.look()
        missing = {}
        for group, (_, topic, _) in MEMBERS.items():
            stored = self._values.of(topic, self.topics[topic])
            dead = self._values.of(DLQ_PREFIX + group, 1)
            missing[group] = stored - dead - finished.done[group]
        for group in map(screen, SCREEN_NAMES):
            missing[group] = self._values.of(NEWS, self.topics[NEWS]) - finished.done[group]
        return {group: each for group, each in missing.items() if each}

    def _wait_committed(self) -> None:
        since, before = time.monotonic(), None
        while behind := self._behind():
            if behind != before:
                before, since = behind, time.monotonic()
            assert time.monotonic() - since < NO_PROGRESS_S, f"not committed: {behind}"
            time.sleep(0.05)  # nothing tells of a commit

    def _behind(self) -> list[str]:
        """Where a group has not come to the end, retries included."""
        committed = self._committed()
        behind = []
        for group, topic in self._read_by():
            for queue in range(self.topics.get(topic, 1)):
                try:
                    answer, _ = self.broker.reader.ask(GetQueueRange(topic, queue), timeout_s=30)
                except TopicNotExist:
                    break  # nothing has come again
                assert isinstance(answer, QueueRange)
                at, end = committed.get((group, topic, queue), -1), answer.max_queue_offset
                if end and at != end:
                    behind.append(f"{group} {topic}/{queue}: {at} of {end}")
        return behind

    def _committed(self) -> dict[tuple[str, str, int], int]:
        with Admin(self.name_server) as admin:
            return {
                (group, topic, queue): at
                for group, topic in self._read_by()
                for queue, at in committed(admin, group, topic).items()
            }

    def _read_by(self) -> list[tuple[str, str]]:
        pairs = [(group, topic) for group, (_, topic, _) in MEMBERS.items()]
        return pairs + [(group, RETRY_PREFIX + group) for group in MEMBERS]

    def _judge(self) -> Verdict:
        ops = read_histories(self.histories)
        stored = [one for one in stored_in(self.store) if one.topic in self.topics]
        screens = [screen(name) for name in SCREEN_NAMES]
        verdict = check(ops, stored, Rules(groups=screens, seen=(NEWS,)))
        check_consuming(verdict, ops, copies_in(self.store), self.groups())
        add_store_findings(verdict, reference.check_store(self.store))
        add_store_findings(verdict, map(str, verify_store(self.store).findings))
        return verdict


def screen(name: str) -> str:
    """The group of one member that broadcasting gives everything, as the history has it."""
    return f"{SCREENS}.{name}"


# --- the campaign ---------------------------------------------------------------------------------

BROKER: Final = (*CHILDREN, *WHOLE)


def kill(rig: ConsumingRig, number: int) -> None:
    """A process of the broker, each in turn, or a member, at a random moment."""
    targets = (*BROKER, "consumer")
    target = targets[number % len(targets)]
    if not rig.may_kill(target):
        target = rig.chance.choice([each for each in targets if rig.may_kill(each)])
    time.sleep(rig.chance.random() ** 3 * 0.5)
    rig.kill(target)


def restart(rig: ConsumingRig, number: int) -> None:
    """The whole broker, in order or not."""
    time.sleep(rig.chance.random() ** 3 * 0.5)
    if number % 2:
        rig.restart()
    else:
        rig.kill("all")


KINDS: Final[Mapping[str, Callable[[ConsumingRig, int], None]]] = {
    "kill": kill,
    "restart": restart,
    "storm": lambda rig, _: rig.storm(),
    "stop": lambda rig, _: rig.stop_members(STOPPED),
}


def fault(kinds: Sequence[str], rig: Rig, number: int) -> None:
    """Each kind in turn."""
    assert isinstance(rig, ConsumingRig)
    KINDS[kinds[number % len(kinds)]](rig, number // len(kinds))


@campaign("consuming", "groups of all kinds; --only kill, restart, storm, stop (of members)")
def consuming(options: Options) -> Iterator[Tally]:
    kinds = [kind for kind in KINDS if options.wants(kind)]
    yield from rounds(
        options, "consuming", partial(fault, kinds), make=ConsumingRig, round_faults=ROUND_FAULTS
    )
