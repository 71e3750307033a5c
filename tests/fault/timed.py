"""Messages for later, transactions, names and keys while brokers and producers are broken.

    with TimedRig(folder, seed=7, sync=True) as rig:
        rig.kill("scheduler")
        rig.kill_at(POINTS["timers.write.after"])
        rig.supersede()             # another process takes a producer's name
        outcome = rig.finish()

With a `disk` its power can be cut, `rig.cut()`. The rules are those of timed_checker.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import psutil
import reference
from family import CHILDREN
from fault.availability import Availability, roles_of
from fault.campaigns import Options, Tally, campaign, new_tally
from fault.checker import Verdict, add_store_findings
from fault.disk import FILE_SYSTEMS, Disk
from fault.disk_campaigns import usable
from fault.history import read_histories
from fault.kills import BROKE_OFF, rounds, settle
from fault.points import POINTS, Point
from fault.reading import Values
from fault.rig import RESUME_S, WHOLE, Outcome, Rig
from fault.timed_work import TimedWork, supersede
from fault.work import Work
from fault.workload import Child, Workload

from cometmq.protocol.errors import CometError
from cometmq.shm.tools.verify import verify_store

SOON_S: Final = 3.0
LEADS_MAX: Final = 3
ROUND_FAULTS: Final = 60
CUTS_OF_A_DISK: Final = 25
LOAD_S: Final = 1.0
MOMENTS: Final = {"load": 5, "kill": 2, "end": 2, "start": 2}  # of a cut; how often each, by weight


class TimedRig(Rig):
    """See the module."""

    kind: ClassVar[Work] = TimedWork()
    topics: ClassVar[Mapping[str, int]] = kind.topics
    settings: ClassVar[Mapping[str, object]] = kind.settings

    def _new_work(self) -> Workload:
        return self.kind.clients(self.name_server, self.histories, seed=self.seed)

    def _begin(self, stack: contextlib.ExitStack) -> None:
        self.turns: Counter[str] = Counter()  # by kind of fault, how many there were
        stack.enter_context(Availability(lambda: roles_of(self.broker), self.work.history))

    # --- faults ---

    def _lead_to(self, point: Point, pid: int) -> None:
        """Some are passed only when a process begins, of the broker or with a name."""
        super()._lead_to(point, pid)
        for _ in range(LEADS_MAX if point.when in HERE else 0):
            if self.points.is_hit(SOON_S):
                return
            if point.when == "named":
                self.work.replace(*self.work.of_kind("named"))
            else:
                while not self.may_kill(point.role):
                    time.sleep(0.2)  # the point is armed: not now another start of the broker
                self._spare(point.role)
                with contextlib.suppress(psutil.NoSuchProcess, CometError):
                    self.broker.end(self.broker.pids()[point.role])

    def cut(self) -> None:
        """Under load; just behind a kill; in an orderly end; or twice, the second time while the
        broker starts."""
        moment = self.chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "kill":
            os.kill(self.broker.pids()[self.chance.choice(CHILDREN)], signal.SIGKILL)
            time.sleep(self.chance.random() ** 2 * 0.3)
        elif moment == "end":
            os.kill(self.broker.pid, signal.SIGTERM)
            time.sleep(self.chance.uniform(0.0, 0.12))
        self._cut(moment)
        if moment == "start":
            self.broker = self._start(wait=False)
            time.sleep(self.chance.uniform(0.0, 0.7))
            self._cut(moment)
        self.broker = self._start()
        self.wait_resumed("a power cut")

    def supersede(self) -> None:
        """Another process takes the name of one that goes on for a while."""
        supersede(self.work, self.acks, self.chance, RESUME_S)
        self.wait_resumed("a producer was superseded")

    def _a_client(self, target: str) -> Child:
        those = self.work.producers if target == "producer" else self.work.consumers
        return self.chance.choice(those)

    # --- the end ---

    def _drain(self) -> list[str]:
        """What is scheduled comes, and what is committed."""
        self.work.stop_producers()
        self.kind.drain(self.work, Values(self._pull))
        self.work.stop(self.work.children)
        return []

    def _judge(self) -> Verdict:
        verdict = self.kind.judge(read_histories(self.histories), self.store)
        add_store_findings(verdict, reference.check_store(self.store))
        add_store_findings(verdict, map(str, verify_store(self.store).findings))
        return verdict


# --- campaigns ------------------------------------------------------------------------------------

BROKER: Final = (*CHILDREN, *WHOLE)
KINDS: Final = ("kill", "point", "kill", "point", "name")
# What leads to these points is at work here all the time.
HERE: Final = ("timers", "transactions", "named", "derived")
THEIRS: Final = tuple(
    point for point in POINTS.values()
    if point.when in HERE or point.name.startswith(("derived.", "producers.", "takeover.zero"))
)  # fmt: skip


def fault(points: Sequence[Point], kinds: Sequence[str], rig: Rig, number: int) -> None:
    """Each kind in turn, and of each kind each target in an order of the rig's own."""
    assert isinstance(rig, TimedRig)
    kind = kinds[number % len(kinds)]
    turn = rig.turns[kind]
    rig.turns[kind] += 1
    if kind == "point":
        order = list(points)
        random.Random(f"{rig.seed} {turn // len(order)}").shuffle(order)
        rig.kill_at(order[turn % len(order)])
    elif kind == "name":
        rig.supersede()
    else:
        kill(rig, turn)


def kill(rig: TimedRig, number: int) -> None:
    """A process of the broker, or a producer, each in turn, at a random moment."""
    targets = (*BROKER, "producer")
    target = targets[number % len(targets)]
    if not rig.may_kill(target):
        target = rig.chance.choice([each for each in targets if rig.may_kill(each)])
    time.sleep(rig.chance.random() ** 3 * 0.5)
    rig.kill(target)


@campaign("timed", "timers, transactions, names and keys; --only kill, point, name, or a point")
def timed(options: Options) -> Iterator[Tally]:
    points = [point for point in THEIRS if options.wants(point.name)] if options.only else []
    kinds = [kind for kind in KINDS if options.wants(kind)]
    if points and "point" not in kinds:
        kinds += ["point"]
    yield from rounds(
        options, "timed", partial(fault, points or THEIRS, kinds), make=TimedRig,
        round_faults=ROUND_FAULTS,
    )  # fmt: skip


@campaign("timed-cuts", "the same while the power is cut, SYNC_FLUSH; --only ext4, xfs")
def timed_cuts(options: Options) -> Iterator[Tally]:
    """--kills are the cuts in all, shared out among file systems."""
    kinds = [kind for kind in FILE_SYSTEMS if options.wants(kind) and usable(options, kind)]
    each = -(-options.faults // max(1, len(kinds)))
    for first in range(0, each, CUTS_OF_A_DISK):
        for kind in kinds:
            if options.over:
                return
            yield from cut_one_disk(options, kind, min(CUTS_OF_A_DISK, each - first), first)


def cut_one_disk(options: Options, kind: str, cuts: int, first: int) -> Iterator[Tally]:
    folder = options.folder("timed-cuts")
    seed = options.seed + first
    try:
        with Disk(folder, kind, space_bytes=4 << 30) as disk:
            outcome = cut_often(options, folder, disk, seed, cuts)
            disk.check()
    except BROKE_OFF as error:
        text = f"{type(error).__name__}: {error}"
        options.failed(f"timed-cuts, seed {seed}, kept in {folder}: {text}")
        yield new_tally("timed-cuts", seed, True, "cut", kind, outcome=f"broke off: {text[:300]}")
        return
    yield from settle(options, "timed-cuts", seed, True, outcome)


def cut_often(options: Options, folder: Path, disk: Disk, seed: int, cuts: int) -> Outcome:
    with TimedRig(folder, seed=seed, sync=True, disk=disk) as rig:
        while disk.cuts < cuts and not options.over:
            time.sleep(rig.chance.uniform(0.0, LOAD_S))
            rig.cut()
            options.progress(f"{disk.kind}: {disk.cuts} cuts")
        return rig.finish()
