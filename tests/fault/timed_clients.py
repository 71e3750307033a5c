"""Producers of messages for later, of transactions, under a name, and of keys that are stored once,
in processes of their own.

What they add to the history; group is the transaction, the name or the key:

    "schedule"   due_ms: not to be delivered before; by this clock, or, with the note EXACT, as the
                 receipt says
    "recall"     of a value; fail: too late
    "half"       a message of a transaction; group is its id, where that is known
    "decide"     what is to become of a transaction (value "commit" or "rollback"), by whoever came
                 first: the producer, or a checker that was asked; written before it is told
    "end"        of a transaction: value as of "decide"
    "open"       a producer has the name now
    "keyed"      a message with a key; note "duplicate" where the receipt says so
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fault.history import BODY_BYTES_MIN, History, Op, make_body, now_ns, value_of
from fault.workload import END_S, Sender, Spec, Stop, run
from fault.workload import KINDS as SENDING
from patience import patient

from cometmq.client import PendingTransaction, Producer
from cometmq.protocol.errors import (
    CometError,
    ProducerFenced,
    Refused,
    TooLate,
)

MODULE: Final = "fault.timed_clients"
TIMED, TX, NAMED, KEYED = "timed", "tx", "named", "keyed"
EXACT: Final = "exact"
TX_GROUP: Final = "shops"
TX_THREADS: Final = 3
KEYS: Final = 40  # that are sent again and again, for each period
PERIOD: Final = 30.0  # s; then other keys
WINDOW_S: Final = 3600.0
AFTER_S: Final = 2.5  # a message waits for so long, most of them
LONG_S: Final = 8.0  # or, some, for so long
LEVELS_S: Final = (1, 5, 10)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def begun(spec: Spec, stop: Stop, make: Callable[[], Producer]) -> Producer:
    """As a service that is started until it gets going."""
    deadline = time.monotonic() + END_S
    while True:
        try:
            return make()
        except CometError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise
            stop.wait(0.05)


# --- for later ------------------------------------------------------------------------------------


class Scheduling:
    """Sends messages for later, by level and by time, and takes some of them back."""

    def __init__(self, spec: Spec, history: History, producer: Producer) -> None:
        self._sender = Sender(spec, history)
        self._chance, self._history, self._producer = self._sender.chance, history, producer
        self._waiting: list[tuple[Op, str]] = []  # that may be recalled: op, handle

    def turn(self) -> None:
        if self._waiting and self._chance.random() < 0.25:
            self._recall(*self._waiting.pop(self._chance.randrange(len(self._waiting))))
        else:
            self._schedule()

    def _schedule(self) -> None:
        level = self._chance.choice((0, 0, 0, 1, 1, 2))
        most = LONG_S if self._chance.random() < 0.1 else AFTER_S
        after_s = LEVELS_S[level - 1] if level else self._chance.random() * most
        body = self._sender.body()
        op = self._sender.history.op(
            "invoke", "schedule", topic=TIMED, value=value_of(body),
            due_ms=now_ms() + int(after_s * 1000),
        )  # fmt: skip
        self._history.write([op])
        how = {"delay_level": level} if level else {"deliver_after": after_s}
        try:
            receipt = self._producer.send(TIMED, body, **how)  # type: ignore[arg-type]
            due_ms = None if level else receipt.due_ms
        except CometError as error:
            self._end(op, error)
            return
        if due_ms is not None:
            op.due_ms, op.note = due_ms, EXACT
        self._end(op)
        if due_ms is not None and self._chance.random() < 0.3:
            self._waiting.append((op, receipt.recall_handle))

    def _recall(self, op: Op, handle: str) -> None:
        op = Op(op.p, "invoke", "recall", now_ns(), TIMED, value=op.value)
        self._history.write([op])
        try:
            self._producer.recall(handle)
        except CometError as error:
            self._end(op, error)
        else:
            self._end(op)

    def _end(self, op: Op, error: CometError | None = None) -> None:
        op.t_ns, op.type = now_ns(), "ok"
        if error is not None:
            op.type = "fail" if isinstance(error, Refused | TooLate) else "info"
            op.note = f"{type(error).__name__}: {error}"[:200]
        self._history.write([op])


def schedule(spec: Spec, history: History, stop: Stop) -> None:
    with begun(spec, stop, lambda: Producer(spec.name_server, timeout_s=spec.timeout_s)) as each:
        scheduling = Scheduling(spec, history, each)
        while not stop.wait(spec.pace_s):
            scheduling.turn()


# --- transactions ---------------------------------------------------------------------------------


class Decisions:
    """What a database would have: a file for each transaction. Who comes first decides."""

    def __init__(self, folder: Path, history: History) -> None:
        self._folder, self._history = folder / "decisions", history
        self._folder.mkdir(exist_ok=True)

    def decide(self, name: str, commits: bool) -> bool:
        """What is decided; written down before anybody hears of it."""
        path = self._folder / name
        draft = self._folder / f".{os.getpid()}.{threading.get_ident()}"
        draft.write_text("commit" if commits else "rollback")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        word = path.read_text()
        self._history.end("ok", "decide", topic=TX, group=name, value=word)
        return word == "commit"

    def check(self, pending: PendingTransaction) -> bool:
        return self.decide(pending.id, False)


class Transacting:
    """A thread that begins and ends transactions; a few it leaves alone."""

    def __init__(self, spec: Spec, history: History, producer: Producer, thread: int) -> None:
        self._sender = Sender(spec, history)
        self._sender._sequence = thread << 24
        self._chance = random.Random(f"{spec.seed} {spec.number} {thread}")
        self._history, self._producer = history, producer
        self.decisions = Decisions(Path(spec.folder), history)

    def turn(self) -> None:
        tx, bodies = None, [self._sender.body() for _ in range(self._chance.randint(1, 3))]
        ops = [self._begin("half", value_of(bodies[0]))]
        try:
            tx = self._producer.transaction(TX, bodies[0]).__enter__()
            self._end(ops[0], tx.id)
            for body in bodies[1:]:
                ops.append(self._begin("half", value_of(body), tx.id))
                tx.send(TX, body)
                self._end(ops[-1], tx.id)
            commits = self.decisions.decide(tx.id, self._chance.random() < 0.67)
            if self._chance.random() < 0.08:
                self._producer._transactions.open.discard(tx.id)  # as if its process had died
                return
            end = self._begin("end", "commit" if commits else "rollback", tx.id)
            ops.append(end)
            tx.commit() if commits else tx.rollback()
            self._end(end, tx.id)
        except CometError as error:
            op = ops[-1]
            op.t_ns, op.type, op.note = now_ns(), "info", f"{type(error).__name__}: {error}"[:200]
            self._history.write([op])
            if tx is not None and op.f == "half":
                self.decisions.decide(tx.id, False)
                with contextlib.suppress(CometError):
                    tx.rollback()

    def _begin(self, f: str, value: str, name: str = "") -> Op:
        op = Op(self._sender.spec.p, "invoke", f, now_ns(), TX, value=value, group=name)
        self._history.write([op])
        return op

    def _end(self, op: Op, name: str) -> None:
        op.t_ns, op.type, op.group = now_ns(), "ok", name
        self._history.write([op])


def transact(spec: Spec, history: History, stop: Stop) -> None:
    decisions = Decisions(Path(spec.folder), history)
    over = threading.Event()

    def work(thread: int) -> None:
        transacting = Transacting(spec, history, producer, thread)
        while not over.wait(spec.pace_s * TX_THREADS):
            transacting.turn()

    with begun(
        spec, stop,
        lambda: Producer(
            spec.name_server, name=TX_GROUP, checker=decisions.check, timeout_s=spec.timeout_s
        ),
    ) as producer:  # fmt: skip
        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, TX_THREADS + 1)]
        for thread in threads:
            thread.start()
        while not stop.wait(patient(3600)):
            pass
        over.set()
        for thread in threads:
            thread.join()


def check_back(spec: Spec, history: History, stop: Stop) -> None:
    """Nothing but a checker, so that there is one whoever else was killed."""
    decisions = Decisions(Path(spec.folder), history)
    with begun(
        spec, stop, lambda: Producer(spec.name_server, name=TX_GROUP, checker=decisions.check)
    ):
        while not stop.wait(patient(3600)):
            pass


# --- under a name, and once by key ----------------------------------------------------------------


def send_named(spec: Spec, history: History, stop: Stop) -> None:
    """As "single", until another process has the name; then it ends."""
    sender = Sender(spec, history)
    history.invoke("open", group=spec.name)
    make = lambda: Producer(spec.name_server, producer_id=spec.name, timeout_s=spec.timeout_s)  # noqa: E731
    with begun(spec, stop, make) as producer:
        history.end("ok", "open", group=spec.name)
        fenced = False
        while not stop.wait(spec.pace_s):
            if fenced:
                continue  # it has nothing to do any more
            topic, queue = sender.place()
            body = sender.body()
            ops = sender.invoke(topic, queue, [body])
            try:
                receipt = producer.send(topic, body, queue_id=queue)
            except CometError as error:
                sender.failed(ops, error, refused=isinstance(error, Refused | ProducerFenced))
                fenced = isinstance(error, ProducerFenced)
            else:
                sender.ended(ops, [receipt])


def send_keyed(spec: Spec, history: History, stop: Stop) -> None:
    """Each key again and again, as services do that do not know what they had sent. Its body is
    the key's, whoever sends it."""
    chance = random.Random(f"{spec.seed} {spec.number}")
    make = lambda: Producer(  # noqa: E731
        spec.name_server, dedup="keys", dedup_window=WINDOW_S, timeout_s=spec.timeout_s
    )
    with begun(spec, stop, make) as producer:
        while not stop.wait(spec.pace_s):
            number = int(time.monotonic() / PERIOD) * KEYS + chance.randrange(KEYS)
            body = make_body(0, number, BODY_BYTES_MIN + 20, bytes(300))
            op = Op(
                spec.p, "invoke", "keyed", now_ns(), KEYED, value=value_of(body), group=f"k{number}"
            )
            history.write([op])
            try:
                receipt = producer.send(KEYED, body, keys=op.group)
                op.queue, op.offset = receipt.queue_id, receipt.queue_offset
                op.note = "duplicate" if receipt.duplicate else ""
                op.type = "ok"
            except CometError as error:
                op.type = "fail" if isinstance(error, Refused) else "info"
                op.note = f"{type(error).__name__}: {error}"[:200]
            op.t_ns = now_ns()
            history.write([op])


KINDS: Final[dict[str, Callable[[Spec, History, Stop], None]]] = {
    **SENDING,
    "timer": schedule,
    "shop": transact,
    "checker": check_back,
    "named": send_named,
    "keyed": send_keyed,
}


def main() -> None:
    run(KINDS)
