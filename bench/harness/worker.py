"""What a worker in Python is made of: it reads a job, sends or receives, and answers in JSON lines.

A worker is a process, in any language. It reads one line of JSON from standard input (`Job`), says
{"ready": true} when it is connected, begins with {"go": true}, may say {"progress": n} about once a
second, ends early with {"stop": true}, and answers {"result": {...}} with exit code 0, or
{"error": "one sentence"} with 1. What it has to say beside that goes to standard error. When its
standard input ends, so does it.

A Python client brings a `Sender` and a `Receiver`; the loops, clocks, histograms and checks here
are the same for all of them. Sequences run through warm-up and measurement alike: a producer sends
`warmup + messages` messages, and all of them are expected at the end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from cometmq.bench import histograms
from cometmq.bench.open_loop import OpenLoop, Times, clock_ns
from cometmq.bench.reading import Reading
from cometmq.bench.stamps import Stamper, Verifier
from cometmq.shm.os.libc import set_timer_slack

PROGRESS_NS: Final = 1_000_000_000
INTERVAL_S: Final = 10.0  # of one histogram in a log
POLL_S: Final = 0.2


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do. Unknown fields are passed over."""

    role: str
    endpoint: dict[str, Any]
    topics: list[str]
    queues: int = 1  # of each topic
    hlog: str = ""  # prefix of the histogram logs' paths
    options: dict[str, Any] = {}
    # produce
    size: int = 128
    messages: int = 0
    warmup: int = 0
    rate: float = 0.0  # messages/s; 0 = as fast as it goes
    mode: str = "async"  # one_in_flight, async, batch
    in_flight: int = 64
    batch: int = 256
    producer: int = 0
    seed: int = 1
    # consume, handle
    group: str = ""
    expect: int = 0
    timeout_s: float = 60.0  # without any message


class Sender(Protocol):
    """A producer's client. Every method raises when a message is not acknowledged."""

    client: str  # name and version

    def one(self, topic: str, body: bytes) -> None:
        """Send, and return when it is acknowledged."""

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        """One call of the client for each, the topics in turn; return when all are acknowledged.

        `in_flight`: as many may be unanswered; 0 = as many as the client allows.
        """

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        """One call for all; return when all are acknowledged."""

    def begin(self, topic: str, body: bytes) -> Any:
        """Send without waiting; what `finish` is given."""

    def finish(self, begun: deque[Any]) -> int:
        """Wait until the first of these is acknowledged, and take it off, and at will those behind
        it that are so too; how many. More may come to its end meanwhile, from another thread."""

    def close(self) -> None: ...

    # A sender may have `paced`, the whole open loop; `settle()`, which waits for what its calls
    # have left to be done; and `cpu_s()`, where that is not the CPU time of this process.


class Receiver(Protocol):
    """A consumer's client, subscribed and positioned."""

    client: str

    def poll(self, timeout_s: float) -> Sequence[Any]:
        """The next messages as the client has them; empty after the time."""

    def split(self, messages: Sequence[Any]) -> Iterable[tuple[Any, bytes | memoryview]]:
        """(queue, body) of each."""

    def acknowledge(self, messages: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


# --- the process ----------------------------------------------------------------------------------


def serve(sender: Callable[[Job], Sender], receiver: Callable[[Job], Receiver]) -> None:
    """Carry out the one job of this process."""
    try:
        job = msgspec.json.decode(sys.stdin.readline(), type=Job)
        _precise_sleep()
        if job.role == "produce":
            result = _produce(job, sender(job))
        elif job.role == "consume":
            result = _consume(job, receiver(job))
        elif job.role == "handle":
            result = _handle(job, receiver(job))
        else:
            raise ValueError(f"role {job.role!r}: produce, consume or handle")
    except Exception as error:
        import traceback

        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        os._exit(1)
    say({"result": result})
    sys.stdout.flush()
    os._exit(0)  # a client's threads do not hold us


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _precise_sleep() -> None:
    """Sleep to the microsecond: the kernel adds 50 us to every sleep of an ordinary thread."""
    set_timer_slack(1)


class _Orders:
    """The lines that follow the job."""

    def __init__(self) -> None:
        self.go, self.stop = threading.Event(), threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order.get("go"):
                self.go.set()
            if order.get("stop"):
                self.stop.set()
                self.go.set()
        os._exit(2)  # nobody is left who wants to know

    def ready(self) -> None:
        say({"ready": True})
        self.go.wait()


class _Progress:
    def __init__(self) -> None:
        self._due = clock_ns() + PROGRESS_NS

    def tell(self, count: int, now: int) -> None:
        if now >= self._due:
            self._due = now + PROGRESS_NS
            say({"progress": count})


# --- producing ------------------------------------------------------------------------------------


def _produce(job: Job, sender: Sender) -> dict[str, Any]:
    stamper = Stamper(
        job.size, job.producer, job.seed, share=job.options.get("random_share", 0.5),
        pool=job.options.get("pool", 0), payload=_payload(job),
    )  # fmt: skip
    orders, times = _Orders(), None
    extra: dict[str, float] = {}  # with the time of the first send
    orders.ready()
    if job.rate:
        times, seconds, cpu_s, sent = _open_loop(job, sender, stamper, orders)
    else:
        times, seconds, cpu_s = _as_fast_as_it_goes(job, sender, stamper, extra)
        sent = job.messages
    sender.close()
    return {
        "acked": sent,
        "failed": 0,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "client": sender.client,
        **(_logs(job, times, seconds) if times else {}),
        "extra": extra,
    }


def _logs(job: Job, times: Times, seconds: float) -> dict[str, str | None]:
    found = {"service_hlog": _log(job, "service", times.service(), seconds)}
    if job.rate:
        found["response_hlog"] = _log(job, "response", times.response(), seconds)
        found["delay_hlog"] = _log(job, "delay", times.delays(), seconds)
    return found


def _payload(job: Job) -> bytes:
    path = job.options.get("payload_file")
    return Path(path).read_bytes() if path else b""


def _log(job: Job, kind: str, values: array[int] | None, seconds: float) -> str | None:
    """Write a histogram log, an interval for every ten seconds; its path."""
    if not values or not job.hlog:
        return None
    path = Path(f"{job.hlog}.{kind}.hlog")
    step = -(-len(values) // max(1, round(seconds / INTERVAL_S)))
    parts = [values[at : at + step] for at in range(0, len(values), step)]
    histograms.write(path, *map(histograms.of, parts), seconds=seconds)
    return str(path)


def _as_fast_as_it_goes(
    job: Job, sender: Sender, stamper: Stamper, extra: dict[str, float]
) -> tuple[Times | None, float, float]:
    """Bodies are made before the clock runs, in groups.

    What is left to do behind a group is waited for (`settle`), and timed for itself.
    """
    times = Times(job.messages) if job.mode == "one_in_flight" else None
    cpu_of: Callable[[], float] = getattr(sender, "cpu_s", time.process_time)
    settle: Callable[[], None] = getattr(sender, "settle", lambda: None)
    _warm_up(job, sender, stamper)
    settle()
    elapsed = settling = 0
    cpu_s = 0.0
    for first, bodies in _groups(job, stamper, job.warmup, job.messages):
        gc.freeze()  # so many bodies are not to be looked at, again and again
        cpu, began = cpu_of(), clock_ns()
        extra.setdefault("first_ns", began)
        _send(job, sender, bodies, times, first)
        ended = clock_ns()
        settle()
        elapsed += ended - began
        settling += clock_ns() - ended
        cpu_s += cpu_of() - cpu
        say({"progress": job.warmup + first + len(bodies)})
    if hasattr(sender, "settle"):
        extra["dispatched_after_s"] = settling / 1e9
    return times, elapsed / 1e9, cpu_s


def _warm_up(job: Job, sender: Sender, stamper: Stamper) -> None:
    for _, bodies in _groups(job, stamper, 0, job.warmup):
        _send(job, sender, bodies, None, 0)


def _groups(
    job: Job, stamper: Stamper, start: int, count: int
) -> Iterator[tuple[int, list[bytes]]]:
    """(how many came before, bodies). With the option `again` so many bodies come again and again,
    in one group: for what has no room in memory, and must not pause."""
    again = int(job.options.get("again", 0))
    if again:
        turns = cycle(stamper.bodies(0, again))
        yield 0, list(islice(turns, start % again, start % again + count))
        return
    for first in range(0, count, stamper.group_count):
        end = start + min(count, first + stamper.group_count)
        yield first, stamper.bodies(start + first, end)


def _send(job: Job, sender: Sender, bodies: list[bytes], times: Times | None, first: int) -> None:
    topics = job.topics
    if job.mode == "async":
        sender.stream(topics, bodies, job.options.get("window", 0) and job.in_flight)
    elif job.mode == "batch":
        turn = cycle(topics)
        for start in range(0, len(bodies), job.batch):
            sender.batch(next(turn), bodies[start : start + job.batch])
    elif job.mode == "one_in_flight":
        one = sender.one
        sent, acked = (
            (times.sent, times.acked) if times else (array("q", bytes(8 * len(bodies))),) * 2
        )
        for index, (topic, body) in enumerate(zip(cycle(topics), bodies), first):
            sent[index] = clock_ns()
            one(topic, body)
            acked[index] = clock_ns()
    else:
        raise ValueError(f"mode {job.mode!r}: one_in_flight, async or batch")


def _open_loop(
    job: Job, sender: Sender, stamper: Stamper, orders: _Orders
) -> tuple[Times, float, float, int]:
    """Send on schedule until all are sent or we are stopped: times, seconds, CPU, measured."""
    progress = _Progress()

    def go_on(number: int, now: int) -> bool:
        progress.tell(number, now)
        return not orders.stop.is_set()

    loop = OpenLoop(
        sender, stamper, job.topics, job.rate, job.warmup + job.messages,
        one_by_one=job.mode == "one_in_flight", go_on=go_on,
    )  # fmt: skip
    cpu = time.process_time()
    schedule, sent, end_ns = loop.run()
    cpu_s = time.process_time() - cpu
    warm = min(job.warmup, sent)
    loop.times.cut(schedule, warm, sent)
    seconds = (end_ns - schedule(warm)) / 1e9
    return loop.times, seconds, cpu_s * (sent - warm) / max(1, sent), sent - warm


# --- consuming ------------------------------------------------------------------------------------


def _consume(job: Job, receiver: Receiver) -> dict[str, Any]:
    orders, progress = _Orders(), _Progress()
    reading = Reading(
        receiver, Verifier(job.seed, again=int(job.options.get("again", 0))), size=job.size,
        inline=job.options.get("verify") == "inline", skip=int(job.options.get("skip", 0)),
        expect=job.expect,
    )  # fmt: skip
    orders.ready()
    cpu, began = time.process_time(), clock_ns()
    last = began
    while not orders.stop.is_set():
        messages = receiver.poll(POLL_S)
        now = clock_ns()
        if messages:
            last = now
            receiver.acknowledge(messages)
            reading.take(messages, now)
            progress.tell(reading.received, now)
        elif now - last > job.timeout_s * 1e9:
            break
        else:
            progress.tell(reading.received, now)
        if reading.received >= job.expect and _all_there(reading, job):
            break
    cpu_s = time.process_time() - cpu
    if job.options.get("verify") == "inline":
        began = reading.first_ns  # producers make their stamps first
    seconds = max(0, reading.last_ns - began - reading.last_paused_ns) / 1e9
    reading.check()
    receiver.close()
    return reading.verifier.result(job.expect) | {
        "seconds": seconds,
        "first_ns": reading.first_ns,
        "last_ns": reading.last_ns,
        "cpu_s": cpu_s,
        "client": receiver.client,
        "hlog": _log(job, "end_to_end", reading.latencies or None, seconds),
    }


def _handle(job: Job, receiver: Receiver) -> dict[str, Any]:
    """Call a function that does nothing for each message, one after the other, and acknowledge
    those that came together; from the first call to the last one's. Nothing is verified."""
    orders, progress = _Orders(), _Progress()
    count = cpu = began = ended = 0

    def handle(_message: Any) -> None:
        pass

    orders.ready()
    last = clock_ns()
    while count < job.expect and not orders.stop.is_set():
        messages = receiver.poll(POLL_S)
        now = clock_ns()
        progress.tell(count, now)
        if not messages:
            if now - last > job.timeout_s * 1e9:
                break
            continue
        last = now
        if not count:
            began, cpu = now, time.process_time_ns()
        for message in messages:
            handle(message)
        count += len(messages)
        ended = clock_ns()
        receiver.acknowledge(messages)
    cpu_s = (time.process_time_ns() - cpu) / 1e9
    receiver.close()
    seconds = (ended - began) / 1e9
    return {"messages": count, "seconds": seconds, "cpu_s": cpu_s, "client": receiver.client}


def _all_there(reading: Reading, job: Job) -> bool:
    """Duplicates count once. The check is behind the last message: no clock runs."""
    reading.check()
    return reading.verifier.distinct >= job.expect
