"""The open loop: messages on a schedule that is fixed at the start, whatever becomes of them.

What a message costs here is a cost of every client that is measured, so the loop does little:
stamps are made before the clock runs, and a body is put together from its stamp and one of the
pool; above 20,000 messages/s it wakes at most 10,000 times a second and sends all that is due then;
and what was answered together is taken off together, at one look at the clock. Nothing of this
makes a latency smaller: all of them begin at the intended time.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Final, Protocol

from cometmq.bench.extra import load
from cometmq.bench.stamps import Stamper

START_NS: Final = 20_000_000  # to the first intended time, when everything is made
STAMP_NS: Final = 150  # to make one, at first
READY_MAX: Final = 1 << 25  # stamps that are made before: 1 GiB
GO_ON: Final = 1024  # stamps of a run with more of them, each time
TICK_NS: Final = 100_000  # a shorter sleep costs more than it is worth: 16 us of a core
TICK_FROM: Final = 20_000.0  # messages/s; below that a tick would be most of a latency
BURST: Final = 1024  # messages without a word to the harness

clock_ns: Final = time.monotonic_ns  # CLOCK_MONOTONIC: one clock for all processes

GoOn = Callable[[int, int], bool]  # (messages sent, the clock): False ends the loop


class Schedule:
    """When message n is to be sent."""

    def __init__(self, rate: float, start_ns: int) -> None:
        self.start_ns, self._period_ns = start_ns, 1e9 / rate

    def __call__(self, number: int) -> int:
        return self.start_ns + int(number * self._period_ns)

    def span(self, start: int, stop: int) -> Any:
        """Of all these messages."""
        numpy = load("numpy")
        return self.start_ns + (numpy.arange(start, stop) * self._period_ns).astype(numpy.int64)

    def due(self, now: int) -> int:
        """How many messages are due by then."""
        return int((now - self.start_ns) // self._period_ns) + 1


class Times:
    """When each message was sent and acknowledged, in the order of sending."""

    def __init__(self, count: int) -> None:
        self.sent = array("q", bytes(8 * count))
        self.acked = array("q", bytes(8 * count))
        self._intended: Any = self.sent

    def cut(self, schedule: Schedule, start: int, stop: int) -> None:
        """Keep these messages alone; they have intended times."""
        self.sent, self.acked = self.sent[start:stop], self.acked[start:stop]
        self._intended = schedule.span(start, stop)

    def service(self) -> array[int]:
        """From the actual send to the acknowledgement."""
        return _differences(self.acked, self.sent)

    def response(self) -> array[int]:
        """From the intended send to the acknowledgement."""
        return _differences(self.acked, self._intended)

    def delays(self) -> array[int]:
        """From the intended to the actual send."""
        return _differences(self.sent, self._intended)


def _differences(later: Any, earlier: Any) -> array[int]:
    numpy = load("numpy")
    found = numpy.asarray(later, numpy.int64) - numpy.asarray(earlier, numpy.int64)
    return array("q", found.tobytes())


class LoopSender(Protocol):
    """What the loop needs of a client; see `worker.Sender`."""

    def one(self, topic: str, body: bytes) -> None: ...
    def begin(self, topic: str, body: bytes) -> Any: ...
    def finish(self, begun: deque[Any]) -> int: ...


class OpenLoop:
    """A run of the loop.

    Args:
        total: messages, the first of which are the warm-up.
        one_by_one: each is sent when the one before is acknowledged.
    """

    def __init__(
        self, sender: LoopSender, stamper: Stamper, topics: Sequence[str], rate: float, total: int,
        *, one_by_one: bool, go_on: GoOn,
    ) -> None:  # fmt: skip
        self.sender, self.topics, self.total, self.go_on = sender, topics, total, go_on
        self.times = Times(total)
        self._rate, self._stamper = rate, stamper
        self._tick_ns = TICK_NS if rate > TICK_FROM else 0
        self._way = self._wait_for_each if one_by_one else self._pipelined
        if hasattr(sender, "paced"):
            self._way = self._by_itself

    def run(self) -> tuple[Schedule, int, int]:
        """The schedule, how many were sent, and when the last was acknowledged."""
        schedule, bodies = self._make_ready()
        sent, last_ns = self._way(schedule, bodies)
        return schedule, sent, last_ns

    def _make_ready(self) -> tuple[Schedule, Iterator[bytes]]:
        """A schedule that begins when the stamps are there that it gives its times to."""
        ready = self.total if self.total <= READY_MAX else GO_ON
        lead_ns = START_NS + STAMP_NS * ready
        while True:
            schedule = Schedule(self._rate, clock_ns() + lead_ns)
            bodies = self._stamper.stream(self.total, ready, schedule.span)
            if clock_ns() < schedule.start_ns - START_NS // 2:
                return schedule, bodies
            lead_ns *= 2

    def _topics(self) -> Iterator[str]:
        return islice(cycle(self.topics), self.total)

    def _by_itself(self, schedule: Schedule, bodies: Iterator[bytes]) -> tuple[int, int]:
        """A client of asyncio sends and reads in its own loop alone."""
        sender: Any = self.sender
        found: tuple[int, int] = sender.paced(
            self._topics(), schedule, bodies, self.times, self.go_on
        )
        return found

    def _wait_for_each(self, schedule: Schedule, bodies: Iterator[bytes]) -> tuple[int, int]:
        times, one, after = self.times, self.sender.one, clock_ns()
        for number, (topic, body) in enumerate(zip(self._topics(), bodies, strict=False)):
            sleep_until(schedule(number))
            before = clock_ns()
            one(topic, body)
            after = clock_ns()
            times.sent[number], times.acked[number] = before, after
            if not self.go_on(number, after):
                return number + 1, after
        return self.total, after

    def _pipelined(self, schedule: Schedule, bodies: Iterator[bytes]) -> tuple[int, int]:
        answers = _Acknowledgements(self.sender, self.times.acked)
        answers.start()
        sent, begin, put = self.times.sent, self.sender.begin, answers.begun.append
        topics, number = self._topics(), 0
        while number < self.total and answers.error is None:
            now = clock_ns()
            stop = min(schedule.due(now), self.total, number + BURST)
            if stop <= number:
                sleep_until(max(schedule(number), now + self._tick_ns))
                continue
            for each, topic, body in zip(range(number, stop), topics, bodies):  # noqa: B905
                sent[each] = clock_ns()
                put(begin(topic, body))
                if answers.idle:
                    answers.wake()
            number = stop
            if not self.go_on(number, now):
                break
        answers.end()
        return number, answers.last_ns


def sleep_until(due_ns: int) -> None:
    left_ns = due_ns - clock_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)  # the pace


class _Acknowledgements(threading.Thread):
    """Waits for what was begun, in its order, and takes the time.

    Attributes:
        begun: what `begin` gave, in its order; the loop appends to it, and then wakes us if `idle`.
    """

    def __init__(self, sender: LoopSender, acked: array[int]) -> None:
        super().__init__(daemon=True)
        self.begun: deque[Any] = deque()
        self.idle = False
        self.last_ns = 0
        self.error: Exception | None = None
        self._finish, self._acked = sender.finish, acked
        self._more = threading.Event()
        self._ended = False

    def wake(self) -> None:
        self.idle = False
        self._more.set()

    def end(self) -> None:
        """Wait until all are acknowledged."""
        self._ended = True
        self.wake()
        self.join()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        try:
            self._take_all()
        except Exception as error:
            self.error = error

    def _take_all(self) -> None:
        begun, finish, acked, done = self.begun, self._finish, self._acked, 0
        while self._wait():
            while begun:
                count = finish(begun)
                now = self.last_ns = clock_ns()
                acked[done : done + count] = array("q", (now,)) * count
                done += count

    def _wait(self) -> bool:
        """Whether something has begun; False when all is over."""
        while not self.begun:
            if self._ended:
                return bool(self.begun)
            self._more.clear()
            self.idle = True
            if not self.begun and not self._ended:  # else it came before we were idle
                self._more.wait()
            self.idle = False
        return True
