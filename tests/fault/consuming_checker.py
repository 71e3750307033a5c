"""Judges what members of groups did with what was stored; the rules of consuming.

    MISPLACED       a key's messages lie in one queue
    UNFINISHED      each message is in the end done with, or a dead letter; what a member did after
                    another one had its queue does not count
    DONE_AGAIN      what is acknowledged does not come again: a popped message never, others not to
                    a member that came after the group's progress had passed them
    ATTEMPTS_FELL   a copy that comes again says one attempt more, a delivery no less than it
    FENCED          a member that was stopped past its session hands out nothing more of its queues
    OVERLAP, OUT_OF_ORDER   one message of a queue at a time, over all members, and each after the
                    one before it is done
    OUT_OF_ORDER    of a queue that is popped in order too: nothing is passed over, nothing goes by
                    the retry topic; HELD_TWICE: nothing of it is given out while some is out
    BACK_LATE, BACK_EARLY, HELD_TWICE   what nobody acknowledges is invisible for its time, and back
                    BACK_S later at most; the time that the broker was away does not count

A member that has just passed its look at the clock when it is stopped begins that one message when
it goes on: nobody can help that, so one for each of its threads is let pass, if the process itself
says that it did not run.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import reference
from fault.availability import Clock, intervals, up_ns
from fault.checker import Kind, Verdict
from fault.consuming_clients import CONCURRENCY, TIMES_MAX
from fault.history import Op, read_part, value_of

from cometmq.protocol.names import DLQ_PREFIX, HIDDEN_TOPICS, RETRY_PREFIX, pop_retry_topic

NEVER: Final = 2**62
BACK_S: Final = 1.0
CLOCK_MS: Final = 5  # between two looks at the same clock

Place = tuple[str, int, int]


class Copy(NamedTuple):
    """A message, or a copy of it for later or for the dead, as it stands in the stopped store."""

    topic: str
    queue: int
    offset: int
    value: str
    attempt: int
    stored_ms: int


class Group(NamedTuple):
    """What a group reads, and how."""

    name: str
    topic: str
    orderly: bool = False
    pops: bool = False


def copies_in(store: Path) -> list[Copy]:
    """In the log's order, read by the independent decoder."""
    return [
        Copy(
            unit.topic, unit.queue_id, unit.queue_offset, value_of(unit.body),
            unit.reconsume_times, unit.store_timestamp,
        )
        for unit in reference.walk_log(store)
        if isinstance(unit, reference.Record) and unit.topic not in HIDDEN_TOPICS
    ]  # fmt: skip


def check_consuming(
    verdict: Verdict, ops: Sequence[Op], copies: Sequence[Copy], groups: Iterable[Group]
) -> None:
    """Adds its findings. `ops` by time, `copies` in the log's order."""
    facts = _Facts(ops, copies)
    _check_keys(verdict, ops)
    for group in groups:
        if group.pops:
            kind = _OrderedPops if group.orderly else _Pops
            done = kind(verdict, facts, group).check()
        else:
            done = _Handles(verdict, facts, group).check()
        _check_finished(verdict, facts, group, done)
        _check_copies(verdict, facts, group)


class _Facts:
    """What all groups have in common."""

    def __init__(self, ops: Sequence[Op], copies: Sequence[Copy]) -> None:
        self.ops, self.copies = ops, copies
        self.at: dict[Place, Copy] = {copy[:3]: copy for copy in copies}
        self.by_topic: dict[str, list[Copy]] = defaultdict(list)
        self.by_value: dict[tuple[str, str], list[Copy]] = defaultdict(list)
        for copy in copies:
            self.by_topic[copy.topic].append(copy)
            self.by_value[copy.topic, copy.value].append(copy)
        self.stalls: dict[str, list[Op]] = defaultdict(list)  # by process
        self.killed: dict[str, int] = {}  # process -> t_ns
        self.coordinator_killed: list[int] = []  # t_ns
        self.joined: dict[str, int] = {}
        self.looks: dict[tuple[str, str, int], list[Op]] = defaultdict(list)  # at progress
        for op in ops:
            if op.f == "stall":
                self.stalls[op.p].append(op)
            elif op.f == "join":
                self.joined[op.p] = op.t_ns
            elif op.f in ("fault", "killed") and op.value.startswith("kill "):
                self.killed[op.value.split()[-1]] = op.t_ns
                if op.value.split()[1] in ("coordinator", "all"):  # at a point of it, maybe
                    self.coordinator_killed.append(op.t_ns)
            elif op.f == "committed" and op.type == "ok":
                self.looks[op.group, op.topic, op.queue].append(op)
        self.away = intervals(ops)
        self.clock = Clock(ops)

    def floor(self, key: tuple[str, str, int], t_ns: int) -> int:
        """The progress that was surely seen before that."""
        looks = self.looks.get(key, [])
        before = bisect_left(looks, t_ns, key=lambda op: op.t_ns)
        return max((op.offset for op in looks[:before]), default=-1)

    def stalled(self, p: str, begin: int, end: int) -> Op | None:
        """A time in which the process did not run, at least in part between these."""
        for op in self.stalls.get(p, ()):
            if op.since_ns <= end and op.t_ns >= begin:
                return op
        return None

    def coordinator_ended(self, begin: int, end: int) -> bool:
        """Whether it was killed between these, alone or with all others."""
        return any(begin <= t_ns <= end for t_ns in self.coordinator_killed)


def _check_keys(verdict: Verdict, ops: Sequence[Op]) -> None:
    """All messages of a key lie in one queue of the topic."""
    queues: dict[tuple[str, str], int] = {}
    for op in ops:
        if op.f == "send" and op.type == "ok" and op.group:
            queue = queues.setdefault((op.topic, op.group), op.queue)
            if queue != op.queue:
                text = f"{op.value} of key {op.group} in queue {op.queue}, others in queue {queue}"
                verdict.add(Kind.MISPLACED, text)


def _check_finished(verdict: Verdict, facts: _Facts, group: Group, done: set[str]) -> None:
    dead = {copy.value for copy in facts.by_topic[DLQ_PREFIX + group.name]}
    verdict.counts[f"{group.name} dead letters"] = len(dead)
    verdict.counts[f"{group.name} done"] = len(done)
    for copy in facts.by_topic[group.topic]:
        if copy.value not in done and copy.value not in dead:
            verdict.add(Kind.UNFINISHED, f"{copy.value} of {copy[:3]} by {group.name}")
            verdict.lost_ns.append(facts.clock.t_ns(copy.stored_ms))


def _check_copies(verdict: Verdict, facts: _Facts, group: Group) -> None:
    """Each was made of one with one attempt less; a dead letter has had all of them."""
    seen: dict[str, set[int]] = defaultdict(set)
    retries = RETRY_PREFIX + group.name, pop_retry_topic(group.name, group.topic)
    dead = DLQ_PREFIX + group.name
    names = (group.topic, *retries, dead)
    for copy in facts.copies:
        if copy.topic not in names:
            continue
        verdict.counts[f"{group.name} copies"] += copy.topic != group.topic
        if copy.topic == group.topic:
            seen[copy.value].add(0)
        elif group.pops and group.orderly:  # it is counted where it is
            if copy.topic != dead:
                verdict.add(Kind.OUT_OF_ORDER, f"{copy} of {group.name}")
            elif copy.attempt <= TIMES_MAX:
                verdict.add(Kind.DEAD_EARLY, f"{copy} of {group.name}")
        elif copy.attempt < 1 or copy.attempt - 1 not in seen[copy.value]:
            verdict.add(Kind.ATTEMPTS_FELL, f"{copy}, before it {sorted(seen[copy.value])}")
        elif copy.topic == dead and copy.attempt <= TIMES_MAX and not group.orderly:
            verdict.add(Kind.DEAD_EARLY, f"{copy} of {group.name}")
        seen[copy.value].add(copy.attempt)


# --- handlers -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Handle:
    """A handler's call."""

    op: Op  # the invoke
    end_ns: int = NEVER
    outcome: str = ""  # ok, fail, dead; empty: its process was killed
    stale: bool = False  # begun by a member that had lost the queue
    counts: bool = False  # ended while nobody else had the queue

    @property
    def where(self) -> str:
        op = self.op
        return f"{op.topic}/{op.queue}/{op.offset} by {op.p}, epoch {op.epoch}, at {op.t_ns}"


class _Handles:
    def __init__(self, verdict: Verdict, facts: _Facts, group: Group) -> None:
        self._verdict, self._facts, self._group = verdict, facts, group

    def check(self) -> set[str]:
        """The values that are done with."""
        done: set[str] = set()
        for handles in self._by_queue().values():
            self._sweep(handles)
            if self._group.orderly and handles[0].op.topic == self._group.topic:
                self._check_order(handles)
            self._check_attempts(handles)
            self._check_floor(handles)
            done |= {each.op.value for each in handles if each.outcome == "ok" and each.counts}
            self._verdict.counts[f"{self._group.name} handled"] += len(handles)
        return done

    def _by_queue(self) -> dict[tuple[str, int], list[_Handle]]:
        found: dict[tuple[str, int], list[_Handle]] = defaultdict(list)
        under_way: dict[tuple[str, Place], _Handle] = {}
        for op in self._facts.ops:
            if op.f != "handle" or op.group != self._group.name:
                continue
            key = op.p, (op.topic, op.queue, op.offset)
            if op.type == "invoke":
                handle = under_way[key] = _Handle(op, self._facts.killed.get(op.p, NEVER))
                found[op.topic, op.queue].append(handle)
            else:
                handle = under_way.pop(key)
                handle.end_ns, handle.outcome = op.t_ns, op.note or op.type
        return found

    def _sweep(self, handles: Sequence[_Handle]) -> None:
        """By time: whose queue it was when each began, and when it ended."""
        events = [(each.op.t_ns, 0, each) for each in handles]
        events += [(each.end_ns, 1, each) for each in handles]
        events.sort(key=lambda event: event[:2])
        newest, since_ns = -1, 0  # the epoch, and when it was first seen
        late: dict[tuple[str, int], int] = defaultdict(int)  # process, stall -> how many
        for t_ns, is_end, handle in events:
            epoch = handle.op.epoch
            if is_end:
                handle.counts = epoch >= newest
            elif epoch >= newest:
                newest, since_ns = epoch, t_ns if epoch > newest else since_ns
            else:
                handle.stale = True
                self._judge_stale(handle, since_ns, late)

    def _judge_stale(
        self, handle: _Handle, since_ns: int, late: dict[tuple[str, int], int]
    ) -> None:
        op = handle.op
        stall = self._facts.stalled(op.p, since_ns, op.t_ns)
        key = op.p, -1 if stall is None else stall.t_ns
        late[key] += 1
        self._verdict.counts["begun as they were stopped"] += 1
        if stall is None or late[key] > (1 if self._group.orderly else CONCURRENCY):
            self._verdict.add(Kind.FENCED, f"{handle.where}, {self._group.name}")

    def _check_order(self, handles: Sequence[_Handle]) -> None:
        done = -1  # the last offset that is done with
        last: dict[int, _Handle] = {}  # by epoch
        under_way: list[_Handle] = []
        ended = sorted(handles, key=lambda handle: handle.end_ns)
        at = 0
        for handle in handles:
            while ended[at].end_ns <= handle.op.t_ns:
                if ended[at].counts and ended[at].outcome in ("ok", "dead"):
                    done = max(done, ended[at].op.offset)
                at += 1
            under_way = [each for each in under_way if each.end_ns > handle.op.t_ns]
            for other in under_way:
                self._check_overlap(other, handle)
            under_way.append(handle)
            if handle.stale:
                continue
            before = last.get(handle.op.epoch)
            self._check_next(before, handle, done)
            last[handle.op.epoch] = handle

    def _check_overlap(self, first: _Handle, second: _Handle) -> None:
        if second.stale:
            return  # judged as such
        begin_ns = first.op.t_ns - 50_000_000
        stopped = self._facts.stalled(first.op.p, begin_ns, second.op.t_ns)
        if first.op.p == second.op.p or stopped is None:
            self._verdict.add(Kind.OVERLAP, f"{first.where}; and {second.where}")

    def _check_next(self, before: _Handle | None, handle: _Handle, done: int) -> None:
        offset = handle.op.offset
        if before is None:
            fine = offset <= done + 1
        elif before.outcome == "ok":
            fine = offset == before.op.offset + 1
        elif before.outcome == "dead":  # or the broker could not take it
            fine = before.op.offset <= offset <= before.op.offset + 1
        else:
            fine = offset == before.op.offset
        if not fine and not (before and self._came_back(before, handle)):
            came = "nothing" if before is None else f"{before.where}: {before.outcome}"
            self._verdict.add(Kind.OUT_OF_ORDER, f"{handle.where} after {came}; done up to {done}")

    def _came_back(self, before: _Handle, handle: _Handle) -> bool:
        """Where the coordinator ends as a member gives a queue up, nobody else has it: the member
        has it again under the same epoch, and goes on behind what is committed."""
        op = handle.op
        if not self._facts.coordinator_ended(before.op.t_ns, op.t_ns):
            return False
        floor = self._facts.floor((self._group.name, op.topic, op.queue), op.t_ns)
        return floor <= op.offset <= before.op.offset

    def _check_attempts(self, handles: Sequence[_Handle]) -> None:
        before: dict[tuple[str, int, int], int] = {}
        for handle in handles:
            op = handle.op
            copy = self._facts.at.get((op.topic, op.queue, op.offset))
            least = 0 if copy is None else copy.attempt
            key = op.p, op.epoch, op.offset
            least = max(least, before.get(key, 0))
            if op.attempt < least:
                self._verdict.add(
                    Kind.ATTEMPTS_FELL, f"{handle.where}: {op.attempt}, it was {least}"
                )
            before[key] = op.attempt

    def _check_floor(self, handles: Sequence[_Handle]) -> None:
        floors: dict[str, int] = {}  # of each process, when it came
        for handle in handles:
            op = handle.op
            if op.p not in floors:
                key = self._group.name, op.topic, op.queue
                floors[op.p] = self._facts.floor(key, self._facts.joined.get(op.p, 0))
            if op.offset < floors[op.p]:
                text = f"{handle.where}, which came when progress was {floors[op.p]}"
                self._verdict.add(Kind.DONE_AGAIN, text)


# --- without queues -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Pop:
    """A popped message, and what was said of it."""

    op: Op
    until_ms: int  # that it is invisible for sure
    until_late_ms: int  # or perhaps
    said: list[Op] = field(default_factory=list)
    acked_ns: int = NEVER
    given_ns: int = (
        NEVER  # it may be given back since then: refused as too late, perhaps at a repeat
    )
    unsure: bool = False  # what became of it is known to nobody: answers were lost

    @property
    def silent(self) -> bool:
        """Surely nothing was said, or it came too late."""
        return all(op.f == "extend" or op.type == "fail" for op in self.said) and not self.unsure


class _Pops:
    def __init__(self, verdict: Verdict, facts: _Facts, group: Group) -> None:
        self._verdict, self._facts, self._group = verdict, facts, group
        self._done: set[str] = set()

    def check(self) -> set[str]:
        pops = self._collect()
        for those in pops.values():
            self._check_held(those)
            for pop in those:
                self._check_attempt(pop)
                self._check_back(pop)
        return self._done

    def _collect(self) -> dict[Place, list[_Pop]]:
        found: dict[Place, list[_Pop]] = defaultdict(list)
        asked: dict[str, int] = {}  # process -> when its poll began
        had: dict[tuple[str, Place], _Pop] = {}
        begun: dict[tuple[str, Place], Op] = {}
        for op in self._facts.ops:
            if op.group != self._group.name or op.f not in ("pop", "ack", "nack", "extend"):
                continue
            place = op.topic, op.queue, op.offset
            if op.f == "pop" and op.type == "invoke":
                asked[op.p] = op.t_ns
            elif op.f == "pop":
                op.since_ns = asked[op.p]
                had[op.p, place] = _Pop(op, op.due_ms, op.due_ms)
                found[place].append(had[op.p, place])
                self._verdict.counts[f"{self._group.name} popped"] += 1
            elif op.type == "invoke":
                begun[op.p, place] = op
                had[op.p, place].unsure = True  # until it has ended
            else:
                self._take_word(had[op.p, place], begun.pop((op.p, place)), op)
        self._done |= {op.value for op in begun.values() if op.f == "ack"}  # it may be
        return found

    def _take_word(self, pop: _Pop, invoke: Op, op: Op) -> None:
        pop.unsure = op.type == "info"
        pop.said.append(op)
        if op.f == "nack" and op.type == "fail":  # of its first try the answer may have been lost
            pop.given_ns = min(pop.given_ns, invoke.t_ns)
        if op.f == "ack" and op.type != "fail":
            self._done.add(op.value)
            pop.acked_ns = min(pop.acked_ns, op.t_ns) if op.type == "ok" else pop.acked_ns
        if op.f == "extend" and op.type == "ok":
            pop.until_ms = max(pop.until_ms, op.due_ms)
            took_ms = (op.t_ns - invoke.t_ns) // 10**6 + 1
            pop.until_late_ms = max(pop.until_late_ms, op.due_ms + took_ms)

    def _check_held(self, pops: Sequence[_Pop]) -> None:
        """Nobody gets it again while somebody has it, or when it is done with."""
        for at, pop in enumerate(pops):
            for before in pops[:at]:
                if before.acked_ns < pop.op.since_ns:
                    self._verdict.add(Kind.DONE_AGAIN, f"{pop.op}, acknowledged by {before.op.p}")
                elif self._until_ns(before) > pop.op.t_ns and before.silent:
                    self._verdict.add(Kind.HELD_TWICE, f"{pop.op}, {before.op.p} has it")

    def _until_ns(self, pop: _Pop) -> int:
        """Until when nobody else has it."""
        return min(self._facts.clock.t_ns(pop.until_ms), pop.given_ns)

    def _check_attempt(self, pop: _Pop) -> None:
        copy = self._facts.at.get((pop.op.topic, pop.op.queue, pop.op.offset))
        if copy is not None and copy.attempt != pop.op.attempt:
            self._verdict.add(Kind.ATTEMPTS_FELL, f"{pop.op}: the record says {copy.attempt}")

    def _check_back(self, pop: _Pop) -> None:
        """A copy of what nobody said a word of is there when its time is over, and not before."""
        if not pop.silent:
            return
        op = pop.op
        copies = [
            copy
            for name in (
                pop_retry_topic(self._group.name, self._group.topic),
                DLQ_PREFIX + self._group.name,
            )
            for copy in self._facts.by_value.get((name, op.value), ())
            if copy.attempt == op.attempt + 1
        ]
        self._verdict.counts[f"{self._group.name} came back"] += 1
        if not copies:
            self._verdict.add(Kind.UNFINISHED, f"{op}: nothing came of it")
            return
        back_ms = [copy.stored_ms for copy in copies]
        back_ms = [ms for ms in back_ms if ms >= pop.until_ms - CLOCK_MS] or back_ms
        clock = self._facts.clock
        if clock.t_ns(min(back_ms) + CLOCK_MS) < self._until_ns(pop):
            self._verdict.add(Kind.BACK_EARLY, f"{op} until {pop.until_ms}: {copies}")
            return
        begin = clock.t_ns(pop.until_late_ms)
        late_ns = up_ns(self._facts.away, begin, clock.t_ns(min(back_ms)))
        self._verdict.samples["back_ms"].append(late_ns / 1e6)
        if late_ns > BACK_S * 10**9:
            self._verdict.add(Kind.BACK_LATE, f"{op}, {late_ns / 1e6:.0f} ms after {pop.until_ms}")


class _OrderedPops(_Pops):
    """By queue, as they came."""

    def check(self) -> set[str]:
        queues: dict[int, list[_Pop]] = defaultdict(list)
        for place, popped in self._collect().items():
            those = sorted(filter(self._is_in_time, popped), key=lambda pop: pop.op.t_ns)
            queues[place[1]] += those
            for before, pop in itertools.pairwise(those):
                if min(each.acked_ns for each in those[: those.index(pop)]) < pop.op.since_ns:
                    self._verdict.add(Kind.DONE_AGAIN, f"{pop.op}")
                if pop.op.attempt < before.op.attempt:
                    self._verdict.add(Kind.ATTEMPTS_FELL, f"{pop.op} after {before.op}")
        words: dict[tuple[str, int], list[Op]] = defaultdict(list)  # by kind, queue
        for op in self._facts.ops:
            if op.group == self._group.name and op.type == "invoke" and op.f in ("ack", "nack"):
                words[op.f, op.queue].append(op)
        for queue, pops in queues.items():
            pops.sort(key=lambda pop: (pop.op.t_ns, pop.op.offset))
            self._check_next(queue, pops, words["ack", queue])
            self._check_alone(pops, words["ack", queue], words["nack", queue])
        return self._done

    def _is_in_time(self, pop: _Pop) -> bool:
        """Or its process was stopped before it had looked at the answer, or just behind that."""
        is_over = self._facts.clock.t_ns(pop.op.due_ms) < pop.op.t_ns
        return not (is_over and self._facts.stalled(pop.op.p, pop.op.since_ns, pop.op.t_ns))

    def _check_next(self, queue: int, pops: Sequence[_Pop], acks: Sequence[Op]) -> None:
        """What lies before it is done with, or came with it."""
        dead = {copy.value for copy in self._facts.by_topic[DLQ_PREFIX + self._group.name]}
        begun: dict[int, int] = {}
        for op in acks:
            begun.setdefault(op.offset, op.t_ns)
        low = 0
        with_it: set[tuple[str, int, int]] = set()
        for pop in pops:
            op = pop.op
            with_it.add((op.p, op.since_ns, op.offset))
            for offset in range(low, op.offset):
                copy = self._facts.at.get((op.topic, queue, offset))
                is_dead = copy is not None and copy.value in dead
                if begun.get(offset, NEVER) < op.t_ns or is_dead:
                    low += offset == low
                elif (op.p, op.since_ns, offset) not in with_it:
                    self._verdict.add(Kind.OUT_OF_ORDER, f"{op}, and {offset} is not done")

    def _check_alone(self, pops: Sequence[_Pop], acks: Sequence[Op], nacks: Sequence[Op]) -> None:
        """Until all that came together is done with, given back, or visible again."""
        said: dict[tuple[str, int], list[int]] = defaultdict(list)
        for op in (*acks, *nacks):
            said[op.p, op.offset].append(op.t_ns)
        takes: dict[tuple[str, int], list[_Pop]] = {}
        for pop in pops:
            takes.setdefault((pop.op.p, pop.op.since_ns), []).append(pop)
        held: list[tuple[int, int, _Pop]] = []  # from, to
        for (p, _), take in takes.items():
            came, last = take[0].op.t_ns, take[-1].op.offset
            ended = [op.t_ns for op in nacks
                     if op.p == p and op.t_ns >= came and op.offset <= last]  # fmt: skip
            for pop in take:
                over = self._facts.clock.t_ns(pop.op.due_ms)
                words = [t for t in said[p, pop.op.offset] if t >= came]
                back = [t for t in ended if t >= came]
                held.append((came, min([over, *words, *back]), pop))
        for take in takes.values():
            came = take[0].op.t_ns
            for begin, end, pop in held:
                if begin < came < end and pop not in take:
                    self._verdict.add(Kind.HELD_TWICE, f"{take[0].op}, {pop.op.p} has {pop.op}")


# --- while it goes on -----------------------------------------------------------------------------


class Finished:
    """By group, what is done with so far, by following the histories."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.done: dict[str, set[str]] = defaultdict(set)

    def look(self) -> None:
        for path in self._folder.glob("*.jsonl"):
            ops, self._read[path] = read_part(path, self._read.get(path, 0))
            for op in ops:
                if (op.f in ("handle", "poll") and op.type == "ok") or (
                    op.f == "ack" and op.type != "fail"  # what is unknown may be
                ):
                    self.done[op.group].add(op.value)
