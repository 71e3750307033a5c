"""The stream of messages that a consumer hands out: what was pulled, chunk by chunk, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

from cometmq.client.receiving.buffer import Chunk, Queue
from cometmq.client.receiving.pulling import Puller
from cometmq.protocol.errors import CometError, again
from cometmq.protocol.wire.uninterrupted import (
    Abandoned,
    call_uninterrupted,
    uninterrupted,
)
from cometmq.shm.kernel.codec import Message


class Stream:
    """One thread at a time polls; the others wait for it.

    A chunk is decoded when its first message goes out, and stays in `puller.ready` until its last
    one has: whoever polls next goes on at its position.
    """

    def __init__(self, puller: Puller) -> None:
        self.closed = False
        self._puller = puller
        self._polling = threading.Lock()
        self._pump_due = True  # a chunk has gone out: see what has come
        self._failure: CometError | None = None

    def refuse(self, error: CometError) -> None:
        """Going on is pointless: the next poll raises it. From any thread."""
        self._failure = error
        self._puller.ring()

    def accept(self) -> None:
        """There is a point in going on again."""
        self._failure = None

    def check_failure(self) -> None:
        if self._failure is not None:
            raise again(self._failure)

    def poll(self, max_count: int, timeout_s: float | None) -> list[Message]:
        """Poll as `Consumer.poll` does. If a signal handler raises, no message is consumed."""
        abandoned = Abandoned()
        return call_uninterrupted(
            partial(self._poll, max_count, timeout_s, abandoned),
            abandon=partial(self._abandon, abandoned),
        )

    def _abandon(self, abandoned: Abandoned) -> None:
        abandoned.set()
        self._puller.ring()

    def _poll(self, max_count: int, timeout_s: float | None, abandoned: Abandoned) -> list[Message]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._polling:
            while not self.closed and not abandoned:
                if self._pump_due or not self._puller.ready:
                    self._pump_due = False
                    self._puller.pump(0)
                messages = self._take(max_count)
                if messages:
                    return messages
                if self._pump_due:
                    continue  # what there was had been handed out before
                left_s = 3600.0 if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._puller.pump(left_s)
        return []

    @uninterrupted
    def take(self, max_count: int, timeout_s: float) -> tuple[Queue, list[Message]] | None:
        """The next messages, of one queue; None if none came in time, or somebody rang before."""
        with self._polling:
            if self.closed:
                return None
            self._puller.pump(0 if self._next_chunk() else timeout_s)
            chunk = self._next_chunk()
            if chunk is None:
                return None
            begin = chunk.position
            chunk.position = end = min(chunk.stop, begin + max_count)
            return (chunk.queue, chunk.messages[begin:end]) if begin < end else None

    def ring(self) -> None:
        """Have `take` return, now or when it waits next. From any thread."""
        self._puller.ring()

    def release(self, queue: Queue) -> None:
        """A queue that was `held` is read on. From any thread."""
        queue.held = False
        self._puller.note([queue])

    def each(self, timeout_s: float) -> Iterator[Message]:
        """Messages one by one, until none came for so long; 0: never waits."""
        while (chunk := self._await_chunk(timeout_s)) is not None:
            messages = chunk.messages
            while (position := chunk.position) < chunk.stop:  # a signal handler may poll as well
                chunk.position = position + 1
                message = messages[position]
                yield message

    @uninterrupted
    def _await_chunk(self, timeout_s: float) -> Chunk | None:
        with self._polling:
            if self.closed:
                return None
            self._puller.pump(0 if self._next_chunk() else timeout_s)
            return self._next_chunk()

    def _next_chunk(self) -> Chunk | None:
        """The chunk that messages come from now, decoded and not used up."""
        self.check_failure()
        ready = self._puller.ready
        while ready:
            chunk = ready[0]
            self._puller.open(chunk)
            if chunk.position < chunk.stop:
                return chunk
            ready.popleft()
            self._puller.taken(chunk)
            self._pump_due = True
        return None

    def _take(self, max_count: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < max_count:
            chunk = self._next_chunk()
            if chunk is None:
                break
            begin = chunk.position
            end = min(chunk.stop, begin + max_count - len(found))
            part = chunk.messages[begin:end]
            chunk.position = max(begin, end)
            found = found + part if found else part
        return found

    @uninterrupted
    def descriptors(self) -> tuple[list[int], float]:
        """What to watch until `poll` has something to do (empty: it has), and at most how long."""
        with self._polling:
            if self.closed:
                return [], 0.0
            self._puller.begin()
            return self._puller.descriptors(), self._puller.due_s()

    def end(self) -> None:
        """Have whoever polls return with what there is."""
        self.closed = True
        self._puller.ring()

    def close(self) -> None:
        """After `end`: let go of what was pulled, and of the channels to readers."""
        with self._polling:
            self._puller.close()
