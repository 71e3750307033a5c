"""A broker under load to which something is done again and again, on one store.

    with Rig(folder, seed=7, sync=True) as rig:
        rig.kill("commitlog")
        rig.kill_at(POINTS["append.wrote.after"])
        rig.pause("flush", 1.5)
        outcome = rig.finish()                  # drained, stopped, and judged
    assert not outcome.verdict.findings

The clients live on through all of it, in processes of their own; where a broker has ended, the rig
starts another one on the same store and port, as a service manager would.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final

import psutil
import reference
from family import CHILDREN, RECOVER_TIMEOUT_S, EndedEarly, RunningBroker, pull
from fault.campaigns import Tally, new_tally, percentile
from fault.checker import Rules, Verdict, add_store_findings, check, stored_in
from fault.disk import Disk
from fault.history import Op, read_histories
from fault.points import Point, Points
from fault.workload import GROUPS, QUEUES, TOPICS, Child, Workload
from patience import patient
from ports import free_ports

from cometmq.client import Admin
from cometmq.protocol.commands import (
    DeleteSegments,
    GetQueueRange,
    PullMessages,
    PullResult,
    QueueRange,
)
from cometmq.protocol.errors import CometError, NotConfirmed, ServiceNotAvailable
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import CONTROL_FILE, Counter
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments, segment_name
from cometmq.shm.tools.verify import verify_store

CLIENTS: Final = ("producer", "consumer")
WHOLE: Final = ("supervisor", "zygote", "all")  # after these the rig starts a broker again
TARGETS: Final = (*CHILDREN, *WHOLE, *CLIENTS)
# The supervisor gives up on a child that has died more often than this within 10 s.
DEATHS_MAX: Final = 4
DEATHS_WITHIN_S: Final = 11.0
RESUME_S: Final = patient(20)
#: Between two rounds of a client's; the tests' short forms, which share the machine, have more.
PACE_S: Final = float(os.environ.get("COMETMQ_TEST_PACE_S", "0.002"))
HIT_S: Final = patient(60)  # a busy machine reaches the point late
OLD_S: Final = 100 * 3600
SETTINGS: Final[Mapping[str, object]] = {
    "consumerSessionTimeout": 3_000,
    "flushIntervalCommitLog": 50,
    "flushIntervalConsumeQueue": 50,
    "flushCommitLogThoroughInterval": 500,
    "flushConsumeQueueThoroughInterval": 500,
    "flushConsumerOffsetInterval": 100,
    "fileReservedTime": 72,
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),  # the rig says when, by mtime
}


@dataclass
class Outcome:
    """What a run has shown."""

    verdict: Verdict
    faults: list[Op]
    gaps_ms: list[float]  # by fault: the longest time without an acknowledgement
    folder: Path
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.verdict.findings

    def tally(self, campaign_name: str, seed: int, sync: bool) -> list[Tally]:
        """A line for each kind of fault, target and point. What was acknowledged belongs to the
        fault before it."""
        times = [op.t_ns for op in self.faults]
        lines: dict[tuple[str, str, str], Tally] = {}
        found = self.verdict.findings
        said = ", ".join(f"{count} {kind.name}" for kind, count in found.items()) or "ok"
        acknowledged = _counts(times, self.verdict.acknowledged_ns)
        lost = _counts(times, self.verdict.lost_ns)
        duplicates = _counts(times, self.verdict.duplicate_ns)
        for index, (op, gap_ms) in enumerate(zip(self.faults, self.gaps_ms, strict=True)):
            fault, target = op.value.split()[:2]
            key = fault, target, op.note
            if key not in lines:
                lines[key] = new_tally(campaign_name, seed, sync, *key, outcome=said)
            line = lines[key]
            line.faults += 1
            line.recover_ms.append(round(gap_ms, 1))
            line.acknowledged += acknowledged[index]
            line.lost += lost[index]
            line.duplicates += duplicates[index]
        found_lines = list(lines.values())
        if found_lines and self.verdict.samples:
            found_lines[0].counts = self._figures()
        return found_lines

    def _figures(self) -> dict[str, int]:
        """Of the whole round: what the checker counted and measured."""
        figures = dict(self.verdict.counts)
        for name, samples in self.verdict.samples.items():
            ordered = sorted(samples)
            figures |= {
                f"{name} {part}%": round(percentile(ordered, part)) for part in (50, 99, 100)
            }
        return figures


def _counts(times: list[int], found: list[int]) -> dict[int, int]:
    """How many belong to each fault: to the last before it, or to the first one."""
    counts: dict[int, int] = defaultdict(int)
    for t_ns in found:
        counts[max(0, bisect_right(times, t_ns) - 1)] += 1
    return counts


def gaps_ms(acknowledged_ns: list[int], faults_ns: list[int]) -> list[float]:
    """By fault, the longest gap between two acknowledgements from it to the next fault."""
    gaps = []
    for begin, end in pairwise([*faults_ns, 2**62]):
        first = max(0, bisect_left(acknowledged_ns, begin) - 1)
        window = acknowledged_ns[first : bisect_right(acknowledged_ns, end)]
        gaps.append(max((b - a for a, b in pairwise(window)), default=0) / 1e6)
    return gaps


class Acks:
    """What producers were told, by following their histories. Of transactions only ends count: a
    message may be stored where an end does not arrive."""

    _MARK: Final = b'"type":"ok"'
    _MARKS: Final[Mapping[str, bytes]] = {"shop": b'"type":"ok","f":"end"'}  # by kind

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = defaultdict(int)
        self.counts: dict[str, int] = defaultdict(int)

    def look(self, producers: Iterable[str]) -> dict[str, int]:
        for p in producers:
            path = self._folder / f"{p}.jsonl"
            if not path.exists():
                continue  # it is just being started
            with path.open("rb") as file:
                file.seek(self._read[p])
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read[p] += whole
            mark = self._MARKS.get(p.rsplit("-", 1)[0], self._MARK)
            self.counts[p] += text.count(mark, 0, whole)
        return dict(self.counts)

    def wait_for_each(self, producers: Collection[str], timeout_s: float = RESUME_S) -> list[str]:
        """Until each has been told of one more message; those that have not."""
        before = self.look(producers)
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.look(producers)
            behind = [p for p in producers if now.get(p, 0) <= before.get(p, 0)]
            if not behind or time.monotonic() > deadline:
                return behind
            time.sleep(0.005)  # a file tells nobody that it has grown


@dataclass
class Rig:
    """A broker with points, its clients, and what is done to them.

    Args:
        folder: has to be new; the store, the histories and the logs.
        retention: segments may be deleted, see `clean`.
        disk: where the store lies, if its power is to be cut.
    """

    topics: ClassVar[Mapping[str, int]] = dict.fromkeys(TOPICS, QUEUES)  # -> queues
    settings: ClassVar[Mapping[str, object]] = SETTINGS

    folder: Path
    seed: int = 0
    sync: bool = False
    retention: bool = False
    disk: Disk | None = None
    _deaths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __enter__(self) -> Rig:
        self._began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = (self.disk.folder if self.disk else self.folder) / "store"
        self.histories = self.folder / "history"
        self.chance = random.Random(f"{self.seed} {self.sync}")
        self._port = free_ports(4)
        self.acks = Acks(self.histories)
        with contextlib.ExitStack() as stack:
            self.points = stack.enter_context(Points(self.folder / "points"))
            stack.callback(self._end_broker)
            self.broker = self._start()
            for topic, queues in self.topics.items():
                self.broker.create_topic(topic, queues)
            self.work = stack.enter_context(self._new_work())
            self._begin(stack)
            self.wait_resumed("the start")
            self._stack = stack.pop_all()
        return self

    @property
    def name_server(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _new_work(self) -> Workload:
        return Workload(self.name_server, self.histories, seed=self.seed, pace_s=PACE_S)

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """What else there is to be before the first fault."""

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _end_broker(self) -> None:
        if hasattr(self, "broker"):
            self.broker.kill_all()  # also right for one that has ended by itself

    def _start(self, *, wait: bool = True) -> RunningBroker:
        self._deaths.clear()
        return RunningBroker(
            self.store,
            {
                **self.settings,
                "port": self._port,
                "flushDiskType": "SYNC_FLUSH" if self.sync else "ASYNC_FLUSH",
            },
            module=Points.MODULE,
            environ=self.points.environ,
            log_path=self.folder / "store.log",
            wait=wait,
        )

    # --- faults ---

    def kill(self, target: str) -> None:
        """kill -9, and wait until it is made good: another one serves, messages are taken."""
        if target in CLIENTS:
            self.work.replace(self._a_client(target))
        elif target in WHOLE:
            self._end_whole(target)
            self.broker = self._start()
        else:
            self._spare(target)
            pid = self.broker.pids()[target]
            self.work.fault("kill", target)
            self.broker.end(pid)
            self.broker.wait_serves(target, not_pid=pid)
        self.wait_resumed(target)

    def restart(self) -> None:
        """The orderly end, and another start."""
        self.work.fault("restart", "broker")
        status = self.broker.close()
        assert not status, f"the broker ended with {status}:\n{self.broker.log[-4000:]}"
        self.broker = self._start()
        self.wait_resumed("a restart")

    def cut(self) -> None:
        """The power goes, and comes back."""
        self._cut("load")
        self.broker = self._start()
        self.wait_resumed("a power cut")

    def _cut(self, moment: str) -> None:
        """What is answered before the last process is gone comes from a machine that would be dark,
        and is no promise: see power.py."""
        assert self.disk is not None
        self.work.fault("cut", self.disk.kind, moment, f="power_cut")
        self.disk.cut()
        self.broker.kill_all()
        self.work.history.end("ok", "dark")
        self.disk.power_on()

    def _a_client(self, target: str) -> Child:
        those = self.work.producers if target == "producer" else self.work.consumers
        return self.chance.choice(those)

    def _end_whole(self, target: str) -> None:
        self.work.fault("kill", target)
        if target == "all":
            self.broker.kill_all()
        elif target == "supervisor":
            self.broker.kill_supervisor()
            self.broker.wait_ended()
        else:
            self.broker.end(self.broker.zygote_pid())
            self.broker.wait_ended()

    def kill_at(self, point: Point) -> None:
        """Have a process kill itself at a point, and see that it did."""
        nth = self.chance.randint(1, point.nth_max)
        if point.when in ("start", "cold start"):
            self.work.fault("kill", point.role, point.name)
            self.broker.kill_all()
            if point.when == "cold start":  # as on another machine: recover from the checkpoint
                (self.store / CONTROL_FILE).unlink()
            self.points.arm(point, nth)
            with contextlib.suppress(CometError, EndedEarly):
                self.broker = self._start()
            self._see_hit(point)
            self._end_broker()
            self.broker = self._start()
        else:
            self._spare(*[point.role] * (2 if point.when == "restart" else 1))
            pid = self.broker.pids()[point.role]
            self.work.fault("kill", point.role, point.name)
            if point.when == "clean":
                self._wait_for_old_segments()
            self.points.arm(point, nth)
            self._lead_to(point, pid)
            pid = self._see_hit(point)
            self.broker.wait_serves(point.role, not_pid=pid)
        self.wait_resumed(point.name)

    def _lead_to(self, point: Point, pid: int) -> None:
        """What has the process pass it that load alone does not."""
        if point.when == "restart":
            self.broker.end(pid)
        elif point.when == "clean":
            self._order_cleaning()

    def _order_cleaning(self) -> None:
        """Until the point is passed, or the time is over. A cleaner that has just taken a dead
        one's place takes orders once it knows the holds; an order may be lost with the connection
        to the dead one, or be answered late; and its own round may have had what was old."""
        deadline = time.monotonic() + HIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(NotConfirmed, ServiceNotAvailable):
                self.broker.ask("cleaner", DeleteSegments(), timeout_s=2)
            if self.points.is_hit(0.05):
                return
            self._wait_for_old_segments()

    def _see_hit(self, point: Point) -> int:
        pid = self.points.wait_hit(HIT_S)
        self.points.disarm()
        assert pid is not None, f"the point {point.name} ({point.target}) was not passed"
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(HIT_S)
        return pid

    def pause(self, target: str, seconds: float) -> None:
        """SIGSTOP for a while, then SIGCONT; everything goes on."""
        if target in CLIENTS:
            child = self._a_client(target)
            pids, name = [child.pid], f"{target} {child.spec.p}"
        else:
            pids, name = self._pids_of(target), target
        self.work.fault("stop", name)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)  # the fault itself
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        self.wait_resumed(target)

    def _pids_of(self, target: str) -> list[int]:
        if target == "supervisor":
            return [self.broker.pid]
        if target == "zygote":
            return [self.broker.zygote_pid()]
        if target == "all":
            return [process.pid for process in self.broker.processes()]
        return [self.broker.pids()[target]]

    def _wait_for_old_segments(self) -> None:
        deadline = time.monotonic() + RESUME_S
        while not self.age_segments():
            assert time.monotonic() < deadline, "no segment is full yet"
            self.acks.wait_for_each([child.spec.p for child in self.work.producers])

    def age_segments(self) -> int:
        """Make all but the newest segments look old, so that the cleaner may delete them; how many
        are."""
        with self.broker.control() as control:
            done = min(control.read(c).value for c in (Counter.FLUSHED, Counter.DISPATCHED))
        size = int(self.broker.settings["mappedFileSizeCommitLog"])
        folder = self.store / COMMITLOG_DIR
        old = time.time() - OLD_S
        aged = [start for start in list_segments(folder, size) if start + 3 * size <= done]
        for start in aged:
            os.utime(folder / segment_name(start), (old, old))
        return len(aged)

    def clean(self) -> None:
        self.age_segments()
        deadline = time.monotonic() + RECOVER_TIMEOUT_S
        while True:
            try:
                self.broker.ask("cleaner", DeleteSegments())
            except ServiceNotAvailable:  # one that has just started, and has not heard of holds
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return

    def _spare(self, *roles: str) -> None:
        """A process of each of these is going to be killed. Begin anew where the supervisor would
        not take that for bad luck any more: to wait takes longer."""
        if not all(self.may_kill(role, roles.count(role)) for role in roles):
            self.restart()
        for role in roles:
            self._deaths[role].append(time.monotonic())

    def may_kill(self, role: str, count: int = 1) -> bool:
        """Whether it could be killed so often now without another start of the broker."""
        recent = time.monotonic() - DEATHS_WITHIN_S
        return len([at for at in self._deaths[role] if at > recent]) + count <= DEATHS_MAX

    def wait_resumed(self, after: str) -> None:
        """Until every producer has been told of one more message."""
        self.work.check_alive()
        behind = self.acks.wait_for_each([child.spec.p for child in self.work.producers])
        if behind:
            log = self.broker.log[-4000:]
            raise AssertionError(f"{behind} got nothing stored after {after}:\n{log}")
        self.work.history.end("ok", "healed", due_ms=time.time_ns() // 1_000_000)

    # --- the end ---

    def _pull(self, command: PullMessages) -> tuple[PullResult, list[Message]]:
        return pull(self.broker.reader, command)

    def finish(self) -> Outcome:
        """Everything healed, drained, read, stopped in order, and judged."""
        unfound = self._drain()
        status = self.broker.close()
        verdict = self._judge()
        add_store_findings(verdict, unfound)
        if status:
            add_store_findings(verdict, [f"the broker ended with {status}"])
        faults = [op for op in read_histories(self.histories) if op.f in ("fault", "power_cut")]
        gaps = gaps_ms(verdict.acknowledged_ns, [op.t_ns for op in faults])
        return Outcome(verdict, faults, gaps, self.folder, time.monotonic() - self._began)

    def _drain(self) -> list[str]:
        """Producers end, consumers get everything and end; what the index does not know."""
        self.work.stop_producers()
        self.work.drain(self.queue_ends())
        unfound = self._unfound(self._read_all())
        self.work.finish(self.queue_ends)
        return unfound

    def _judge(self) -> Verdict:
        rules = Rules(groups=GROUPS, retention=self.retention)
        verdict = check(read_histories(self.histories), stored_in(self.store), rules)
        add_store_findings(verdict, reference.check_store(self.store))
        add_store_findings(verdict, map(str, verify_store(self.store).findings))
        return verdict

    def _ranges(self) -> dict[tuple[str, int], range]:
        found = {}
        for topic, queues in self.topics.items():
            for queue in range(queues):
                answer, _ = self.broker.reader.ask(
                    GetQueueRange(topic, queue), timeout_s=patient(30)
                )
                assert isinstance(answer, QueueRange)
                found[topic, queue] = range(answer.min_queue_offset, answer.max_queue_offset)
        return found

    def queue_ends(self) -> dict[tuple[str, int], int]:
        return {key: found.stop for key, found in self._ranges().items()}

    def _read_all(self) -> list[tuple[str, str]]:
        """Every message once more, past the groups, into the history; topic and id of some."""
        ids = []
        for (topic, queue), offsets in self._ranges().items():
            at = offsets.start
            while at < offsets.stop:
                answer, messages = pull(self.broker.reader, PullMessages(topic, queue, at, 2_000))
                self.work.read(topic, queue, messages)
                chosen = self.chance.sample(messages, min(3, len(messages)))
                ids += [(topic, message.msg_id) for message in chosen]
                assert answer.next_queue_offset > at, (topic, queue, at, answer)
                at = answer.next_queue_offset
        return ids

    def _unfound(self, ids: Sequence[tuple[str, str]]) -> list[str]:
        """Which of these the index does not know, when it has had its time."""
        deadline = time.monotonic() + RESUME_S
        unfound = []
        with Admin(self.name_server) as admin:
            for topic, msg_id in ids:
                while not admin.query_messages(topic, msg_id, unique=True):
                    if time.monotonic() > deadline:
                        unfound.append(f"{msg_id} of {topic} is stored, and not in the index")
                        break
                    time.sleep(0.01)  # it is indexed behind its delivery
        return unfound
