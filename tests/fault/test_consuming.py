"""The short form of the campaign of consuming, and its checker judged: a real history is good, and
each planted fault is found by its name. The long form: python -m tests.fault consuming"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest
from fault.availability import intervals, up_ns
from fault.checker import Kind, Verdict
from fault.consuming import ConsumingRig
from fault.consuming_checker import Copy, check_consuming, copies_in
from fault.consuming_clients import (
    HANDLERS,
    JOBS,
    PICKERS,
    POPPERS,
    STEPPERS,
    STEPS,
    TASKS,
    fails_for_ever,
)
from fault.consuming_work import MEMBERS, ConsumingWork
from fault.history import Op, read_histories
from waiting import until

from cometmq.protocol.names import DLQ_PREFIX, RETRY_PREFIX, pop_retry_topic

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SEED = 31
SESSION_NS = 3 * 10**9


@dataclass(frozen=True)
class Good:
    """A history in which nothing is wrong, and what lies in the log."""

    ops: Sequence[Op]
    copies: Sequence[Copy]

    def check(self) -> Verdict:
        verdict = Verdict()
        check_consuming(verdict, self.ops, self.copies, ConsumingWork.groups())
        return verdict

    def of(self, f: str, type_: str, group: str) -> list[Op]:
        return [op for op in self.ops if (op.f, op.type, op.group) == (f, type_, group)]

    def with_ops(self, change: Callable[[Op], Op | None]) -> Good:
        """`change` returns what stands there instead; None: nothing."""
        ops = [new for op in self.ops if (new := change(op)) is not None]
        return replace(self, ops=sorted(ops, key=lambda op: op.t_ns))

    def with_more(self, *more: Op) -> Good:
        return replace(self, ops=sorted([*self.ops, *more], key=lambda op: op.t_ns))

    def with_copies(self, change: Callable[[Copy], Copy | None]) -> Good:
        copies = [new for copy in self.copies if (new := change(copy)) is not None]
        return replace(self, copies=copies)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Good]:
    """Each kind of fault; what the campaign does again and again."""
    folder = tmp_path_factory.mktemp("consuming")
    with ConsumingRig(folder / "rig", seed=SEED) as rig:
        rig.storm()
        rig.kill("coordinator")
        rig.stop_members(4)
        rig.kill("scheduler")
        rig.restart()
        rig.storm()
        rig.kill("consumer")
        rig.kill("all")
        until(
            lambda: any(map(is_hopeless, read_histories(rig.histories))), says="one fails for ever"
        )
        outcome = rig.finish()
        assert outcome.ok, outcome.verdict
        lines = outcome.tally("consuming", SEED, False)
        assert sum(line.faults for line in lines if line.fault == "stop") == 4
        assert sum(line.faults for line in lines if line.fault == "storm") == 2
        yield Good(read_histories(rig.histories), copies_in(rig.store))


def is_hopeless(op: Op) -> bool:
    return op.f == "handle" and op.topic == JOBS and fails_for_ever(op.value)


def only(kind: Kind, planted: Good, count: int | None = None) -> None:
    """It is found, by this name."""
    verdict = planted.check()
    assert verdict.findings[kind], verdict
    assert count is None or verdict.findings[kind] == count, verdict


def changed(op: Op, **fields: object) -> Op:
    return msgspec.structs.replace(op, **fields)


def test_a_good_history(good: Good) -> None:
    verdict = good.check()
    assert not verdict.findings, verdict
    for group in MEMBERS:
        assert verdict.counts[f"{group} done"] > 50, verdict.counts
    for group in (HANDLERS, POPPERS):
        assert verdict.counts[f"{group} copies"] > 5, verdict.counts
    assert verdict.counts[f"{HANDLERS} dead letters"]
    assert verdict.counts[f"{POPPERS} came back"]
    assert verdict.samples["back_ms"]


# --- planted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [HANDLERS, STEPPERS, POPPERS, PICKERS])
def test_one_is_never_done(group: str, good: Good) -> None:
    f = "ack" if group in (POPPERS, PICKERS) else "handle"
    done = good.of(f, "ok", group)
    value = done[len(done) // 2].value
    ended = [op for op in good.ops if op.value == value and op.f == f and op.group == group]
    planted = good.with_ops(
        lambda op: changed(op, type="fail") if op in ended and op.type == "ok" else op
    )
    only(Kind.UNFINISHED, planted)


def test_a_key_goes_to_two_queues(good: Good) -> None:
    sends = [op for op in good.ops if op.f == "send" and op.type == "ok" and op.group]
    keys = Counter((op.topic, op.group) for op in sends)
    last = next(op for op in reversed(sends) if keys[op.topic, op.group] > 1)
    planted = good.with_ops(lambda op: changed(op, queue=op.queue + 1) if op is last else op)
    only(Kind.MISPLACED, planted, 1)


def test_a_dead_letter_is_gone(good: Good) -> None:
    """With what was made of the same message once more, where that is there."""
    letter = next(copy for copy in good.copies if copy.topic == DLQ_PREFIX + HANDLERS)
    gone = letter.topic, letter.value
    planted = good.with_copies(lambda copy: None if (copy.topic, copy.value) == gone else copy)
    only(Kind.UNFINISHED, planted, 1)


def test_a_dead_letter_had_attempts_left(good: Good) -> None:
    letter = next(copy for copy in good.copies if copy.topic == DLQ_PREFIX + HANDLERS)
    planted = good.with_copies(lambda copy: copy._replace(attempt=2) if copy is letter else copy)
    only(Kind.DEAD_EARLY, planted, 1)


@pytest.mark.parametrize("group", [HANDLERS, POPPERS])
def test_a_copy_counts_anew(group: str, good: Good) -> None:
    """As if the count had been lost: it says what the one before it said."""
    topics = RETRY_PREFIX + group, pop_retry_topic(group, TASKS)
    retry = [each for each in good.copies if each.topic in topics]
    second = next(each for each in retry if each.attempt == 2)
    planted = good.with_copies(lambda copy: copy._replace(attempt=0) if copy is second else copy)
    only(Kind.ATTEMPTS_FELL, planted)


def test_a_delivery_says_less_than_its_record(good: Good) -> None:
    late = next(op for op in good.of("handle", "invoke", HANDLERS) if op.attempt == 1)
    planted = good.with_ops(lambda op: changed(op, attempt=0) if op is late else op)
    only(Kind.ATTEMPTS_FELL, planted)


def test_what_is_committed_comes_again(good: Good) -> None:
    """To a member that came later."""
    looks = [
        op for op in good.of("committed", "ok", HANDLERS) if op.topic == JOBS and op.offset > 3
    ]  # fmt: skip
    look = looks[len(looks) // 2]
    old = next(
        op for op in good.of("handle", "invoke", HANDLERS)
        if (op.topic, op.queue, op.offset) == (look.topic, look.queue, look.offset - 2)
    )  # fmt: skip
    epoch = max(op.epoch for op in good.of("handle", "invoke", HANDLERS)) + 1
    end_ns = good.ops[-1].t_ns
    join = Op("late", "ok", "join", end_ns + 1, group=HANDLERS)
    again = changed(old, p="late", t_ns=end_ns + 2, epoch=epoch)
    ended = changed(again, t_ns=end_ns + 3, type="ok")
    only(Kind.DONE_AGAIN, good.with_more(join, again, ended), 1)


def handled_in_order(good: Good) -> list[Op]:
    """Calls for messages of one queue in order, by time."""
    calls = [op for op in good.of("handle", "invoke", STEPPERS) if op.topic == STEPS]
    return [op for op in calls if op.queue == calls[0].queue]


def handled_once_more(good: Good, *between: str) -> Good:
    """By the same member, under the same epoch, at once; behind these faults."""
    ended = [op for op in good.of("handle", "ok", STEPPERS) if op.topic == STEPS]
    done = ended[len(ended) // 2]
    place = done.p, done.topic, done.queue, done.offset
    call = max(
        (op for op in good.of("handle", "invoke", STEPPERS)
         if op.t_ns <= done.t_ns and (op.p, op.topic, op.queue, op.offset) == place),
        key=lambda op: op.t_ns,
    )  # fmt: skip
    faults = [Op("harness", "ok", "fault", done.t_ns + 1, value=each) for each in between]
    again = changed(call, t_ns=done.t_ns + 2), changed(done, t_ns=done.t_ns + 3)
    return good.with_more(*faults, *again)


def test_a_queue_goes_back_under_the_same_epoch(good: Good) -> None:
    only(Kind.OUT_OF_ORDER, handled_once_more(good), 1)
    only(Kind.OUT_OF_ORDER, handled_once_more(good, "kill scheduler"), 1)


@pytest.mark.parametrize("fault", ["kill coordinator", "kill coordinator at.a.point", "kill all"])
def test_a_member_has_a_queue_again_that_it_was_giving_up(good: Good, fault: str) -> None:
    verdict = handled_once_more(good, fault).check()
    assert not verdict.findings, verdict


def test_a_queue_goes_on_with_another_message(good: Good) -> None:
    calls = handled_in_order(good)
    skipped = calls[len(calls) // 2]
    planted = good.with_ops(
        lambda op: None
        if op.f == "handle" and op.group == STEPPERS
        and (op.topic, op.queue, op.offset) == (skipped.topic, skipped.queue, skipped.offset)
        else op
    )  # fmt: skip
    only(Kind.OUT_OF_ORDER, planted)


def test_two_at_a_time(good: Good) -> None:
    """Two members that both say to own the queue, under one epoch."""
    calls = handled_in_order(good)
    first, second = next(
        (one, two) for one, two in itertools.pairwise(calls) if one.epoch == two.epoch
    )
    other = changed(second, p="another", t_ns=first.t_ns + 1)
    planted = good.with_more(other, changed(other, t_ns=second.t_ns, type="ok"))
    only(Kind.OVERLAP, planted)


def test_a_member_goes_on_although_it_has_lost_the_queue(good: Good) -> None:
    """Without having stood still: then it could have known."""
    calls = handled_in_order(good)
    newer = calls[len(calls) // 2]
    taken = good.with_ops(  # by somebody, in the middle
        lambda op: changed(op, epoch=op.epoch + 1_000)
        if op.f == "handle" and op.group == STEPPERS and op.t_ns >= newer.t_ns
        and (op.topic, op.queue) == (newer.topic, newer.queue)
        else op
    )  # fmt: skip
    assert not taken.check().findings
    late = changed(calls[0], p="awake", t_ns=newer.t_ns + 1)
    ended = changed(late, t_ns=newer.t_ns + 2, type="ok")
    only(Kind.FENCED, taken.with_more(late, ended), 1)
    stood = Op("awake", "info", "stall", newer.t_ns + 1, since_ns=newer.t_ns - SESSION_NS)
    assert not taken.with_more(late, ended, stood).check().findings[Kind.FENCED]
    more = changed(late, t_ns=newer.t_ns + 3, offset=late.offset + 1)
    more_ended = changed(more, t_ns=newer.t_ns + 4, type="ok")
    only(Kind.FENCED, taken.with_more(late, ended, stood, more, more_ended), 1)


def test_the_work_of_a_fenced_member_does_not_count(good: Good) -> None:
    """What it ended after another one had the queue is done again; here it is not."""
    calls = [op for op in good.of("handle", "invoke", STEPPERS) if op.topic == STEPS]
    ends = {
        (op.p, op.queue, op.offset): op for op in good.ops
        if op.f == "handle" and op.type == "ok" and op.group == STEPPERS
    }  # fmt: skip
    values = [op.value for op in calls]
    first, second = next(
        (one, two) for one, two in itertools.pairwise(calls)
        if one.queue == two.queue and values.count(one.value) == 1
        and (one.p, one.queue, one.offset) in ends
    )  # fmt: skip
    end = ends[first.p, first.queue, first.offset]
    usurper = changed(second, p="usurper", epoch=second.epoch + 1_000, t_ns=first.t_ns + 1)
    planted = good.with_ops(lambda op: changed(op, t_ns=first.t_ns + 2) if op is end else op)
    only(Kind.UNFINISHED, planted.with_more(usurper))


def test_a_popped_message_is_given_out_twice(good: Good) -> None:
    pops = good.of("pop", "ok", POPPERS)
    acked = {(op.topic, op.queue, op.offset): op for op in good.of("ack", "ok", POPPERS)}
    pop = next(op for op in pops if (op.topic, op.queue, op.offset) in acked)
    ack_ns = acked[pop.topic, pop.queue, pop.offset].t_ns
    asked = Op("other", "invoke", "pop", ack_ns + 1, group=POPPERS)
    again = changed(pop, p="other", t_ns=ack_ns + 2)
    only(Kind.DONE_AGAIN, good.with_more(asked, again), 1)


def test_one_is_popped_in_order_before_its_turn(good: Good) -> None:
    pops = [op for op in good.of("pop", "ok", PICKERS) if op.queue == 0]
    first = min(pops, key=lambda op: op.offset)
    later = next(op for op in pops if op.offset > first.offset + 32)
    asked = Op("eager", "invoke", "pop", first.t_ns - 2, group=PICKERS)
    eager = changed(later, p="eager", t_ns=first.t_ns - 1)
    only(Kind.OUT_OF_ORDER, good.with_more(asked, eager))


def test_one_is_popped_in_order_while_another_is_out(good: Good) -> None:
    first = next(op for op in good.of("pop", "ok", PICKERS))
    asked = Op("eager", "invoke", "pop", first.t_ns, group=PICKERS)
    again = changed(first, p="eager", t_ns=first.t_ns + 1)
    only(Kind.HELD_TWICE, good.with_more(asked, again))


def test_what_is_popped_in_order_comes_again_or_by_the_retry_topic(good: Good) -> None:
    acked = good.of("ack", "ok", PICKERS)[0]
    pop = next(
        op for op in good.of("pop", "ok", PICKERS)
        if (op.queue, op.offset) == (acked.queue, acked.offset)
    )  # fmt: skip
    asked = Op("other", "invoke", "pop", acked.t_ns + 1, group=PICKERS)
    again = changed(pop, p="other", t_ns=acked.t_ns + 2)
    only(Kind.DONE_AGAIN, good.with_more(asked, again), 1)
    copy = Copy(RETRY_PREFIX + PICKERS, 0, 0, pop.value, 1, good.copies[-1].stored_ms)
    only(Kind.OUT_OF_ORDER, replace(good, copies=[*good.copies, copy]), 1)


def test_the_count_of_what_is_popped_in_order_falls(good: Good) -> None:
    pops = good.of("pop", "ok", PICKERS)
    # Of some the first time is not in the history: the answer was lost.
    known = {(op.queue, op.offset) for op in pops if op.attempt == 1}
    late = next(op for op in pops if op.attempt == 2 and (op.queue, op.offset) in known)
    planted = good.with_ops(lambda op: changed(op, attempt=0) if op is late else op)
    only(Kind.ATTEMPTS_FELL, planted)


def silent_pop(good: Good) -> tuple[Op, Copy]:
    """A popped message of which nobody said a word, and what came of it."""
    said = {
        (op.p, op.topic, op.queue, op.offset) for op in good.ops
        if op.f in ("ack", "nack", "extend")
    }  # fmt: skip
    for op in good.of("pop", "ok", POPPERS):
        if (op.p, op.topic, op.queue, op.offset) in said:
            continue
        copies = [
            copy for copy in good.copies
            if copy.value == op.value and copy.attempt == op.attempt + 1
            and copy.topic in (pop_retry_topic(POPPERS, TASKS), DLQ_PREFIX + POPPERS)
        ]  # fmt: skip
        if len(copies) == 1:
            return op, copies[0]
    pytest.fail("nobody has forgotten a message")


def test_a_popped_message_is_given_out_while_it_is_invisible(good: Good) -> None:
    pop, _ = silent_pop(good)
    asked = Op("other", "invoke", "pop", pop.t_ns + 1, group=POPPERS)
    again = changed(pop, p="other", t_ns=pop.t_ns + 2)
    only(Kind.HELD_TWICE, good.with_more(asked, again), 1)


def test_a_popped_message_is_back_late_and_early(good: Good) -> None:
    pop, copy = silent_pop(good)
    planted = good.with_copies(
        lambda each: each._replace(stored_ms=pop.due_ms - 300) if each is copy else each
    )
    only(Kind.BACK_EARLY, planted, 1)
    # Later than the broker can have been away, all in all.
    away_ms = sum(end - begin for begin, end in intervals(good.ops) if end < 2**62) // 10**6
    planted = good.with_copies(
        lambda each: each._replace(stored_ms=pop.due_ms + 1_100 + away_ms) if each is copy else each
    )
    only(Kind.BACK_LATE, planted, 1)


def test_a_word_that_counts_though_its_repeat_is_refused(good: Good) -> None:
    """The answer to the first one was lost: then it is too late, and the message is there again."""
    pop, copy = silent_pop(good)
    planted = good.with_copies(
        lambda each: each._replace(stored_ms=pop.due_ms - 300) if each is copy else each
    )
    begun = changed(pop, type="invoke", f="nack", t_ns=pop.t_ns + 1)
    refused = changed(pop, type="fail", f="nack", t_ns=pop.t_ns + 10**10)
    verdict = planted.with_more(begun, refused).check()
    assert not verdict.findings[Kind.BACK_EARLY], verdict
    late = changed(begun, t_ns=pop.t_ns + 10**10 - 1)
    only(Kind.BACK_EARLY, planted.with_more(late, refused), 1)


def test_time_without_a_broker_does_not_count() -> None:
    ops = [
        Op("harness", "ok", "fault", 100, value="kill all"),
        Op("harness", "ok", "fault", 150, value="kill all"),
        Op("harness", "ok", "healed", 200),
        Op("harness", "ok", "fault", 250, value="stop members"),
        Op("availability", "info", "away", 330, since_ns=300),
        Op("availability", "info", "away", 120, since_ns=90),
    ]
    away = intervals(ops)
    assert away == [(90, 200), (300, 330)]
    assert up_ns(away, 0, 400) == 400 - 110 - 30
    assert up_ns(away, 100, 200) == 0
    assert up_ns(away, 195, 310) == 100
    assert up_ns(away, 210, 220) == 10
