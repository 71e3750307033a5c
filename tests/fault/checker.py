"""Judges a history. Sorting only, O(n log n): millions of operations take seconds.

    verdict = check(read_histories(folder), stored_in(store), Rules(groups=("g1", "g2")))
    assert not verdict.findings

An offset names its message for ever, so a log needs no search for a linearization: what was
acknowledged says where it stands, and the rest is comparing. The rules are those of
docs/guarantees.md; the anomalies' names follow jepsen-io/jepsen:jepsen/src/jepsen/tests/kafka.clj.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import reference
from fault.history import Op, value_of

from cometmq.protocol.names import HIDDEN_TOPICS

TEXTS_MAX: Final = 20  # findings of one kind that are told in full
REBALANCE_NS: Final = 60 * 10**9  # what comes twice so long after a fault has it for its reason

Queue = tuple[str, int]


class Kind(StrEnum):
    """What can be wrong, each by its own name."""

    LOST = "acknowledged, and not in the log"
    CHANGED = "acknowledged, and other bytes stand in its place"
    MISPLACED = "acknowledged, and stored elsewhere"
    TWO_VALUES = "two messages at one queue offset"
    REORDERED = "acknowledged before the other was sent, and stored behind it"
    HOLE = "a queue offset without a message"
    REFUSED_APPEARS = "refused, and in the log or delivered"
    FOREIGN = "in the log or delivered, and never sent"
    VANISHED = "delivered before anybody knew that it is stored, and not in the log"
    DOUBLED = "stored twice"
    SKIPPED = "a member passed over messages that nobody else of its group got"
    REDELIVERED = "delivered twice although nothing happened"
    COMMITTED_AGAIN = "delivered again although committed"
    COMMIT_BACK = "a committed offset went back"
    UNSEEN = "stored, and never delivered to a group"
    STORE = "the files contradict each other"
    # of consuming_checker.py
    UNFINISHED = "stored, and in the end neither done nor a dead letter"
    DONE_AGAIN = "done with, and delivered again"
    DEAD_EARLY = "a dead letter that had attempts left"
    ATTEMPTS_FELL = "delivered with fewer attempts than before"
    FENCED = "handed out by a member that had lost the queue"
    OVERLAP = "two messages of a queue in order at work at a time"
    OUT_OF_ORDER = "a queue in order went on with another message than the next"
    HELD_TWICE = "given out while another one had it"
    BACK_LATE = "not acknowledged, and later back than it may be"
    BACK_EARLY = "back before its time was over"
    # of timed_checker.py
    EARLY = "delivered before its time"
    RECALLED = "recalled, and delivered"
    UNCOMMITTED = "not committed, and seen"
    OUTLIVED = "stored by a producer whose name a newer one has"


class Stored(NamedTuple):
    """A message as it stands in the stopped store, or as it was read at the end."""

    topic: str
    queue: int
    offset: int
    value: str
    msg_id: str


@dataclass(frozen=True)
class Rules:
    """What this run promises.

    Args:
        groups: that have drained everything.
        seen: of these topics; empty: of all.
        retention: the oldest messages of a queue may have gone.
        lost_tail_younger_than_ms: under ASYNC_FLUSH, what a power cut ("power_cut" in the history)
            may take: a suffix, acknowledged no longer before. None = nothing at all.
    """

    groups: Sequence[str] = ()
    seen: Sequence[str] = ()
    retention: bool = False
    lost_tail_younger_than_ms: float | None = None


@dataclass
class Verdict:
    """`findings` by kind, the first ones in words; `counts` of everything that was looked at."""

    findings: Counter[Kind] = field(default_factory=Counter)
    acknowledged_ns: list[int] = field(default_factory=list)  # when each was, in this order
    lost_ns: list[int] = field(default_factory=list)  # those that are lost, likewise
    duplicate_ns: list[int] = field(default_factory=list)  # further copies, by when sent
    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: Kind, text: str) -> None:
        self.findings[kind] += 1
        if self.findings[kind] <= TEXTS_MAX:
            self.texts.append(f"{kind.name}: {text}")

    def __str__(self) -> str:
        found = ", ".join(f"{count} {kind.name}" for kind, count in self.findings.items())
        return "\n".join([found or "nothing found", *self.texts])


@dataclass(slots=True)
class Send:
    """One attempt of a producer's, from its first line to its last."""

    p: str
    topic: str
    value: str
    invoked_ns: int
    queue: int = -1
    offset: int = -1
    outcome: str = "info"
    ended_ns: int = 0
    msg_id: str = ""

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.queue, self.offset

    def __str__(self) -> str:
        return f"{self.value} of {self.p} at {self.topic}/{self.queue}/{self.offset}"


def stored_in(store: Path) -> list[Stored]:
    """What clients have in a stopped store, in the log's order, read by the independent decoder."""
    return [
        Stored(
            unit.topic,
            unit.queue_id,
            unit.queue_offset,
            value_of(unit.body),
            unit.properties.get("UNIQ_KEY", ""),
        )
        for unit in reference.walk_log(store)
        if isinstance(unit, reference.Record) and unit.topic not in HIDDEN_TOPICS
    ]


def check(ops: Sequence[Op], stored: Sequence[Stored], rules: Rules | None = None) -> Verdict:
    """Everything. `ops` by time, as read_histories gives them."""
    return _Checker(ops, stored, rules or Rules()).run()


class _Checker:
    def __init__(self, ops: Sequence[Op], stored: Sequence[Stored], rules: Rules) -> None:
        self.ops, self.stored, self.rules = ops, stored, rules
        self.verdict = Verdict()
        self.sends: dict[str, Send] = {}
        self.at: dict[tuple[str, int, int], str] = {}
        self.places: dict[str, list[Stored]] = defaultdict(list)
        self.first: dict[Queue, int] = {}
        self.cuts = [op.t_ns for op in ops if op.f == "power_cut"]
        self.taken: set[str] = set()  # by a power cut, and rightly

    def run(self) -> Verdict:
        self._collect_sends()
        self._collect_stored()
        self._check_acknowledged()
        self._check_stored()
        self._check_order()
        self._check_one_value()
        _check_groups(self)
        self.verdict.counts["lost"] = self.verdict.findings[Kind.LOST]
        return self.verdict

    # --- collecting ---

    def _collect_sends(self) -> None:
        for op in self.ops:
            if op.f != "send":
                continue
            if op.type == "invoke":
                assert op.value not in self.sends, f"the workload sent {op.value} twice"
                self.sends[op.value] = Send(op.p, op.topic, op.value, op.t_ns)
                continue
            send = self.sends[op.value]
            send.outcome, send.ended_ns = op.type, op.t_ns
            if op.type == "ok":
                send.queue, send.offset, send.msg_id = op.queue, op.offset, op.msg_id
        names = {"ok": "acknowledged", "fail": "refused", "info": "unknown"}
        for send in self.sends.values():
            self.verdict.counts[names[send.outcome]] += 1
        self.verdict.acknowledged_ns = sorted(send.ended_ns for send in self._acknowledged)

    def _collect_stored(self) -> None:
        for one in self.stored:
            self.places[one.value].append(one)
            before = self.at.setdefault(one[:3], one.value)
            if len(self.places[one.value]) > 1 and self.places[one.value][-2][:3] == one[:3]:
                self.verdict.add(Kind.TWO_VALUES, f"{one} stands in the log twice")
            elif before != one.value:
                self.verdict.add(Kind.TWO_VALUES, f"{one}, and {before} in the same log")
        self.verdict.counts["stored"] = len(self.stored)

    # --- producers ---

    @property
    def _acknowledged(self) -> list[Send]:
        return [send for send in self.sends.values() if send.outcome == "ok"]

    def _check_acknowledged(self) -> None:
        ends = self._check_dense()
        missing = []
        for send in self._acknowledged:
            found = self.at.get(send.place)
            if found == send.value:
                continue
            first = self.first.get(send.place[:2], 0)
            if found is None and send.offset < first and self.rules.retention and ends:
                self.verdict.counts["expired"] += 1
            elif found is not None and found not in self.sends:
                self.verdict.add(Kind.CHANGED, f"{send}: there is {found}")
            elif send.value in self.places:
                self.verdict.add(Kind.MISPLACED, f"{send}: it stands at {self.places[send.value]}")
            else:
                missing.append(send)
        for send in self._not_excused(missing):
            self.verdict.lost_ns.append(send.ended_ns)
            there = self.at.get(send.place, "nothing")
            self.verdict.add(Kind.LOST, f"{send}: there is {there}")

    def _check_dense(self) -> dict[Queue, int]:
        """No holes; where each queue ends."""
        offsets: dict[Queue, list[int]] = defaultdict(list)
        for topic, queue, offset in self.at:
            offsets[topic, queue].append(offset)
        ends = {}
        for queue_key, found in offsets.items():
            found.sort()
            self.first[queue_key], ends[queue_key] = found[0], found[-1] + 1
            expected = found[0] if self.rules.retention else 0
            for offset in found:
                if offset != expected:
                    self.verdict.add(Kind.HOLE, f"{queue_key}: {offset} follows {expected - 1}")
                expected = offset + 1
        return ends

    def _not_excused(self, missing: list[Send]) -> list[Send]:
        """Those that a power cut was not allowed to take: too old, or older than what was left."""
        window_ms = self.rules.lost_tail_younger_than_ms
        if window_ms is None:
            return missing
        last_kept: dict[int, int] = defaultdict(int)  # by cut: when the last one kept was sent
        gone = {send.value for send in missing}
        for send in self._acknowledged:
            if send.value not in gone:
                cut = bisect_left(self.cuts, send.ended_ns)
                last_kept[cut] = max(last_kept[cut], send.invoked_ns)
        wrong = []
        for send in missing:
            cut = bisect_left(self.cuts, send.ended_ns)
            if (
                cut < len(self.cuts)
                and self.cuts[cut] - send.ended_ns <= window_ms * 10**6
                and last_kept[cut] <= send.ended_ns
            ):
                self.taken.add(send.value)
            else:
                wrong.append(send)
        self.verdict.counts["taken_by_power_cuts"] = len(self.taken)
        return wrong

    def _check_stored(self) -> None:
        for value, places in self.places.items():
            send = self.sends.get(value)
            if send is None:
                self.verdict.add(Kind.FOREIGN, f"{places[0]}")
                continue
            if send.outcome == "fail":
                self.verdict.add(Kind.REFUSED_APPEARS, f"{send.value} of {send.p}: {places[0]}")
            if len(places) > 1:
                self.verdict.counts["duplicates"] += len(places) - 1
                self.verdict.duplicate_ns += [send.invoked_ns] * (len(places) - 1)
                self.verdict.add(Kind.DOUBLED, f"{places}")
            elif send.msg_id and places[0].msg_id != send.msg_id:
                self.verdict.add(Kind.CHANGED, f"{send}: its id is {places[0].msg_id}")

    def _check_order(self) -> None:
        """Who was acknowledged before another was sent stands before it; so does all of one
        producer's, in one queue. By sweeping over the time, queue by queue."""
        queues: dict[Queue, list[Send]] = defaultdict(list)
        for send in self._acknowledged:
            if send.value not in self.taken:
                queues[send.topic, send.queue].append(send)
        for sends in queues.values():
            self._check_real_time(sends)
            sends.sort(key=lambda send: (send.p, send.invoked_ns))
            for before, after in pairwise(sends):
                if before.p == after.p and before.offset >= after.offset:
                    self.verdict.add(Kind.REORDERED, f"{before}, sent before {after}")

    def _check_real_time(self, sends: list[Send]) -> None:
        ended = sorted(sends, key=lambda send: send.ended_ns)
        highest: Send | None = None
        at = 0
        for send in sorted(sends, key=lambda send: send.invoked_ns):
            while ended[at].ended_ns < send.invoked_ns:
                if highest is None or ended[at].offset > highest.offset:
                    highest = ended[at]
                at += 1
            if highest is not None and highest.offset >= send.offset:
                self.verdict.add(Kind.REORDERED, f"{highest}, answered before {send} was sent")

    def _check_one_value(self) -> None:
        """Over all clients and all time."""
        seen: dict[tuple[str, int, int], tuple[str, str]] = {
            place: (value, "the log") for place, value in self.at.items()
        }
        for op in self.ops:
            if op.type != "ok" or op.f not in ("send", "poll", "read"):
                continue
            place = (op.topic, op.queue, op.offset)
            value, who = seen.setdefault(place, (op.value, op.p))
            if value != op.value and not self._was_taken(op, value):
                self.verdict.add(
                    Kind.TWO_VALUES, f"{place}: {op.value} to {op.p} ({op.f}), {value} to {who}"
                )
            if op.f != "send":
                self._check_delivered(op)

    def _was_taken(self, op: Op, other: str) -> bool:
        """Seen before a power cut that took it, and the place was given to another one."""
        window_ms = self.rules.lost_tail_younger_than_ms
        if window_ms is None or other not in self.places:
            return False
        cut = bisect_left(self.cuts, op.t_ns)
        return op.value in self.taken or (op.value not in self.places and cut < len(self.cuts))

    def _check_delivered(self, op: Op) -> None:
        send = self.sends.get(op.value)
        where = f"{op.value} to {op.p} from {op.topic}/{op.queue}/{op.offset}"
        if send is None:
            self.verdict.add(Kind.FOREIGN, where)
        elif send.outcome == "fail":
            self.verdict.add(Kind.REFUSED_APPEARS, where)
        elif send.outcome == "info" and op.value not in self.places and self._keeps_all:
            self.verdict.add(Kind.VANISHED, where)

    @property
    def _keeps_all(self) -> bool:
        return not self.rules.retention and self.rules.lost_tail_younger_than_ms is None


# --- consumers ------------------------------------------------------------------------------------


@dataclass
class _GroupQueue:
    """What one group did to one queue, swept by time."""

    seen: dict[int, str] = field(default_factory=dict)  # offset -> the last member that got it
    last: dict[str, int] = field(default_factory=dict)  # member -> its last offset


def _check_groups(checker: _Checker) -> None:
    verdict = checker.verdict
    queues: dict[tuple[str, str, int], _GroupQueue] = defaultdict(_GroupQueue)
    polls: dict[str, int] = {}  # process -> when its poll began
    floors: dict[tuple[str, str, str, int], int] = {}  # committed when that operation began
    unrest_ns = -REBALANCE_NS  # of the last fault, or of a change in some group
    committed = _Committed()
    for op in checker.ops:
        if op.f in ("fault", "power_cut", "join", "leave", "assign"):
            unrest_ns = op.t_ns
            if op.f == "power_cut" and checker.rules.lost_tail_younger_than_ms is not None:
                floors.clear()
                committed.forget()
            continue
        if op.f not in ("poll", "committed"):
            continue
        key = (op.group, op.topic, op.queue)
        its = (op.p, *key)
        if op.f == "poll" and op.type == "invoke":
            polls[op.p] = op.t_ns
        elif op.f == "poll" and op.type == "ok":
            queue = queues[key]
            floor = committed.before(key, polls.get(op.p, op.t_ns))
            first = checker.first.get(key[1:], 0) if checker.rules.retention else 0
            quiet = op.t_ns - unrest_ns > REBALANCE_NS
            _take_poll(verdict, queue, op, floor, first=first, quiet=quiet)
        elif op.type == "invoke":
            floors[its] = committed.before(key, op.t_ns)
        elif op.type == "ok":
            if op.offset < floors.get(its, -1):
                verdict.add(
                    Kind.COMMIT_BACK, f"{key}: {op.offset} after {floors[its]}, as {op.p} saw"
                )
            verdict.counts["committed_looks"] += 1
            committed.add(key, op.t_ns, op.offset)
    _check_unseen(checker, queues)


class _Committed:
    """The highest offset that was surely committed at a moment, by group and queue."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        self._highest: dict[tuple[str, str, int], list[int]] = defaultdict(list)

    def add(self, key: tuple[str, str, int], t_ns: int, offset: int) -> None:
        highest = self._highest[key]
        if not highest or offset > highest[-1]:
            self._times[key].append(t_ns)
            highest.append(offset)

    def before(self, key: tuple[str, str, int], t_ns: int) -> int:
        at = bisect_left(self._times[key], t_ns)
        return self._highest[key][at - 1] if at else -1

    def forget(self) -> None:
        self._times.clear()
        self._highest.clear()


def _take_poll(
    verdict: Verdict, queue: _GroupQueue, op: Op, floor: int, *, first: int, quiet: bool
) -> None:
    verdict.counts["delivered"] += 1
    where = f"{op.topic}/{op.queue}/{op.offset} to {op.p} of {op.group}"
    last = queue.last.get(op.p)
    if op.offset in queue.seen:
        verdict.counts["redelivered"] += 1
        if quiet:
            verdict.add(Kind.REDELIVERED, f"{where}, before to {queue.seen[op.offset]}")
        if op.offset < floor and last is not None and op.offset == last + 1:
            # It goes on with what it had fetched while the queue was its own.
            verdict.counts["delivered_late"] += 1
        elif op.offset < floor:
            verdict.add(Kind.COMMITTED_AGAIN, f"{where}, committed up to {floor}")
    elif last is not None and op.offset > last + 1:
        begin = max(last + 1, first)
        missing = next((each for each in range(begin, op.offset) if each not in queue.seen), -1)
        if missing >= 0:
            verdict.add(Kind.SKIPPED, f"{where}, whose last was {last}: nobody got {missing}")
    queue.seen[op.offset] = op.p
    queue.last[op.p] = op.offset


def _check_unseen(checker: _Checker, queues: dict[tuple[str, str, int], _GroupQueue]) -> None:
    for group in checker.rules.groups:
        for topic, queue, offset in checker.at:
            if checker.rules.seen and topic not in checker.rules.seen:
                continue
            if offset not in queues[group, topic, queue].seen:
                text = f"{topic}/{queue}/{offset} by {group}: {checker.at[topic, queue, offset]}"
                checker.verdict.add(Kind.UNSEEN, text)


def add_store_findings(verdict: Verdict, texts: Iterable[str]) -> None:
    """What tests/reference.check_store and the like have found in the files."""
    for text in texts:
        verdict.add(Kind.STORE, text)
