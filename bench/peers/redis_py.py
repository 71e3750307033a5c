"""The worker with redis-py; see cometmq.bench.peers.redis."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, Final

from cometmq.bench.extra import load
from cometmq.bench.worker import Job, serve

PIPELINE: Final = 500
READ_COUNT: Final = 500
FIELD: Final = b"b"


def connect(job: Job) -> Any:
    redis = load("redis")
    if job.options.get("transport") == "unix":
        return redis.Redis(unix_socket_path=job.endpoint["unix"])
    return redis.Redis(job.endpoint["host"], job.endpoint["port"])


def _client() -> str:
    """Its name and version, and that of the parser in C."""
    try:
        return f"redis-py {load('redis').__version__} with hiredis {load('hiredis').__version__}"
    except ImportError:
        return f"redis-py {load('redis').__version__}"


def stream(topic: str, queue: int) -> bytes:
    """The key of a queue."""
    return f"{topic}:{queue}".encode()


class RedisSender:
    def __init__(self, job: Job) -> None:
        self.client = _client()
        self._redis = connect(job)
        self._redis.ping()
        self._keys = {
            topic: cycle([stream(topic, queue) for queue in range(job.queues)])
            for topic in job.topics
        }
        # For the open loop: sends and reads in two threads, which a pool's connection cannot.
        self._connection = self._redis.connection_pool.get_connection()

    def one(self, topic: str, body: bytes) -> None:
        self._redis.xadd(next(self._keys[topic]), {FIELD: body})

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        step = in_flight or PIPELINE
        turn = cycle(topics)
        for start in range(0, len(bodies), step):
            pipeline = self._redis.pipeline(transaction=False)
            for body, topic in zip(bodies[start : start + step], turn, strict=False):
                pipeline.xadd(next(self._keys[topic]), {FIELD: body})
            pipeline.execute()

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        """All to one queue."""
        pipeline = self._redis.pipeline(transaction=False)
        key = next(self._keys[topic])
        for body in bodies:
            pipeline.xadd(key, {FIELD: body})
        pipeline.execute()

    def begin(self, topic: str, body: bytes) -> None:
        self._connection.send_command("XADD", next(self._keys[topic]), "*", FIELD, body)

    def finish(self, begun: deque[None]) -> int:
        """Answers come in the order of the commands."""
        self._connection.read_response()
        begun.popleft()
        return 1

    def close(self) -> None:
        self._connection.disconnect()
        self._redis.close()


class RedisReceiver:
    """Messages: (key, (id, {field: body}))."""

    def __init__(self, job: Job) -> None:
        self.client = _client()
        self._redis = connect(job)
        keys = [stream(topic, queue) for topic in job.topics for queue in range(job.queues)]
        self._last: dict[Any, Any] = dict.fromkeys(keys, "0")
        self._group = job.group if job.options.get("shared") or job.options.get("ack") else ""
        if self._group:
            self._last = dict.fromkeys(keys, ">")
            for key in keys:
                self._make_group(key)

    def _make_group(self, key: bytes) -> None:
        redis = load("redis")
        try:
            self._redis.xgroup_create(key, self._group, id="0", mkstream=True)
        except redis.ResponseError as error:  # another member was first
            if not str(error).startswith("BUSYGROUP"):
                raise

    def poll(self, timeout_s: float) -> Sequence[Any]:
        block = int(timeout_s * 1000)
        if self._group:
            me = f"c{id(self)}"
            found = self._redis.xreadgroup(
                self._group, me, self._last, count=READ_COUNT, block=block
            )
        else:
            found = self._redis.xread(self._last, count=READ_COUNT, block=block)
        messages = []
        for key, entries in found.items() if isinstance(found, dict) else found:
            if not self._group:
                self._last[key] = entries[-1][0]
            messages += [(key, entry) for entry in entries]
        return messages

    def split(self, messages: Sequence[Any]) -> Iterable[tuple[Any, bytes]]:
        return [(key, entry[1][FIELD]) for key, entry in messages]

    def acknowledge(self, messages: Sequence[Any]) -> None:
        if self._group:
            pipeline = self._redis.pipeline(transaction=False)
            by_key: dict[Any, list[Any]] = {}
            for key, entry in messages:
                by_key.setdefault(key, []).append(entry[0])
            for key, ids in by_key.items():
                pipeline.xack(key, self._group, *ids)
            pipeline.execute()

    def close(self) -> None:
        self._redis.close()


if __name__ == "__main__":
    serve(RedisSender, RedisReceiver)
