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

import reference
from family import CHILDREN
from fault.availability import Availability, roles_of
from fault.campaigns import Options, Tally, campaign
from fault.checker import Verdict, add_store_findings
from fault.consuming_work import MEMBERS, SESSION_S, ConsumingWork
from fault.history import read_histories
from fault.kills import rounds
from fault.reading import Values
from fault.rig import WHOLE, Rig
from fault.workload import Child, Workload

from cometmq.shm.tools.verify import verify_store

STORM_MEMBERS: Final = 20
STOPPED: Final = 5  # members, at a time
ROUND_FAULTS: Final = 100


class ConsumingRig(Rig):
    """See the module."""

    kind: ClassVar[ConsumingWork] = ConsumingWork()
    topics: ClassVar[Mapping[str, int]] = kind.topics
    settings: ClassVar[Mapping[str, object]] = kind.settings

    def _new_work(self) -> Workload:
        return self.kind.clients(self.name_server, self.histories, seed=self.seed)

    def _begin(self, stack: contextlib.ExitStack) -> None:
        self._storming: list[int] = []  # processes of members that came with a storm
        stack.enter_context(Availability(lambda: roles_of(self.broker), self.work.history))

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
            child = self.work.start(self.kind.member(self.work, self.chance.choice(groups)))
            self._storming.append(child.pid)
        self.work.stop(leaving)
        time.sleep(self.chance.random() ** 2 * 0.5)
        self.wait_resumed("a storm")

    # --- the end ---

    def _drain(self) -> list[str]:
        """Each message is done with, or a dead letter; progress says so, also after a restart."""
        self.work.stop_producers()
        self.kind.drain(self.work, Values(self._pull))
        self.work.stop(self.work.children)
        before = self.kind.committed(self.name_server)
        status = self.broker.close()
        assert not status, f"the broker ended with {status}:\n{self.broker.log[-4000:]}"
        self.broker = self._start()
        after = self.kind.committed(self.name_server)
        return [f"progress was {before}, and is {after} after a restart"] * (before != after)

    def _judge(self) -> Verdict:
        verdict = self.kind.judge(read_histories(self.histories), self.store)
        add_store_findings(verdict, reference.check_store(self.store))
        add_store_findings(verdict, map(str, verify_store(self.store).findings))
        return verdict


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
