"""Judges messages for later, transactions, names and keys; the rules of time and of once.

    EARLY, LOST, DOUBLED   a message for later is delivered once, and not before its time
    RECALLED               never, where the broker has said that it is taken back
    UNCOMMITTED            of a transaction nothing is seen that was not decided so
    LOST, DOUBLED          all of what was, once, whoever had to ask for it
    DOUBLED, MISPLACED     a key is stored once, and each receipt says where
    OUTLIVED               who has lost its name to a newer producer stores nothing more

What a client heard from a broker whose power was gone is no promise: `without_dark`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import reference
from fault.availability import Clock, intervals, up_ns
from fault.checker import Kind, Verdict
from fault.consuming_checker import CLOCK_MS
from fault.history import Op, value_of
from fault.timed_clients import EXACT, KEYED, NAMED, TIMED, TX

TRANSACTION_ID = "__transactionId__"
PROMISES = ("send", "schedule", "recall", "half", "end", "open", "keyed")


class Seen(NamedTuple):
    """A message that consumers can read, as it stands in the stopped store."""

    topic: str
    queue: int
    offset: int
    value: str
    stored_ms: int
    transaction: str
    key: str


def seen_in(store: Path) -> list[Seen]:
    """In the log's order, read by the independent decoder."""
    return [
        Seen(
            unit.topic, unit.queue_id, unit.queue_offset, value_of(unit.body),
            unit.store_timestamp, unit.properties.get(TRANSACTION_ID, ""),
            unit.properties.get("KEYS", ""),
        )
        for unit in reference.walk_log(store)
        if isinstance(unit, reference.Record) and unit.topic in (TIMED, TX, NAMED, KEYED)
    ]  # fmt: skip


def without_dark(ops: Sequence[Op]) -> list[Op]:
    """What was answered between a power cut and the end of the last process is not known."""
    found: list[Op] = []
    dark = False
    for op in ops:
        if op.f in ("power_cut", "dark"):
            dark = op.f == "power_cut"
        elif dark and op.type in ("ok", "fail") and op.f in PROMISES:
            op = msgspec.structs.replace(op, type="info")
        found.append(op)
    return found


def check_timed(verdict: Verdict, ops: Sequence[Op], seen: Sequence[Seen]) -> None:
    """Adds its findings. `ops` by time, without what was answered in the dark."""
    by_topic: dict[str, list[Seen]] = defaultdict(list)
    for one in seen:
        by_topic[one.topic].append(one)
    acknowledged = [op for op in ops if op.f in PROMISES and op.type == "ok"]
    verdict.acknowledged_ns = [op.t_ns for op in acknowledged]
    verdict.counts.update(Counter(op.f for op in acknowledged))
    verdict.counts["acknowledged"] = len(acknowledged)
    for topic in (TIMED, TX):
        _check_once(verdict, topic, Counter(one.value for one in by_topic[topic]))
    _check_once(verdict, KEYED, Counter(one.key for one in by_topic[KEYED]))
    _check_comes(verdict, ops, [*by_topic[TIMED], *by_topic[TX]])
    _check_later(verdict, ops, by_topic[TIMED])
    _check_transactions(verdict, ops, by_topic[TX])
    _check_keyed(verdict, ops, by_topic[KEYED])
    _check_names(verdict, ops, by_topic[NAMED])
    verdict.counts["lost"] = verdict.findings[Kind.LOST]


def _check_once(verdict: Verdict, topic: str, counts: Counter[str]) -> None:
    for what, count in counts.items():
        if count > 1:
            verdict.counts["duplicates"] += count - 1
            verdict.add(Kind.DOUBLED, f"{what} stands in {topic} {count} times")


# --- for later ------------------------------------------------------------------------------------


def later_in(ops: Sequence[Op]) -> tuple[dict[str, Op], dict[str, Op]]:
    """By value: how it went to schedule it, and to recall it."""
    last: dict[str, Op] = {}
    recalls: dict[str, Op] = {}
    for op in ops:
        if op.f == "schedule":
            last[op.value] = op
        elif op.f == "recall":
            recalls[op.value] = op
    return last, recalls


def expected(ops: Sequence[Op]) -> list[Op]:
    """What has to come: scheduled and not taken back, or committed."""
    last, recalls = later_in(ops)
    wanted = []
    for value, op in last.items():
        recall = recalls.get(value)
        if op.type == "ok" and (recall is None or recall.type == "fail"):
            wanted.append(op)
    decided, halves = transactions_in(ops)
    of: dict[str, list[Op]] = defaultdict(list)
    for op in halves.values():
        of[op.group].append(op)
    for name, word in decided.items():
        if word == "commit" and all(op.type == "ok" for op in of[name]):
            wanted += of[name]
    return wanted


def _check_later(verdict: Verdict, ops: Sequence[Op], seen: Sequence[Seen]) -> None:
    last, recalls = later_in(ops)
    for one in seen:
        _check_delivered(verdict, one, last.get(one.value), recalls.get(one.value))
    at_ms = {one.value: one.stored_ms for one in seen}
    away, clock = intervals(ops), Clock(ops)
    for op in last.values():
        if op.type == "ok" and op.note == EXACT and op.value in at_ms:
            late_ns = up_ns(away, clock.t_ns(op.due_ms), clock.t_ns(at_ms[op.value]))
            verdict.samples["late_ms"].append(late_ns / 1e6)


def _check_comes(verdict: Verdict, ops: Sequence[Op], seen: Sequence[Seen]) -> None:
    values = {one.value for one in seen}
    for op in expected(ops):
        if op.value not in values:
            verdict.lost_ns.append(op.t_ns)
            verdict.add(Kind.LOST, f"{op}")


def _check_delivered(verdict: Verdict, one: Seen, op: Op | None, recall: Op | None) -> None:
    where = f"{one.value} at {one[:3]}"
    if op is None:
        verdict.add(Kind.FOREIGN, where)
    elif op.type == "fail":
        verdict.add(Kind.REFUSED_APPEARS, where)
    elif one.stored_ms < op.due_ms - CLOCK_MS:
        verdict.add(Kind.EARLY, f"{where}: {op.due_ms - one.stored_ms} ms before {op.due_ms}")
    if recall is not None and recall.type == "ok":
        verdict.add(Kind.RECALLED, where)


# --- transactions ---------------------------------------------------------------------------------


def transactions_in(ops: Sequence[Op]) -> tuple[dict[str, str], dict[str, Op]]:
    """What was decided, by transaction; how it went to store each message, by value."""
    decided: dict[str, str] = {}
    halves: dict[str, Op] = {}
    for op in ops:
        if op.f == "decide":
            before = decided.setdefault(op.group, op.value)
            assert before == op.value, f"{op.group} is decided twice: the rig itself is wrong"
        elif op.f == "half":
            halves[op.value] = op
    return decided, halves


def _check_transactions(verdict: Verdict, ops: Sequence[Op], seen: Sequence[Seen]) -> None:
    decided, halves = transactions_in(ops)
    for one in seen:
        # The first message of a transaction has its id itself.
        word = decided.get(one.transaction, "nothing")
        if one.value not in halves:
            verdict.add(Kind.FOREIGN, f"{one}")
        elif word != "commit":
            verdict.add(Kind.UNCOMMITTED, f"{one}: {word} was decided")


# --- keys and names -------------------------------------------------------------------------------


def _check_keyed(verdict: Verdict, ops: Sequence[Op], seen: Sequence[Seen]) -> None:
    places = {one.key: (one.queue, one.offset) for one in seen}
    for op in ops:
        if op.f != "keyed" or op.type != "ok":
            continue
        place = places.get(op.group)
        verdict.counts["duplicates told"] += op.note == "duplicate"
        if place is None:
            verdict.lost_ns.append(op.t_ns)
            verdict.add(Kind.LOST, f"key {op.group}, told to be at {op.queue}/{op.offset}")
        elif place != (op.queue, op.offset):
            verdict.add(
                Kind.MISPLACED, f"key {op.group}: {op.queue}/{op.offset} was told, it is {place}"
            )


def _check_names(verdict: Verdict, ops: Sequence[Op], seen: Sequence[Seen]) -> None:
    """By name, who has it from when on for sure; who came before stores nothing from then on."""
    begun: dict[str, int] = {}
    opened: dict[str, list[tuple[int, str]]] = defaultdict(list)  # name -> when answered, process
    names: dict[str, str] = {}
    for op in ops:
        if op.f == "open":
            names[op.p] = op.group
            begun.setdefault(op.p, op.t_ns)
            if op.type == "ok":
                opened[op.group].append((op.t_ns, op.p))
    stored = {one.value for one in seen}
    for op in ops:
        if op.f != "send" or op.type != "invoke" or op.p not in names or op.value not in stored:
            continue
        of_name = opened[names[op.p]]
        newest = bisect_right(of_name, (op.t_ns,)) - 1
        if newest < 0 or of_name[newest][1] == op.p:
            continue
        _t_ns, other = of_name[newest]
        own_ns = next((at for at, p in of_name if p == op.p), 2**62)
        if own_ns < begun[other]:
            verdict.add(Kind.OUTLIVED, f"{op.value} of {op.p}, sent after {other} had its name")
