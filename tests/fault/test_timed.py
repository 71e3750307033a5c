"""The short forms of the campaigns of time, and their checker judged: a real history is good, and
each planted fault is found by its name. The long forms: python -m tests.fault timed timed-cuts"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fault import timed_work
from fault.campaigns import Options
from fault.checker import Kind, Stored, Verdict, check
from fault.disk import Disk, need
from fault.history import Op, read_histories
from fault.points import POINTS
from fault.timed import HERE, THEIRS, TimedRig, cut_often
from fault.timed_checker import Seen, check_timed, seen_in, without_dark
from fault.timed_clients import KEYED, NAMED, TIMED, TX
from fault.timed_work import TimedWork
from waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SEED = 41
CUTS = 3


@dataclass(frozen=True)
class Good:
    """A history in which nothing is wrong, and what can be read in the log."""

    ops: Sequence[Op]
    seen: Sequence[Seen]

    def check(self) -> Verdict:
        ops = without_dark(self.ops)
        verdict = check(ops, [Stored(*one[:4], "") for one in self.seen if one.topic == NAMED])
        verdict.findings[Kind.CHANGED] = 0  # the ids are not in `seen`
        check_timed(verdict, ops, self.seen)
        return verdict

    def of(self, f: str, type_: str = "ok") -> list[Op]:
        return [op for op in self.ops if (op.f, op.type) == (f, type_)]

    def in_(self, topic: str) -> list[Seen]:
        return [one for one in self.seen if one.topic == topic]

    def with_ops(self, change: Callable[[Op], Op | None]) -> Good:
        """`change` returns what stands there instead; None: nothing."""
        ops = [new for op in self.ops if (new := change(op)) is not None]
        return replace(self, ops=sorted(ops, key=lambda op: op.t_ns))

    def with_seen(self, change: Callable[[Seen], Seen | None]) -> Good:
        return replace(self, seen=[new for one in self.seen if (new := change(one)) is not None])

    def and_seen(self, *more: Seen) -> Good:
        return replace(self, seen=[*self.seen, *more])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Good]:
    """Each kind of fault but cuts; what the campaign does again and again."""
    folder = tmp_path_factory.mktemp("timed")
    with TimedRig(folder / "rig", seed=SEED, sync=True) as rig:
        rig.kill("scheduler")
        rig.supersede()
        for name in ("timers.write.after", "levels.write.before", "transactions.checked.after"):
            rig.kill_at(POINTS[name])
        rig.kill("producer")
        rig.kill("all")
        rig.supersede()
        until(
            lambda: has_all(read_histories(rig.histories)), says="some are recalled, a key is known"
        )
        outcome = rig.finish()
        assert outcome.ok, outcome.verdict
        assert outcome.verdict.counts["acknowledged"] > 500
        yield Good(read_histories(rig.histories), seen_in(rig.store))


def has_all(ops: Sequence[Op]) -> bool:
    recalled = sum(op.f == "recall" and op.type == "ok" for op in ops)
    return recalled > 3 and any(op.note == "duplicate" for op in ops)


def only(kind: Kind, planted: Good, count: int | None = None) -> None:
    """It is found, by this name."""
    verdict = planted.check()
    assert verdict.findings[kind], verdict
    assert count is None or verdict.findings[kind] == count, verdict


def changed(op: Op, **fields: object) -> Op:
    return msgspec.structs.replace(op, **fields)


def test_a_good_history(good: Good) -> None:
    verdict = good.check()
    assert not +verdict.findings, verdict
    for f in ("schedule", "recall", "half", "end", "open", "keyed", "send"):
        assert verdict.counts[f] > 1, verdict.counts
    assert verdict.counts["duplicates told"]
    assert verdict.samples["late_ms"]


# --- planted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", [TIMED, TX])
def test_one_never_comes(topic: str, good: Good) -> None:
    acknowledged = {op.value for op in [*good.of("schedule"), *good.of("half")]}
    lost = next(one for one in good.in_(topic) if one.value in acknowledged)
    only(Kind.LOST, good.with_seen(lambda one: None if one is lost else one), 1)


@pytest.mark.parametrize("topic", [TIMED, TX, KEYED])
def test_one_comes_twice(topic: str, good: Good) -> None:
    found = good.in_(topic)
    twin = found[len(found) // 2]._replace(offset=1_000_000)
    only(Kind.DOUBLED, good.and_seen(twin), 1)


def test_a_repeat_of_a_named_producer_is_stored_twice(good: Good) -> None:
    one = good.in_(NAMED)[-1]
    ends = [each.offset for each in good.in_(NAMED) if each.queue == one.queue]
    only(Kind.DOUBLED, good.and_seen(one._replace(offset=max(ends) + 1)), 1)


def test_one_is_early(good: Good) -> None:
    due = {op.value: op.due_ms for op in good.of("schedule")}
    early = next(one for one in good.in_(TIMED) if one.value in due)
    planted = good.with_seen(
        lambda one: one._replace(stored_ms=due[one.value] - 20) if one is early else one
    )
    only(Kind.EARLY, planted, 1)


def test_one_comes_that_was_taken_back(good: Good) -> None:
    recalled = good.of("recall")[0]
    only(Kind.RECALLED, good.and_seen(Seen(TIMED, 0, 1_000_000, recalled.value, 2**50, "", "")), 1)


def test_one_never_comes_although_it_was_too_late_to_take_it_back(good: Good) -> None:
    recalled = good.of("recall")[0]
    planted = good.with_ops(lambda op: changed(op, type="fail") if op is recalled else op)
    only(Kind.LOST, planted, 1)


def test_what_is_rolled_back_is_seen(good: Good) -> None:
    names = {op.group for op in good.of("decide") if op.value == "rollback"}
    half = next(op for op in good.of("half") if op.group in names)
    only(Kind.UNCOMMITTED, good.and_seen(Seen(TX, 0, 10**6, half.value, 0, half.group, "")), 1)


def test_what_nobody_decided_is_seen(good: Good) -> None:
    seen = good.in_(TX)[0]
    planted = good.with_ops(
        lambda op: None if op.f == "decide" and op.group == seen.transaction else op
    )
    only(Kind.UNCOMMITTED, planted)


def test_a_part_of_what_is_committed_is_missing(good: Good) -> None:
    names = [one.transaction for one in good.in_(TX)]
    several = next(name for name in names if names.count(name) > 1)
    part = [one for one in good.in_(TX) if one.transaction == several][-1]
    only(Kind.LOST, good.with_seen(lambda one: None if one is part else one), 1)


def test_a_receipt_of_a_key_tells_another_place(good: Good) -> None:
    told = next(op for op in good.of("keyed") if op.note == "duplicate")
    planted = good.with_ops(lambda op: changed(op, offset=op.offset + 1) if op is told else op)
    only(Kind.MISPLACED, planted, 1)


def test_a_key_that_was_told_is_missing(good: Good) -> None:
    told = good.of("keyed")[0]
    only(Kind.LOST, good.with_seen(lambda one: None if one.key == told.group else one))


def test_who_has_lost_its_name_stores_something(good: Good) -> None:
    """One that was stored is said to have been sent after the next producer had the name."""
    older, newer = good.of("open")[:2]
    sends = [op for op in good.of("send", "invoke") if op.p == older.p]
    stored = {one.value for one in good.in_(NAMED)}
    sent = [op for op in sends if op.value in stored][-1]
    planted = good.with_ops(
        lambda op: (
            changed(op, t_ns=op.t_ns - sent.t_ns + newer.t_ns + 1)
            if op.f == "send" and op.value == sent.value
            else op
        )
    )
    only(Kind.OUTLIVED, planted, 1)


def test_what_was_heard_in_the_dark_is_no_promise(good: Good) -> None:
    acknowledged = {op.value: op for op in good.of("schedule")}
    lost = next(one for one in good.in_(TIMED) if one.value in acknowledged)
    op = acknowledged[lost.value]
    planted = good.with_seen(lambda one: None if one is lost else one)
    cut = Op("harness", "ok", "power_cut", op.t_ns - 1, value="cut ext4")
    dark = Op("harness", "ok", "dark", op.t_ns + 1)
    ops = sorted([*good.ops, cut, dark], key=lambda op: op.t_ns)
    assert not replace(planted, ops=ops).check().findings[Kind.LOST]
    only(Kind.LOST, replace(planted, ops=[each for each in ops if each.f != "power_cut"]), 1)


# --- the short forms ------------------------------------------------------------------------------


def test_points_of_time(tmp_path: Path) -> None:
    """Of each kind one, in a life of the clients; the long form has them all."""
    assert {point.when for point in THEIRS} >= set(HERE)
    names = ("timers.fill.before", "derived.laid.after", "keyed.stored.after", "producers.open")
    with TimedRig(tmp_path / "rig", seed=SEED) as rig:
        for point in THEIRS:
            if point.name.startswith(names):
                rig.kill_at(point)
        outcome = rig.finish()
    assert outcome.ok, outcome.verdict


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_the_power_is_cut(kind: str, tmp_path: Path) -> None:
    need(kind, "power cuts of timers and transactions")
    with Disk(tmp_path, kind, space_bytes=2 << 30) as disk:
        outcome = cut_often(Options(quiet=True), tmp_path, disk, SEED, CUTS)
    assert outcome.ok, outcome.verdict
    assert sum(line.faults for line in outcome.tally("timed-cuts", SEED, True)) >= CUTS


def test_a_run_that_is_late_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: Good
) -> None:
    """Fault 39: `drain` raises after a time-out; late messages were reported as lost."""
    wanted = sorted(op.value for op in timed_work.expected(without_dark(good.ops)))
    assert wanted
    clients: Any = SimpleNamespace(folder=tmp_path, check_alive=lambda: None)
    values: Any = SimpleNamespace(of=lambda *_: set(wanted[1:]))
    monkeypatch.setattr(timed_work, "read_histories", lambda _folder: good.ops)
    monkeypatch.setattr(timed_work, "NO_PROGRESS_S", 0.3)
    with pytest.raises(AssertionError, match=f"1 of {len(wanted)} have not come, .*late, or lost"):
        TimedWork().drain(clients, values)
