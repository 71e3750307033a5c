"""Client processes: real producers and consumers that write down what they saw.

    with Workload(name_server, folder, seed=1) as work:      # starts them
        ...faults...
        work.finish(read_ends)                               # producers end, consumers drain, end

Each child is this module's `main` with its Spec as one argument. It works until its standard input
ends. Nothing in here gives up because the broker is away: a client that cannot ride that out
is a bug.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import forked
import msgspec
from fault.history import BODY_BYTES_MIN, History, Op, make_body, now_ns, value_of
from patience import patient

from cometmq.client import Admin, Consumer, Message, Producer
from cometmq.client.sending.receipt import Receipt
from cometmq.protocol.errors import CometError, Refused

MODULE: Final = "fault.workload"
TOPICS: Final = ("alpha", "beta")
GROUPS: Final = ("billing", "audit")
QUEUES: Final = 4
TOO_LARGE: Final = (256 << 10) + 1  # for a broker with family.SMALL: refused, it must not appear
DRAIN_S: Final = patient(60)
END_S: Final = patient(40)


class Spec(msgspec.Struct, omit_defaults=True):
    """What one child is to do.

    Args:
        module: whose KINDS has its kind, and whose `main` it runs.
        kind: "single" (sends one by one), "impatient" (with a short time-out, so that outcomes
            stay unknown), "linger" (shares batches), "batch" (send_many), "consumer", "watcher"
            (looks at the committed offsets).
        number: unique over the whole history: it is in the bodies.
        pace_s: pause between two rounds.
        transport: of consumers, see Consumer: who maps a store keeps its disk from being unmounted.
        groups: whose progress a watcher looks at.
        name: of a member or a producer that goes on under it when its process was killed.
    """

    kind: str
    number: int
    name_server: str
    folder: str
    seed: int = 0
    topics: tuple[str, ...] = TOPICS
    queues: int = QUEUES
    group: str = ""
    timeout_s: float = patient(30.0)
    pace_s: float = 0.002
    size_max: int = 150_000
    transport: str = "auto"
    module: str = MODULE
    groups: tuple[str, ...] = GROUPS
    name: str = ""

    @property
    def p(self) -> str:
        return f"{self.kind}-{self.number}"


# --- the harness's end ----------------------------------------------------------------------------


class Child:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.log = Path(spec.folder) / f"{spec.p}.log"
        with self.log.open("ab") as log:
            told = [msgspec.json.encode(spec).decode()]
            module = spec.module
            self._process = forked.fork(module, log.fileno(), os.environ, told, imported=module)
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def stop(self) -> None:
        """Ask it to end; see `wait`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, timeout_s: float = END_S) -> None:
        """Raises AssertionError with its log if it did not end well."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            status = None
        self._close()
        if status != 0:
            text = self.log.read_text(errors="replace")[-4000:]
            raise AssertionError(f"{self.spec.p} ended with {status}:\n{text}")

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Workload:
    """All client processes of a run, and the harness's own history.

    Args:
        folder: for the histories (*.jsonl) and what the children had to say (*.log).
        producers, groups, members: which children; `first` may have more before they are started.
    """

    def __init__(
        self,
        name_server: str,
        folder: Path,
        *,
        seed: int = 0,
        producers: Sequence[str] = ("single", "impatient", "linger", "batch"),
        groups: Sequence[str] = GROUPS,
        members: int = 2,
        watch: bool = True,
        pace_s: float = 0.002,
        transport: str = "auto",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.groups = folder, tuple(groups)
        self.name_server = name_server
        self.history = History.create(folder / "harness.jsonl", "harness")
        self._seed, self._pace_s, self._transport = seed, pace_s, transport
        self._count = 0
        self.first = [self.spec(kind) for kind in producers]
        self.first += [self.spec("consumer", group) for group in groups for _ in range(members)]
        self.first += [self.spec("watcher")] * watch
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        for spec in self.first:
            self.start(spec)
        return self

    def spec(self, kind: str, group: str = "") -> Spec:
        return Spec(
            kind,
            0,
            self.name_server,
            str(self.folder),
            seed=self._seed,
            group=group,
            timeout_s=0.7 if kind == "impatient" else patient(30.0),
            pace_s=self._pace_s,
            transport=self._transport,
        )

    def start(self, spec: Spec) -> Child:
        """One more; its number is drawn."""
        self._count += 1
        child = Child(msgspec.structs.replace(spec, number=self._count))
        self.children.append(child)
        return child

    def of_kind(self, *kinds: str) -> list[Child]:
        return [child for child in self.children if child.spec.kind in kinds]

    @property
    def producers(self) -> list[Child]:
        return [c for c in self.children if not c.spec.group and c.spec.kind != "watcher"]

    @property
    def consumers(self) -> list[Child]:
        return [child for child in self.children if child.spec.group]

    def replace(self, child: Child) -> Child:
        """kill -9 of a client; another takes its place under a name of its own."""
        kind = "consumer" if child in self.consumers else "producer"
        self.fault("kill", f"{kind} {child.spec.p}")
        self.children.remove(child)
        child.kill()
        return self.start(child.spec)

    def fault(self, what: str, target: str, point: str = "", *, f: str = "fault") -> None:
        """Write it down, before it is done."""
        self.history.end("ok", f, value=f"{what} {target}", note=point)

    def read(self, topic: str, queue: int, messages: Sequence[Message]) -> None:
        """The harness has read these itself."""
        t_ns = now_ns()
        self.history.write(
            Op("harness", "ok", "read", t_ns, topic, queue, each.queue_offset, value_of(each.body))
            for each in messages
        )

    def refused(self) -> int:
        """How many messages the broker has refused so far."""
        files = self.folder.glob("single-*.jsonl")
        return sum(path.read_bytes().count(b'"type":"fail"') for path in files)

    def check_alive(self) -> None:
        for child in self.children:
            if not child.alive:
                child.wait()
                raise AssertionError(f"{child.spec.p} ended by itself")

    def stop_producers(self) -> None:
        """Each flushes what it has, and ends."""
        self.stop(self.producers)

    def drain(self, ends: Mapping[tuple[str, int], int], timeout_s: float = DRAIN_S) -> None:
        """Until each group has committed everything, so has got everything."""
        deadline = time.monotonic() + timeout_s
        with Admin(self.name_server) as admin:
            while behind := self._behind(admin, ends):
                self.check_alive()
                assert time.monotonic() < deadline, f"not drained after {timeout_s:g} s: {behind}"
                time.sleep(0.05)  # nothing tells of a commit

    def _behind(self, admin: Admin, ends: Mapping[tuple[str, int], int]) -> list[str]:
        behind = []
        for group in self.groups:
            for topic in sorted({topic for topic, _ in ends}):
                found = committed(admin, group, topic)
                behind += [
                    f"{group} {topic}/{queue}: {found.get(queue, -1)} of {end}"
                    for (each, queue), end in ends.items()
                    if each == topic and end and found.get(queue, -1) < end
                ]
        return behind

    def finish(self, read_ends: Callable[[], Mapping[tuple[str, int], int]]) -> None:
        """Producers end, groups drain up to what `read_ends` then says, consumers end."""
        self.stop_producers()
        self.drain(read_ends())
        self.stop(self.children)

    def stop(self, children: Sequence[Child]) -> None:
        """These end in order, all at a time."""
        children = list(children)
        for child in children:
            child.stop()
            self.children.remove(child)
        for child in children:
            child.wait()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for child in self.children:
            child.kill()
        self.history.close()


def committed(admin: Admin, group: str, topic: str) -> dict[int, int]:
    try:
        return {queue: at for (_, queue), at in admin.committed(group, topic).items()}
    except CometError:
        return {}  # the broker is away, or does not know the group yet


# --- the children ---------------------------------------------------------------------------------


class Stop:
    """The end of standard input."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has come; sleeps at most so long."""
        return bool(select.select([0], [], [], timeout_s)[0])


class Sender:
    """What the producers have in common: bodies, places, and the lines of the history."""

    def __init__(self, spec: Spec, history: History) -> None:
        self.spec, self.history = spec, history
        self.chance = random.Random(f"{spec.seed} {spec.number}")
        self._filler = self.chance.randbytes(spec.size_max + 300)
        self._sequence = 0

    def body(self) -> bytes:
        self._sequence += 1
        most = (BODY_BYTES_MIN, 200, 4_000, 32_000, self.spec.size_max)
        (limit,) = self.chance.choices(most, (20, 60, 16, 3, 1))
        size = self.chance.randint(BODY_BYTES_MIN, limit)
        return make_body(self.spec.number, self._sequence, size, self._filler)

    def too_large(self) -> bytes:
        """What the broker surely refuses."""
        self._sequence += 1
        return make_body(self.spec.number, self._sequence, BODY_BYTES_MIN, b"") + bytes(TOO_LARGE)

    def place(self) -> tuple[str, int]:
        return self.chance.choice(self.spec.topics), self.chance.randrange(self.spec.queues)

    def invoke(self, topic: str, queue: int, bodies: Sequence[bytes]) -> list[Op]:
        t_ns = now_ns()
        ops = [
            Op(self.spec.p, "invoke", "send", t_ns, topic, queue, value=value_of(body))
            for body in bodies
        ]
        self.history.write(ops)
        return ops

    def ended(self, ops: Sequence[Op], receipts: Sequence[Receipt]) -> None:
        t_ns = now_ns()
        self.history.write(
            Op(
                op.p, "ok", "send", t_ns, op.topic, receipt.queue_id, receipt.queue_offset,
                op.value, op.group, receipt.msg_id,
            )
            for op, receipt in zip(ops, receipts, strict=True)
        )  # fmt: skip

    def failed(self, ops: Sequence[Op], error: CometError, *, refused: bool) -> None:
        t_ns, type_ = now_ns(), "fail" if refused else "info"
        note = f"{type(error).__name__}: {error}"[:200]
        self.history.write(
            Op(op.p, type_, "send", t_ns, op.topic, op.queue, value=op.value, note=note)  # type: ignore[arg-type]
            for op in ops
        )


def send_single(spec: Spec, history: History, stop: Stop) -> None:
    sender = Sender(spec, history)
    with Producer(spec.name_server, timeout_s=spec.timeout_s) as producer:
        while not stop.wait(spec.pace_s):
            topic, queue = sender.place()
            body = sender.too_large() if sender.chance.random() < 0.002 else sender.body()
            keys = f"k{sender.chance.randrange(100)}" if sender.chance.random() < 0.2 else None
            ops = sender.invoke(topic, queue, [body])
            try:
                receipt = producer.send(topic, body, queue_id=queue, keys=keys)
            except CometError as error:
                sender.failed(ops, error, refused=isinstance(error, Refused))
            else:
                sender.ended(ops, [receipt])


def send_lingering(spec: Spec, history: History, stop: Stop) -> None:
    """Bursts over all queues; a burst's receipts are looked at when the next one is under way."""
    sender = Sender(spec, history)
    under_way: deque[tuple[Op, Receipt]] = deque()

    def settle(count: int) -> None:
        while len(under_way) > count:
            op, receipt = under_way.popleft()
            try:
                sender.ended([op], [receipt.wait()])
            except CometError as error:
                sender.failed([op], error, refused=isinstance(error, Refused))

    with Producer(spec.name_server, linger_ms=2, timeout_s=spec.timeout_s) as producer:
        while not stop.wait(spec.pace_s * 10):
            before = len(under_way)
            for _ in range(sender.chance.randint(1, 20)):
                topic, queue = sender.place()
                body = sender.body()
                (op,) = sender.invoke(topic, queue, [body])
                try:
                    under_way.append((op, producer.send(topic, body, queue_id=queue)))
                except CometError as error:
                    sender.failed([op], error, refused=isinstance(error, Refused))
            settle(len(under_way) - before)
        settle(0)
        with contextlib.suppress(CometError):
            producer.flush()  # it raises again what was written down above


def send_batches(spec: Spec, history: History, stop: Stop) -> None:
    sender = Sender(spec, history)
    with Producer(spec.name_server, timeout_s=spec.timeout_s) as producer:
        while not stop.wait(spec.pace_s * 10):
            topic, queue = sender.place()
            bodies = [sender.body() for _ in range(sender.chance.randint(2, 30))]
            ops = sender.invoke(topic, queue, bodies)
            try:
                receipts = producer.send_many(topic, bodies, queue_id=queue)
            except CometError as error:
                sender.failed(ops, error, refused=False)  # which of them are stored is not told
            else:
                sender.ended(ops, list(receipts))


def consume(spec: Spec, history: History, stop: Stop) -> None:
    """Poll, write down, acknowledge; a commit of one's own now and then."""
    chance = random.Random(f"{spec.seed} {spec.number}")
    group = spec.group
    history.end("ok", "join", group=group)
    known: list[tuple[str, str, int]] = []
    with Consumer(
        spec.name_server, group, auto_commit_ms=100, transport=spec.transport
    ) as consumer:
        for topic in spec.topics:
            subscribe(consumer, topic)
        while not stop.wait(spec.pace_s):
            history.invoke("poll", group=group)
            messages = consumer.poll(256, 0.1)
            t_ns = now_ns()
            history.write(
                Op(
                    spec.p, "ok", "poll", t_ns, each.topic, each.queue_id, each.queue_offset,
                    value_of(each.body), group, each.msg_id,
                )
                for each in messages
            )  # fmt: skip
            consumer.ack(messages)
            if known != (owned := consumer.assignment):
                known = owned
                names = " ".join(f"{topic}/{queue}" for _, topic, queue in owned)
                history.end("ok", "assign", group=group, value=names)
            if chance.random() < 0.02:
                with contextlib.suppress(CometError):
                    consumer.commit()
    history.end("ok", "leave", group=group)


def subscribe(consumer: Consumer, topic: str) -> None:
    """As a service that is restarted until it gets going: a name server that was itself restarted
    a moment ago knows no broker yet, and says so at once."""
    deadline = time.monotonic() + END_S
    while True:
        try:
            return consumer.subscribe(topic)
        except CometError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # nothing tells when it knows one


def watch(spec: Spec, history: History, stop: Stop) -> None:
    """Look at the committed offsets, which may only grow."""
    with Admin(spec.name_server, timeout_s=2) as admin:
        while not stop.wait(max(0.05, 10 * spec.pace_s)):
            for group in spec.groups:
                for topic in spec.topics:
                    history.write(
                        history.op("invoke", "committed", topic=topic, queue=queue, group=group)
                        for queue in range(spec.queues)
                    )
                    found = committed(admin, group, topic)
                    history.write(
                        history.op(
                            "ok", "committed", topic=topic, queue=queue, offset=at, group=group
                        )
                        for queue, at in found.items()
                    )


KINDS: Final[dict[str, Callable[[Spec, History, Stop], None]]] = {
    "single": send_single,
    "impatient": send_single,
    "linger": send_lingering,
    "batch": send_batches,
    "consumer": consume,
    "watcher": watch,
}


def main() -> None:
    run(KINDS)


def run(kinds: Mapping[str, Callable[[Spec, History, Stop], None]]) -> None:
    """What the process is for, by its first argument."""
    os.dup2(2, 1)  # whatever prints, prints to the log
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness says when
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    history = History.create(Path(spec.folder) / f"{spec.p}.jsonl", spec.p)
    kinds[spec.kind](spec, history, Stop())
