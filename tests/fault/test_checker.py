"""The checker is judged: a real history is good, and each planted fault is found by its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import reference
from family import RunningBroker
from fault.checker import Kind, Rules, Stored, Verdict, check, stored_in
from fault.history import (
    BODY_BYTES_MIN,
    History,
    Op,
    make_body,
    read_histories,
    read_history,
    value_of,
)
from fault.rig import Rig, gaps_ms
from fault.workload import GROUPS

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


@dataclass(frozen=True)
class Good:
    """A history in which nothing is wrong, and the log that goes with it."""

    ops: list[Op]
    stored: list[Stored]
    rules: Rules = field(default_factory=lambda: Rules(groups=GROUPS))

    def check(self) -> Verdict:
        return check(self.ops, self.stored, self.rules)

    def sends(self, type_: str = "ok") -> list[Op]:
        return [op for op in self.ops if op.f == "send" and op.type == type_]

    def with_stored(self, change: Callable[[Stored], Stored | None]) -> Good:
        """`change` returns what stands there instead; None = nothing."""
        stored = [new for one in self.stored if (new := change(one)) is not None]
        return replace(self, stored=stored)

    def with_ops(self, change: Callable[[Op], Op | None]) -> Good:
        return replace(self, ops=[new for op in self.ops if (new := change(op)) is not None])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """From the real broker, with a kill in it, so that there are retries and rebalancing."""
    folder = tmp_path_factory.mktemp("good")
    with Rig(folder / "rig", seed=3) as rig:
        for target in ("commitlog", "all", "consumer"):
            rig.kill(target)
        while not rig.work.refused():
            rig.wait_resumed("a while")
        outcome = rig.finish()
        assert outcome.ok, outcome.verdict
        return Good(read_histories(rig.histories), stored_in(rig.store))


def only(kind: Kind, planted: Good, count: int | None = None) -> None:
    """It is found, by this name."""
    verdict = planted.check()
    assert verdict.findings[kind], verdict
    assert count is None or verdict.findings[kind] == count, verdict


def changed(op: Op, **fields: object) -> Op:
    return msgspec.structs.replace(op, **fields)


@pytest.mark.slow
def test_a_good_history(good: Good) -> None:
    verdict = good.check()
    assert not verdict.findings, verdict
    assert verdict.counts["acknowledged"] > 200
    assert verdict.counts["refused"] > 0
    assert verdict.counts["delivered"] >= 2 * verdict.counts["stored"]


@pytest.fixture
def victim(good: Good) -> Op:
    """An acknowledged message in the middle of its queue, stored once."""
    values = [one.value for one in good.stored]
    sends = good.sends()
    return next(op for op in sends[len(sends) // 2 :] if values.count(op.value) == 1)


def test_one_is_dropped(good: Good, victim: Op) -> None:
    planted = good.with_stored(lambda one: None if one.value == victim.value else one)
    only(Kind.LOST, planted, 1)
    only(Kind.HOLE, planted, 1)


def test_the_last_one_is_dropped(good: Good) -> None:
    """There is no hole that would tell."""
    ends = {(one.topic, one.queue): one.value for one in sorted(good.stored)}
    values = [one.value for one in good.stored]
    last = next(
        op for op in good.sends() if op.value in ends.values() and values.count(op.value) == 1
    )
    planted = good.with_stored(lambda one: None if one.value == last.value else one)
    only(Kind.LOST, planted, 1)
    assert not planted.check().findings[Kind.HOLE]


def test_two_are_swapped(good: Good, victim: Op) -> None:
    other = next(
        op
        for op in good.sends()
        if (op.topic, op.queue) == (victim.topic, victim.queue) and op.offset > victim.offset
    )
    swapped = {victim.value: other.value, other.value: victim.value}
    planted = good.with_stored(lambda one: one._replace(value=swapped.get(one.value, one.value)))
    only(Kind.MISPLACED, planted, 2)


def test_two_are_swapped_and_so_are_their_acknowledgements(good: Good) -> None:
    """Everybody agrees on where they are; only the order is wrong."""
    by_queue: dict[tuple[str, str, int], Op] = {}
    for op in good.sends():
        first = by_queue.setdefault((op.p, op.topic, op.queue), op)
        if op.offset > first.offset + 3 and op.p.startswith("single"):
            break
    else:
        pytest.fail("no producer has sent twice to a queue")
    places = {first.value: op.offset, op.value: first.offset}

    def swap(each: Op) -> Op:
        return changed(each, offset=places[each.value]) if swaps(each) else each

    def swaps(each: Op) -> bool:
        return each.value in places and each.type == "ok"

    planted = good.with_ops(swap).with_stored(
        lambda one: one._replace(offset=places.get(one.value, one.offset))
    )
    only(Kind.REORDERED, planted)


def test_a_bit_is_flipped(good: Good, victim: Op) -> None:
    """On its way through value_of, which sees every bit of a body."""
    producer, sequence, _ = victim.value.split("-")
    body = bytearray(make_body(int(producer), int(sequence), 100, bytes(400)))
    body[50] ^= 4
    damaged = value_of(bytes(body))
    assert damaged.startswith("damaged-")
    planted = good.with_stored(
        lambda one: one._replace(value=damaged) if one.value == victim.value else one
    )
    only(Kind.CHANGED, planted, 1)
    only(Kind.FOREIGN, planted, 1)


def test_a_bit_is_flipped_on_the_way_to_a_consumer(good: Good, victim: Op) -> None:
    planted = good.with_ops(
        lambda op: (
            changed(op, value="damaged-1-1-0")
            if op.f == "poll" and op.value == victim.value
            else op
        )
    )
    only(Kind.TWO_VALUES, planted)
    only(Kind.FOREIGN, planted)


def test_an_offset_is_used_twice(good: Good, victim: Op) -> None:
    other = next(op for op in good.sends() if op.topic == victim.topic and op is not victim)
    planted = good.with_ops(
        lambda op: changed(op, queue=victim.queue, offset=victim.offset) if op is other else op
    )
    only(Kind.TWO_VALUES, planted, 1)


def test_two_records_have_one_offset(good: Good, victim: Op) -> None:
    twin = next(one for one in good.stored if one.value == victim.value)
    planted = replace(good, stored=[*good.stored, twin])
    only(Kind.TWO_VALUES, planted, 1)


def test_a_commit_steps_back(good: Good) -> None:
    looks = [op for op in good.ops if op.f == "committed" and op.type == "ok" and op.offset > 10]
    late = looks[len(looks) // 2]
    planted = good.with_ops(lambda op: changed(op, offset=1) if op is late else op)
    only(Kind.COMMIT_BACK, planted, 1)


def test_a_refused_one_appears(good: Good) -> None:
    refused = good.sends("fail")[0]
    ends = [one.offset for one in good.stored if (one.topic, one.queue) == ("alpha", 0)]
    one = Stored("alpha", 0, max(ends) + 1, refused.value, "id")
    only(Kind.REFUSED_APPEARS, replace(good, stored=[*good.stored, one]), 1)


def test_a_refused_one_is_delivered(good: Good, victim: Op) -> None:
    refused = good.sends("fail")[0]
    late = next(op for op in good.ops if op.f == "poll" and op.value == victim.value)
    planted = good.with_ops(lambda op: changed(op, value=refused.value) if op is late else op)
    only(Kind.REFUSED_APPEARS, planted, 1)


def test_one_that_was_delivered_vanishes(good: Good, victim: Op) -> None:
    """Its producer never knew: it is not lost, but somebody has seen it."""
    planted = good.with_ops(
        lambda op: changed(op, type="info", offset=-1) if op is victim else op
    ).with_stored(lambda one: None if one.value == victim.value else one)
    verdict = planted.check()
    assert verdict.findings[Kind.VANISHED] > 0
    assert not verdict.findings[Kind.LOST]


def test_there_is_a_hole(good: Good, victim: Op) -> None:
    """Everything behind it has moved by one, and was acknowledged there."""

    def moved(offset: int) -> int:
        return offset + (offset > victim.offset)

    def is_behind(topic: str, queue: int) -> bool:
        return (topic, queue) == (victim.topic, victim.queue)

    planted = good.with_ops(
        lambda op: changed(op, offset=moved(op.offset)) if is_behind(op.topic, op.queue) else op
    ).with_stored(
        lambda one: one._replace(offset=moved(one.offset)) if is_behind(one[0], one[1]) else one
    )
    only(Kind.HOLE, planted, 1)
    assert not planted.check().findings[Kind.LOST]


def test_something_is_stored_that_nobody_sent(good: Good) -> None:
    ends = [one.offset for one in good.stored if (one.topic, one.queue) == ("beta", 1)]
    foreign = Stored("beta", 1, max(ends) + 1, "999-1-0badcafe", "id")
    only(Kind.FOREIGN, replace(good, stored=[*good.stored, foreign]), 1)


def test_a_copy_with_another_id(good: Good, victim: Op) -> None:
    ends = [o.offset for o in good.stored if (o.topic, o.queue) == (victim.topic, victim.queue)]
    copy = Stored(victim.topic, victim.queue, max(ends) + 1, victim.value, "another")
    only(Kind.DOUBLED, replace(good, stored=[*good.stored, copy]), 1)


def test_a_copy_by_a_retry(good: Good, victim: Op) -> None:
    assert good.check().counts["duplicates"] == 0
    ends = [o.offset for o in good.stored if (o.topic, o.queue) == (victim.topic, victim.queue)]
    copy = Stored(victim.topic, victim.queue, max(ends) + 1, victim.value, victim.msg_id)
    only(Kind.DOUBLED, replace(good, stored=[*good.stored, copy]), 1)


def test_nobody_got_one(good: Good, victim: Op) -> None:
    planted = good.with_ops(
        lambda op: (
            None if op.f == "poll" and op.group == GROUPS[0] and op.value == victim.value else op
        )
    )
    only(Kind.UNSEEN, planted, 1)
    only(Kind.SKIPPED, planted, 1)


def test_a_committed_one_comes_again(good: Good) -> None:
    look = [op for op in good.ops if op.f == "committed" and op.offset > 20][-1]
    again = Op("late", "invoke", "poll", look.t_ns + 1, group=look.group)
    value = next(
        one.value
        for one in good.stored
        if (one.topic, one.queue, one.offset) == (look.topic, look.queue, 5)
    )
    got = changed(again, type="ok", topic=look.topic, queue=look.queue, offset=5, value=value)
    only(Kind.COMMITTED_AGAIN, replace(good, ops=[*good.ops, again, got]), 1)


def test_something_comes_twice_long_after_everything(good: Good, victim: Op) -> None:
    got = next(op for op in good.ops if op.f == "poll" and op.value == victim.value)
    late = changed(got, t_ns=good.ops[-1].t_ns + 10**12)
    only(Kind.REDELIVERED, replace(good, ops=[*good.ops, late]), 1)


# --- power cuts -----------------------------------------------------------------------------------


def test_a_power_cut_may_take_a_young_tail(good: Good) -> None:
    """The last acknowledged of the log, and only those."""
    rules = Rules(lost_tail_younger_than_ms=1_000)
    ordered = sorted(good.sends(), key=lambda op: op.t_ns)
    queue = ordered[-1].topic, ordered[-1].queue
    gone = ordered[-1].value
    cut = Op("harness", "ok", "power_cut", ordered[-1].t_ns + 1, value="cut all")
    ops = sorted([*good.ops, cut], key=lambda op: op.t_ns)
    stored = [one for one in good.stored if one.value != gone]
    verdict = check(ops, stored, rules)
    assert verdict.counts["taken_by_power_cuts"] == 1, verdict
    assert not verdict.findings[Kind.LOST], (verdict, queue)
    assert check(ops, stored, Rules()).findings[Kind.LOST] == 1
    old = ordered[len(ordered) // 2].value
    stored = [one for one in good.stored if one.value != old]
    assert check(ops, stored, rules).findings[Kind.LOST] == 1


# --- the rest -------------------------------------------------------------------------------------


def test_gaps() -> None:
    acknowledged = [1, 2, 3, 10, 11, 12, 50, 51]
    assert gaps_ms([t * 10**6 for t in acknowledged], [4 * 10**6, 20 * 10**6]) == [7.0, 38.0]


def test_bodies() -> None:
    filler = random.Random(1).randbytes(1000)
    values = {
        value_of(make_body(producer, sequence, size, filler))
        for producer in range(5)
        for sequence in range(5)
        for size in (0, BODY_BYTES_MIN, 100, 700)
    }
    assert len(values) == 5 * 5 * 3
    assert not any(value.startswith(("damaged", "none")) for value in values)
    assert value_of(b"short").startswith("none-5-")
    assert value_of(b"X" * 40).startswith("damaged-")


def test_a_torn_line(tmp_path: Path) -> None:
    history = History.create(tmp_path / "x.jsonl", "x")
    history.invoke("send", topic="t", queue=1, value="v")
    history.close()
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write(b'{"p":"x","type":"in')
    (op,) = read_history(tmp_path / "x.jsonl")
    assert (op.type, op.f, op.topic, op.queue, op.offset) == ("invoke", "send", "t", 1, -1)


def test_a_changed_byte_of_a_real_store_is_seen(tmp_path: Path) -> None:
    """The scan of the store goes through a decoder that knows nothing of CometMQ."""
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t")
        bodies = [make_body(1, sequence, 50, bytes(300)) for sequence in range(10)]
        broker.assert_stored(broker.send("t", 0, bodies))
        assert broker.close() == 0
    assert [one.value for one in stored_in(tmp_path / "store")] == list(map(value_of, bodies))
    path = reference.segment_files(tmp_path / "store" / "commitlog")[0]
    content = bytearray(path.read_bytes())
    content[content.index(bodies[6]) + 30] ^= 1
    path.write_bytes(content)
    assert [one.value for one in stored_in(tmp_path / "store")] == list(map(value_of, bodies[:6]))
