"""The worker with nats-py; see cometmq.bench.peers.nats."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module, metadata
from itertools import cycle
from typing import Any, Final

from cometmq.bench.extra import BenchError, load
from cometmq.bench.open_loop import GoOn, Times, clock_ns
from cometmq.bench.worker import Job, serve

ANSWER_S: Final = 60.0
PENDING: Final = 4000  # nats-py's own default
READ_COUNT: Final = 500
UNACKNOWLEDGED_MAX: Final = 20_000  # of a push consumer
FETCH_S: Final = 0.05  # the least time that a fetch waits
_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1


def _loop() -> tuple[asyncio.AbstractEventLoop, str]:
    """An event loop, and what the client is called on it."""
    name = f"nats-py {metadata.version('nats-py')}"
    try:
        uvloop: Any = import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop(), name
    return uvloop.new_event_loop(), f"{name} on uvloop {uvloop.__version__}"


class _Client:
    """A connection, and the loop that it lives in; the loop runs only while it is called."""

    def __init__(self, job: Job, pending: int) -> None:
        self.loop, self.client = _loop()
        asyncio.set_event_loop(self.loop)
        self.run: Callable[..., Any] = self.loop.run_until_complete
        self._said: list[Exception] = []
        self.nats = self.run(
            load("nats").connect(job.endpoint["url"], error_cb=self._hear, connect_timeout=ANSWER_S)
        )
        self.jetstream = self.nats.jetstream(timeout=ANSWER_S, publish_async_max_pending=pending)

    async def _hear(self, error: Exception) -> None:
        self._said.append(error)

    def check(self) -> None:
        if self._said:
            raise BenchError(f"nats: {self._said[0]!r}")

    def close(self) -> None:
        self.run(self.nats.close())


class NatsSender:
    def __init__(self, job: Job) -> None:
        windowed = job.options.get("window") and job.mode == "async" and not job.rate
        self._client = _Client(job, job.in_flight if windowed else PENDING)
        self.client = self._client.client
        self._run, self._jetstream = self._client.run, self._client.jetstream
        self._one = job.mode == "one_in_flight"
        self._subjects = {
            topic: cycle([f"{topic}.{queue}" for queue in range(job.queues)])
            for topic in job.topics
        }

    def one(self, topic: str, body: bytes) -> None:
        self._run(self._jetstream.publish(next(self._subjects[topic]), body))

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        subjects = self._subjects
        turn = (next(subjects[topic]) for topic in cycle(topics))
        self._run(self._send(turn, bodies))

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        self._run(self._send(cycle([next(self._subjects[topic])]), bodies))

    async def _send(self, subjects: Iterable[str], bodies: list[bytes]) -> None:
        publish = self._jetstream.publish_async
        answers = [
            await publish(subject, body) for subject, body in zip(subjects, bodies, strict=False)
        ]
        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*answers)
        self._client.check()

    def paced(
        self, topics: Iterable[str], due: Callable[[int], int], bodies: Iterable[bytes],
        times: Times, go_on: GoOn,
    ) -> tuple[int, int]:  # fmt: skip
        """The open loop inside the event loop: how many were sent, when the last was answered."""
        loop = self._wait_for_each if self._one else self._pipelined
        sent, last = self._run(loop(topics, due, bodies, times, go_on))
        self._client.check()
        return sent, last

    async def _wait_for_each(
        self, topics: Iterable[str], due: Callable[[int], int], bodies: Iterable[bytes],
        times: Times, go_on: GoOn,
    ) -> tuple[int, int]:  # fmt: skip
        timer, number, after = _Timer(), -1, clock_ns()
        for number, (topic, body) in enumerate(zip(topics, bodies, strict=False)):
            if not go_on(number, after):
                return number, after
            await timer.wait(due(number))
            before = clock_ns()
            await self._jetstream.publish(next(self._subjects[topic]), body)
            after = clock_ns()
            times.sent[number], times.acked[number] = before, after
        return number + 1, after

    async def _pipelined(
        self, topics: Iterable[str], due: Callable[[int], int], bodies: Iterable[bytes],
        times: Times, go_on: GoOn,
    ) -> tuple[int, int]:  # fmt: skip
        timer, number, answers = _Timer(), 0, set()

        def answered(number: int, answer: Any) -> None:
            times.acked[number] = clock_ns()
            answers.discard(answer)
            answer.result()

        for number, (topic, body) in enumerate(zip(topics, bodies, strict=False)):
            await timer.wait(due(number))
            now = times.sent[number] = clock_ns()
            answer = await self._jetstream.publish_async(next(self._subjects[topic]), body)
            answers.add(answer)
            answer.add_done_callback(partial(answered, number))
            if not go_on(number, now):
                number += 1
                break
        else:
            number += 1
        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*answers)
        return number, clock_ns()

    def begin(self, topic: str, body: bytes) -> Any:
        raise NotImplementedError("the open loop is `paced`")

    def finish(self, begun: deque[Any]) -> int:
        raise NotImplementedError("the open loop is `paced`")

    def close(self) -> None:
        self._client.close()


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Timer:
    """A timerfd in the running event loop, whose own timers are a millisecond coarse."""

    def __init__(self) -> None:
        self._system = ctypes.CDLL(None, use_errno=True)
        self._file = self._system.timerfd_create(_MONOTONIC, os.O_NONBLOCK)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rang = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._file, self._ring)

    def _ring(self) -> None:
        os.read(self._file, 8)
        self._rang.set()

    async def wait(self, until_ns: int) -> None:
        """Also lets the loop turn when it is late already."""
        if until_ns <= clock_ns():
            await asyncio.sleep(0)
            return
        self._rang.clear()
        when = (_Time * 2)(_Time(0, 0), _Time(*divmod(until_ns, 1_000_000_000)))
        self._system.timerfd_settime(self._file, _ABSOLUTE, when, None)
        await self._rang.wait()


class NatsReceiver:
    """Messages are nats-py's own. The first poll subscribes: what is pushed before would wait."""

    def __init__(self, job: Job) -> None:
        self._client = _Client(job, PENDING)
        self.client = self._client.client
        self._job, self._run = job, self._client.run
        self._acknowledges = bool(job.options.get("shared") or job.options.get("ack"))
        self._pulled = self._acknowledges and not job.options.get("pushed")
        self._subscriptions: list[Any] = []
        self._got: list[Any] = []
        self._some = asyncio.Event()
        if self._pulled:
            self._run(self._pull())

    async def _pull(self) -> None:
        """One durable consumer for all members."""
        for topic in self._job.topics:
            self._subscriptions.append(
                await self._client.jetstream.pull_subscribe(
                    f"{topic}.*", durable=self._job.group, stream=topic
                )
            )

    async def _push(self) -> None:
        how: dict[str, Any] = {"ordered_consumer": True}
        if self._acknowledges:
            config = load("nats.js.api").ConsumerConfig(max_ack_pending=UNACKNOWLEDGED_MAX)
            how = {"durable": self._job.group, "manual_ack": True, "config": config}
        for topic in self._job.topics:
            self._subscriptions.append(
                await self._client.jetstream.subscribe(
                    f"{topic}.*", stream=topic, cb=self._take, **how
                )
            )

    async def _take(self, message: Any) -> None:
        self._got.append(message)
        self._some.set()

    def poll(self, timeout_s: float) -> Sequence[Any]:
        self._client.check()
        take = self._fetch if self._pulled else self._wait
        messages: Sequence[Any] = self._run(take(timeout_s))
        return messages

    async def _wait(self, timeout_s: float) -> Sequence[Any]:
        if not self._subscriptions:
            await self._push()
        if not self._got:
            try:
                await asyncio.wait_for(self._some.wait(), timeout_s)
            except TimeoutError:
                return ()
        messages, self._got = self._got, []
        self._some.clear()
        return messages

    async def _fetch(self, timeout_s: float) -> Sequence[Any]:
        share = max(FETCH_S, timeout_s / len(self._subscriptions))
        messages: list[Any] = []
        for subscription in self._subscriptions:
            try:
                messages += await subscription.fetch(READ_COUNT, timeout=share)
            except TimeoutError:  # nats-py raises its own, which is one, or asyncio's
                continue
        return messages

    def split(self, messages: Sequence[Any]) -> Iterable[tuple[Any, bytes]]:
        return [(each.subject, each.data) for each in messages]

    def acknowledge(self, messages: Sequence[Any]) -> None:
        if self._acknowledges:
            self._run(self._acknowledge(messages))

    async def _acknowledge(self, messages: Sequence[Any]) -> None:
        for message in messages:
            await message.ack()

    def close(self) -> None:
        self._client.close()


if __name__ == "__main__":
    serve(NatsSender, NatsReceiver)
