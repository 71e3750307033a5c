"""Members of groups, as people write them, in processes of their own: handlers, handlers in order,
groups without queues, broadcasting.

What they add to the history:

    "handle"   a handler was called (invoke), and returned (ok) or raised (fail; note "dead" if it
               asked for the dead letters); topic, queue and offset are where the message lies
    "pop"      an invoke a call, an ok a message; due_ms: it is invisible until then
    "ack", "nack", "extend"   of a popped message; fail: the broker refused, it came too late

Which deliveries fail follows from a message's number, so that its outcome can be told beforehand.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fault.history import History, Op, now_ns, value_of
from fault.workload import KINDS as SENDING
from fault.workload import Sender, Spec, Stop, run, subscribe
from inside import ownership_of
from patience import patient

from cometmq.client import Consumer, Message, PopConsumer, Producer, Reject, Retry
from cometmq.client.popping.broker import taken_of
from cometmq.protocol.errors import CometError, HandleUnknown, Refused

MODULE: Final = "fault.consuming_clients"
JOBS, STEPS, TASKS, PICKS, NEWS = "jobs", "steps", "tasks", "picks", "news"
HANDLERS, STEPPERS, POPPERS, SCREENS = "handlers", "steppers", "poppers", "screens"
PICKERS = "pickers"  # as poppers, in order
TIMES_MAX: Final = 3  # that a message comes again, before it is a dead letter
CONCURRENCY: Final = 4
WORK_S: Final = 0.004  # of a handler, at most
KEYS: Final = 24  # that the messages of one producer have
INVISIBLE_S: Final = 2.0
MORE_S: Final = 2.0  # by which it is extended now and then
STALL_NS: Final = 150_000_000  # a process that did not run for so long says so
STALL_LOOK_S: Final = 0.03


def number_of(value: str) -> int:
    """The sequence number of what was sent."""
    return int(value.rsplit("-", 2)[1])


def fails_for_ever(value: str) -> bool:
    return number_of(value) % 101 == 0


def fails(value: str, attempt: int) -> bool:
    """Every 7th raises twice, every 101st for ever."""
    return fails_for_ever(value) or (number_of(value) % 7 == 0 and attempt < 2)


@contextlib.contextmanager
def watching_itself(spec: Spec, history: History) -> Iterator[None]:
    """It is written down when the process did not run for a while: stopped, or starved."""
    over = threading.Event()

    def look() -> None:
        before = now_ns()
        while not over.wait(STALL_LOOK_S):
            now = now_ns()
            if now - before > STALL_NS:
                history.write([Op(spec.p, "info", "stall", now, since_ns=before)])
            before = now

    thread = threading.Thread(target=look, name="stalls")
    thread.start()
    try:
        history.end("ok", "join", group=spec.group)
        yield
        history.end("ok", "leave", group=spec.group)
    finally:
        over.set()
        thread.join()


# --- an order of keys -----------------------------------------------------------------------------


def send_by_key(spec: Spec, history: History, stop: Stop) -> None:
    """Messages of one key go to one queue; `group` is the key in the history."""
    sender = Sender(spec, history)
    with Producer(spec.name_server, timeout_s=spec.timeout_s) as producer:
        while not stop.wait(spec.pace_s):
            topic, _ = sender.place()
            key = f"k{sender.chance.randrange(KEYS)}"
            body = sender.body()
            (op,) = sender.invoke(topic, -1, [body])
            try:
                receipt = producer.send(topic, body, ordering_key=key)
            except CometError as error:
                sender.failed([op], error, refused=isinstance(error, Refused))
            else:
                op.group = key
                sender.ended([op], [receipt])


# --- handlers -------------------------------------------------------------------------------------


class Handler:
    """Writes down that it was called, works for a moment, and fails by rule."""

    def __init__(self, spec: Spec, history: History, consumer: Consumer, *, orderly: bool) -> None:
        self._spec, self._history, self._consumer = spec, history, consumer
        self._orderly = orderly
        self._chance = random.Random(f"{spec.seed} {spec.number}")

    def __call__(self, message: Message) -> None:
        value, attempt = value_of(message.body), message.reconsume_times
        op = Op(
            self._spec.p, "invoke", "handle", now_ns(), message.stored_topic, message.queue_id,
            message.queue_offset, value, self._spec.group, attempt=attempt,
            epoch=ownership_of(self._consumer, message),
        )  # fmt: skip
        self._history.write([op])
        time.sleep(self._chance.random() ** 2 * WORK_S)  # the work
        op.t_ns = now_ns()
        if not fails(value, attempt):
            op.type = "ok"
            self._history.write([op])
            return
        op.type = "fail"
        if self._orderly and fails_for_ever(value):
            op.note = "dead"
            self._history.write([op])
            raise Reject("for ever")
        self._history.write([op])
        raise Retry(after=0)


def handle(spec: Spec, history: History, stop: Stop) -> None:
    run_handlers(spec, history, stop, orderly=False)


def handle_in_order(spec: Spec, history: History, stop: Stop) -> None:
    run_handlers(spec, history, stop, orderly=True)


def run_handlers(spec: Spec, history: History, stop: Stop, *, orderly: bool) -> None:
    with (
        watching_itself(spec, history),
        Consumer(
            spec.name_server, spec.group, auto_commit_ms=100, transport=spec.transport,
            max_reconsume_times=None if orderly else TIMES_MAX,
        ) as consumer,
    ):  # fmt: skip
        for topic in spec.topics:
            subscribe(consumer, topic)

        def close_at_the_end() -> None:
            while not stop.wait(patient(3600)):
                pass
            consumer.close()

        threading.Thread(target=close_at_the_end, daemon=True).start()
        handler = Handler(spec, history, consumer, orderly=orderly)
        consumer.run(handler, concurrency=CONCURRENCY, orderly=orderly, suspend_s=0.05)


# --- without queues -------------------------------------------------------------------------------


class Popper:
    """Pops, and says of each message by itself what becomes of it; of some, never a word."""

    def __init__(self, spec: Spec, history: History, consumer: PopConsumer) -> None:
        self._spec, self._history, self._consumer = spec, history, consumer
        self._chance = random.Random(f"{spec.seed} {spec.number}")

    def turn(self) -> None:
        self._history.invoke("pop", group=self._spec.group)
        messages = self._consumer.poll(self._chance.randint(1, 16), 0.2)
        popped = [(message, self._popped(message)) for message in messages]
        self._history.write([op for _, op in popped])
        for message, op in popped:
            self._deal_with(message, op, [each for each, _ in popped])

    def _popped(self, message: Message) -> Op:
        return Op(
            self._spec.p, "ok", "pop", now_ns(), message.stored_topic, message.queue_id,
            message.queue_offset, value_of(message.body), self._spec.group,
            attempt=message.reconsume_times, due_ms=taken_of(message).popped.until_ms,
        )  # fmt: skip

    def _deal_with(self, message: Message, op: Op, beside: Sequence[Message]) -> None:
        time.sleep(self._chance.random() ** 2 * WORK_S)  # the work
        what = self._chance.random()
        if what < 0.03:
            return  # it forgets
        if what < 0.08:
            self._extend(message, beside)
        if fails(op.value, op.attempt):
            self._ask("nack", [op], lambda: self._consumer.nack(message, 0))
        else:
            self._ask("ack", [op], lambda: self._consumer.ack(message))

    def _extend(self, message: Message, beside: Sequence[Message]) -> None:
        """With it, its neighbours in the queue have more time."""
        taken = taken_of(message)
        ops = [self._popped(each) for each in beside if taken_of(each) is taken]
        for op in ops:
            op.due_ms = time.time_ns() // 1_000_000 + round(MORE_S * 1000)
        self._ask("extend", ops, lambda: self._consumer.extend(message, MORE_S))

    def _ask(self, f: str, ops: Sequence[Op], call: Callable[[], object]) -> None:
        def write(type_: str, note: str = "") -> None:
            now = now_ns()
            for op in ops:
                op.type, op.f, op.t_ns, op.note = type_, f, now, note  # type: ignore[assignment]
            self._history.write(ops)

        write("invoke")
        try:
            call()
        except HandleUnknown:
            write("fail", "too late")
        except CometError as error:
            write("info", f"{type(error).__name__}: {error}"[:200])
        else:
            write("ok")


class Picker(Popper):
    """The same in order: a queue's messages one after the other, up to the first that fails."""

    def turn(self) -> None:
        self._history.invoke("pop", group=self._spec.group)
        messages = self._consumer.poll(self._chance.randint(1, 16), 0.2)
        popped = [(message, self._popped(message)) for message in messages]
        self._history.write([op for _, op in popped])
        over: set[int] = set()  # queues
        for message, op in popped:
            if message.queue_id not in over:
                self._deal_with(message, op, messages)
                if op.f != "ack":
                    over.add(message.queue_id)


def pop(spec: Spec, history: History, stop: Stop) -> None:
    pop_by(Popper, spec, history, stop, orderly=False)


def pick(spec: Spec, history: History, stop: Stop) -> None:
    pop_by(Picker, spec, history, stop, orderly=True)


def pop_by(kind: type[Popper], spec: Spec, history: History, stop: Stop, *, orderly: bool) -> None:
    with watching_itself(spec, history):
        while not stop.wait(0):
            with contextlib.suppress(CometError):
                with PopConsumer(
                    spec.name_server, spec.group, spec.topics[0],
                    orderly=orderly, invisible_s=INVISIBLE_S, max_reconsume_times=TIMES_MAX,
                    timeout_s=patient(5),
                ) as consumer:  # fmt: skip
                    popper = kind(spec, history, consumer)
                    while not stop.wait(0):
                        popper.turn()
                continue
            stop.wait(0.05)


# --- broadcasting ---------------------------------------------------------------------------------


def show(spec: Spec, history: History, stop: Stop) -> None:
    """A member that gets everything; `group` is its own name in the history."""
    with (
        watching_itself(spec, history),
        Consumer(
            spec.name_server, SCREENS, broadcast=spec.folder, member=spec.name,
            transport=spec.transport,
        ) as consumer,
    ):  # fmt: skip
        for topic in spec.topics:
            subscribe(consumer, topic)
        while not stop.wait(0):
            history.invoke("poll", group=spec.group)
            messages = consumer.poll(256, 0.1)
            t_ns = now_ns()
            history.write(
                Op(
                    spec.p, "ok", "poll", t_ns, each.topic, each.queue_id, each.queue_offset,
                    value_of(each.body), spec.group, each.msg_id,
                )
                for each in messages
            )  # fmt: skip
            consumer.ack(messages)


KINDS: Final[dict[str, Callable[[Spec, History, Stop], None]]] = {
    **SENDING,
    "by-key": send_by_key,
    "handler": handle,
    "stepper": handle_in_order,
    "popper": pop,
    "picker": pick,
    "screen": show,
}


def main() -> None:
    run(KINDS)
