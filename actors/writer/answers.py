"""Answers that wait for a cover: until what they tell of is flushed, replicated, or both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from cometmq.actors.runtime.service import Payload, Request, Timer
from cometmq.protocol.commands import (
    Command,
    Cover,
    RecordsAppended,
    SectionResult,
    SendResult,
)
from cometmq.protocol.errors import ArgumentIllegal, FlushDiskTimeout
from cometmq.shm.kernel._kernel import SleepCell

LATE: Final = FlushDiskTimeout.code
# From there on the flush process syncs, so that a sender is told in time.
SLOW_S: Final = 0.1


class Waiting(msgspec.Struct):
    end: int  # physical offset that has to be covered
    since: float  # time.monotonic()
    request: Request
    answer: Command
    payload: Payload


class Answers:
    """What the commitlog actor has stored and not answered yet.

    A cover is a sum of counters' bits: it has come as far as the slowest of them. Another counter,
    the replicas' say, is one more entry in `counters`.

    Args:
        counters: of each bit of a cover (protocol's Cover); they ring the actor's doorbell.
        policy: the cover that the broker's settings promise.
        timeout_s: after that an answer says that it is stored, but not covered in time.
        after: sets a timer of the actor.
    """

    def __init__(
        self,
        counters: Mapping[int, SleepCell],
        *,
        policy: int,
        timeout_s: float,
        after: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self.policy = policy
        self.is_slow = False  # as the last answers have shown
        self._counters = counters
        self._timeout_s = timeout_s
        self._after = after
        self._alarm: Timer | None = None
        self._waiting: dict[int, deque[Waiting]] = {}  # by cover, each in the order of the log

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def since(self) -> float | None:
        """When the first of those that wait was stored."""
        return min((queue[0].since for queue in self._waiting.values()), default=None)

    @property
    def flushed_end(self) -> int:
        """What has to be flushed for the first of them."""
        return min(queue[0].end for queue in self._waiting.values())

    def cover_of(self, asked: int) -> int:
        """The counters that stand for it. Raises ArgumentIllegal where there is no such."""
        cover = self.policy if asked == Cover.POLICY else asked
        known = sum(self._counters)
        if cover & ~known:
            raise ArgumentIllegal(
                f"cover = {asked}: this broker has the counters {sorted(self._counters)} "
                "(1 flushed, 2 replicated)"
            )
        return cover

    def expect(
        self,
        cover: int,
        end: int,
        since: float,
        request: Request,
        answer: Command,
        payload: Payload = (),
    ) -> None:
        """Answer as soon as everything below `end` is covered, which `release` looks for."""
        self._waiting.setdefault(cover, deque()).append(
            Waiting(end, since, request, answer, payload)
        )

    def release(self) -> None:
        """Answer what is covered, and what was not in time; sleep on the rest."""
        for cover in list(self._waiting):
            queue = self._waiting[cover]
            self._release(cover, queue)
            if not queue:
                del self._waiting[cover]
        if self._waiting and self._alarm is None:
            assert self.since is not None
            due = self.since + self._timeout_s
            self._alarm = self._after(max(0.0, due - time.monotonic()), self._on_alarm)

    def _release(self, cover: int, queue: deque[Waiting]) -> None:
        while queue:
            covered = self._armed(cover)
            while queue and queue[0].end <= covered:
                waiting = queue.popleft()
                self.is_slow = time.monotonic() - waiting.since > SLOW_S
                waiting.request.reply(waiting.answer, waiting.payload)
            if not queue or time.monotonic() < queue[0].since + self._timeout_s:
                return
            self._answer_late(queue.popleft())

    def _armed(self, cover: int) -> int:
        """How far it has come; the actor's doorbell rings when it goes on."""
        cells = [cell for bit, cell in self._counters.items() if bit & cover]
        for cell in cells:
            cell.arm()
        return min(cell.value for cell in cells)

    def _on_alarm(self) -> None:
        self._alarm = None
        self.release()

    def _answer_late(self, waiting: Waiting) -> None:
        """FLUSH_DISK_TIMEOUT: stored, but the disk has not confirmed it in time."""
        text = f"not flushed within {self._timeout_s * 1000:.0f} ms"
        waiting.request.reply(late(waiting.answer, text), waiting.payload)


def late(answer: Command, text: str) -> Command:
    """The answer, with what has come of its cover."""
    if isinstance(answer, RecordsAppended):
        return RecordsAppended(LATE, answer.store_timestamp_ms, text, answer.already)
    assert isinstance(answer, SendResult)
    results = [
        SectionResult(
            result.code or LATE, result.queue_offset, result.physical_offset, result.text or text
        )
        for result in answer.results
    ]
    return SendResult(results, answer.store_timestamp_ms, answer.store_host)
