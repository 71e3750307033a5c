"""The worker with confluent-kafka; its settings are in cometmq.bench.peers.kafka."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, Final

from cometmq.bench.extra import BenchError, load
from cometmq.bench.worker import Job, serve

ANSWER_S: Final = 60.0
READY_S: Final = 60.0
READ_COUNT: Final = 10_000


def _client() -> str:
    kafka = load("confluent_kafka")
    return f"confluent-kafka {kafka.__version__}, librdkafka {kafka.libversion()[0]}"


def _settings(job: Job, phase: str, given: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": job.endpoint["bootstrap"],
        **job.endpoint["settings"]["python"][phase],
        **job.options.get(given, {}),
    }


class KafkaSender:
    def __init__(self, job: Job) -> None:
        kafka = load("confluent_kafka")
        self.client = _client()
        self._full = BufferError
        phase = "open_loop" if job.rate else job.mode
        self._failed: list[Any] = []
        settings = _settings(job, phase, "producer") | {"error_cb": print}
        if phase in ("async", "batch"):
            settings["on_delivery"] = self._fail
        self._producer = kafka.Producer(settings)
        self._spread = job.options.get("spread") or job.queues == 1
        self._queues = {topic: cycle(range(job.queues)) for topic in job.topics}
        for topic in job.topics:
            self._producer.list_topics(topic, ANSWER_S)

    def _fail(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failed.append(error)

    def _queue(self, topic: str) -> int:
        """-1: librdkafka chooses."""
        return next(self._queues[topic]) if self._spread else -1

    def one(self, topic: str, body: bytes) -> None:
        self.finish(deque([self.begin(topic, body)]))

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        step = in_flight or len(bodies)
        for start in range(0, len(bodies), step):
            self._send(cycle(topics), bodies[start : start + step] if in_flight else bodies)

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        self._send(cycle([topic]), bodies)

    def _send(self, topics: Iterable[str], bodies: list[bytes]) -> None:
        produce, queue = self._producer.produce, self._queue
        for topic, body in zip(topics, bodies, strict=False):
            while True:
                try:
                    produce(topic, body, partition=queue(topic))
                    break
                except self._full:
                    self._producer.poll(0.1)
        left = self._producer.flush(ANSWER_S)
        if left or self._failed:
            raise BenchError(f"{left} messages unanswered, errors: {self._failed[:1]}")

    def begin(self, topic: str, body: bytes) -> list[Any]:
        """An empty list, which becomes [error or None] with the answer. Waits for room."""
        answer: list[Any] = []
        while True:
            try:
                self._producer.produce(
                    topic,
                    body,
                    partition=self._queue(topic),
                    on_delivery=lambda error, _message: answer.append(error),
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                return answer

    def finish(self, begun: deque[list[Any]]) -> int:
        """A poll may have brought many answers."""
        deadline = time.monotonic() + ANSWER_S
        while not begun[0]:
            self._producer.poll(1.0)
            if time.monotonic() > deadline:
                raise BenchError(f"no answer within {ANSWER_S:g} s")
        count = 0
        while begun and begun[0]:
            (error,) = begun.popleft()
            if error is not None:
                raise BenchError(f"not acknowledged: {error}")
            count += 1
        return count

    def close(self) -> None:
        self._producer.flush(ANSWER_S)


class KafkaReceiver:
    def __init__(self, job: Job) -> None:
        kafka = load("confluent_kafka")
        self.client = _client()
        settings = _settings(job, "consume", "consumer") | {"group.id": job.group}
        self._consumer = kafka.Consumer(settings)
        self._assigned: list[Any] | None = None
        self._going = False
        self._consumer.subscribe(job.topics, on_assign=self._assign, on_revoke=self._revoke)
        if job.options.get("shared"):
            # Members are balanced behind the go: who waits for it cannot answer those who come.
            self._consumer.list_topics(job.topics[0], READY_S)
            self._going = True
        else:
            self._wait(len(job.topics) * job.queues)

    def _assign(self, consumer: Any, partitions: list[Any]) -> None:
        """Nothing is fetched before the first poll."""
        self._assigned = partitions
        consumer.assign(partitions)
        if not self._going:
            consumer.pause(partitions)

    def _revoke(self, consumer: Any, _partitions: list[Any]) -> None:
        self._assigned = []
        consumer.unassign()

    def _wait(self, count: int) -> None:
        deadline = time.monotonic() + READY_S
        while self._assigned is None or len(self._assigned) < count:
            if time.monotonic() > deadline:
                raise BenchError(f"{len(self._assigned or [])} of {count} queues after {READY_S} s")
            self._check(self._consumer.poll(0.1))

    def _check(self, message: Any) -> None:
        if message is not None and message.error():
            raise BenchError(f"consuming: {message.error()}")

    def poll(self, timeout_s: float) -> Sequence[Any]:
        """The first with patience, the others as far as they are there."""
        if not self._going:
            self._going = True
            self._consumer.resume(self._assigned)
        first = self._consumer.poll(timeout_s)
        if first is None:
            return ()
        messages = [first, *self._consumer.consume(READ_COUNT, 0)]
        for message in messages:
            if message.error():
                self._check(message)
        return messages

    def split(self, messages: Sequence[Any]) -> Iterable[tuple[Any, bytes]]:
        return [((each.topic(), each.partition()), each.value()) for each in messages]

    def acknowledge(self, messages: Sequence[Any]) -> None:
        """Progress is committed every 5 s, as by default."""

    def close(self) -> None:
        self._consumer.close()


if __name__ == "__main__":
    serve(KafkaSender, KafkaReceiver)
