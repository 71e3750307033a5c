"""Answers that wait for a cover: until what they tell of is flushed, replicated, or both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from cometmq.actors.runtime.service import Payload, Request, ServiceActor, Timer
from cometmq.protocol.commands import (
    Command,
    Cover,
    HalvesPassed,
    ProducerOpened,
    RecordsAppended,
    SendMessages,
    SendResult,
    TransactionsEnded,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    FlushDiskTimeout,
    FlushSlaveTimeout,
    NotConfirmed,
    SlaveNotAvailable,
)
from cometmq.shm.kernel.live import ReadCell, SleepCell

# From there on the flush process syncs, so that a sender is told in time.
SLOW_S: Final = 0.1


class Confirming(msgspec.Struct, frozen=True):
    """Who confirms what was stored: the disk, or slaves.

    Args:
        counter: below it everything is confirmed; it rings the actor's doorbell.
        timeout_s: after that an answer says that it is stored, but not confirmed in time.
        late: the error that stands for that.
        by_group: what it does not confirm may be cut from the log.
    """

    counter: SleepCell
    timeout_s: float
    late: type[NotConfirmed]
    by_group: bool = False

    @property
    def text(self) -> str:
        within = f"within {self.timeout_s * 1000:.0f} ms"
        if self.by_group:
            return f"not confirmed by the group {within} (slaveTimeout): it may be cut from the log"
        verb = "flushed" if self.late is FlushDiskTimeout else "acknowledged by a slave"
        return f"not {verb} {within}"

    def told(self, answer: Command, command: Command) -> Command:
        """Return the answer to a command whose acks did not arrive in time."""
        return late(answer, self.late, self.text, command)


class Slaves:
    """The slaves that answers wait for.

    Args:
        close_ones: how many are connected, and not too far behind.
        wanted: how many have to have it.
    """

    def __init__(self, close_ones: ReadCell, wanted: int) -> None:
        self._close_ones = close_ones
        self._wanted = wanted

    def why_missing(self) -> str:
        """Why it is of no use to wait for them; "" where they are there."""
        found = self._close_ones.value
        if found >= self._wanted:
            return ""
        return (
            f"{found} slaves are connected and close enough (haMaxGapNotInSync), {self._wanted} "
            "wanted (inSyncReplicas)"
        )


class Waiting(msgspec.Struct):
    begin: int  # physical offset of the first thing that was stored with it
    end: int  # physical offset that has to be covered
    since: float  # time.monotonic()
    request: Request
    answer: Command
    payload: Payload


class Answers:
    """What the commitlog actor has stored and not answered yet.

    A cover is a sum of bits: it has come as far as the slowest of those that confirm.

    Args:
        confirming: by the bits of a cover (protocol's Cover).
        policy: the cover that the broker's settings promise.
        slaves: that stand behind Cover.REPLICATED, if any do.
    """

    def __init__(
        self,
        actor: ServiceActor,
        confirming: Mapping[int, Confirming],
        *,
        policy: int,
        slaves: Slaves | None,
    ) -> None:
        self._actor = actor
        self.policy = policy
        self.slaves = slaves
        self.is_slow = False  # the disk, as the last answers have shown
        self._confirming = confirming
        self._alarm: Timer | None = None
        self._waiting: dict[int, deque[Waiting]] = {}  # by cover, each in the order of the log
        self._soonest_s = min(each.timeout_s for each in confirming.values())

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def disk_since(self) -> float | None:
        """When the first of those that wait for the disk was stored."""
        if not self._waiting:
            return None
        flushed = self._confirming[Cover.FLUSHED].counter.value
        return min(
            (
                queue[0].since
                for cover, queue in self._waiting.items()
                if cover & Cover.FLUSHED and queue[0].end > flushed
            ),
            default=None,
        )

    def waiting_bytes(self, log_end: int) -> int:
        """What was stored since the first of those that wait."""
        return log_end - min((queue[0].begin for queue in self._waiting.values()), default=log_end)

    def next_wait(self) -> tuple[int, int]:
        """What the first of them waits for: a bit of its cover, and up to where in the log."""
        cover, queue = min(self._waiting.items(), key=lambda each: each[1][0].end)
        end = queue[0].end
        bits = [bit for bit in self._confirming if bit & cover]
        missing = [bit for bit in bits if self._confirming[bit].counter.value < end]
        return (missing or bits)[0], end

    def cover_of(self, asked: int) -> int:
        """The counters that stand for it: the policy's, and what is asked for beside them, if
        anything is. Raises ArgumentIllegal where there is no such."""
        asked = self.policy if asked == Cover.POLICY else asked
        cover = asked | self.policy if asked else Cover.WRITTEN
        known = sum(self._confirming)
        if cover & ~known:
            raise ArgumentIllegal(
                f"cover = {asked}: this broker has the counters {sorted(self._confirming)} "
                "(1 flushed, 2 replicated)"
            )
        return cover

    def expect(
        self,
        cover: int,
        reach: tuple[int, int],
        since: float,
        request: Request,
        answer: Command,
        payload: Payload = (),
    ) -> None:
        """Answer as soon as everything below `reach`'s end is covered, which `release` looks for.
        Slaves that are not there are not waited for."""
        if cover & Cover.REPLICATED and self.slaves is not None:
            why = self.slaves.why_missing()
            if why:
                cover &= ~Cover.REPLICATED
                answer = late(answer, SlaveNotAvailable, f"stored, but {why}", request.command)
        if not cover:
            request.reply(answer, payload)
            return
        self._waiting.setdefault(cover, deque()).append(
            Waiting(*reach, since, request, answer, payload)
        )

    def release(self) -> None:
        """Answer what is covered, and what was not in time; sleep on the rest."""
        for cover in list(self._waiting):
            queue = self._waiting[cover]
            self._release(cover, queue)
            if not queue:
                del self._waiting[cover]
        if self._waiting and self._alarm is None:
            due = min(self._due(cover, queue[0])[0] for cover, queue in self._waiting.items())
            self._alarm = self._actor.after(max(0.0, due - time.monotonic()), self._on_alarm)

    def _release(self, cover: int, queue: deque[Waiting]) -> None:
        while queue:
            covered = self._armed(cover)
            while queue and queue[0].end <= covered:
                waiting = queue.popleft()
                if cover & Cover.FLUSHED:
                    self.is_slow = time.monotonic() - waiting.since > SLOW_S
                waiting.request.reply(waiting.answer, waiting.payload)
            if not queue:
                return
            now = time.monotonic()
            if now < queue[0].since + self._soonest_s:
                return
            due, confirming = self._due(cover, queue[0])
            if now < due:
                return
            waiting = queue.popleft()
            request = waiting.request
            request.reply(confirming.told(waiting.answer, request.command), waiting.payload)

    def _due(self, cover: int, waiting: Waiting) -> tuple[float, Confirming]:
        """When it has waited for long enough, and for whom: the first that lets it wait so long."""
        found = [each for bit, each in self._confirming.items() if bit & cover]
        missing = [each for each in found if each.counter.value < waiting.end] or found
        first = min(missing, key=lambda each: each.timeout_s)
        return waiting.since + first.timeout_s, first

    def _armed(self, cover: int) -> int:
        """How far it has come; the actor's doorbell rings when it goes on."""
        cells = [each.counter for bit, each in self._confirming.items() if bit & cover]
        for cell in cells:
            cell.arm()
        return min(cell.value for cell in cells)

    def _on_alarm(self) -> None:
        self._alarm = None
        self.release()


def late(
    answer: Command, error: type[NotConfirmed], text: str, command: Command | None = None
) -> Command:
    """Return the answer with the error of its missing acks: the records are stored without them.
    An error of this machine's disk takes precedence over one of a slave. Sections of the command
    that need no acks keep their answers."""
    if isinstance(answer, HalvesPassed):
        return answer
    if isinstance(answer, TransactionsEnded):
        is_of_slaves = error in (FlushSlaveTimeout, SlaveNotAvailable)
        return answer if is_of_slaves else _ended_late(answer, text)
    if isinstance(answer, RecordsAppended):
        return RecordsAppended(error.code, answer.store_timestamp_ms, text, answer.already)
    if isinstance(answer, ProducerOpened):
        if answer.code in (0, FlushSlaveTimeout.code, SlaveNotAvailable.code):
            return ProducerOpened(error.code, answer.epoch, text)
        return answer
    assert isinstance(answer, SendResult)
    sections = command.sections if isinstance(command, SendMessages) else ()
    waits = [section.wait for section in sections] or [True] * len(answer.results)
    results = [
        msgspec.structs.replace(result, code=error.code, text=text)
        if wait and result.code in (0, FlushSlaveTimeout.code, SlaveNotAvailable.code)
        else result
        for result, wait in zip(answer.results, waits, strict=True)
    ]
    return SendResult(results, answer.store_timestamp_ms, answer.store_host)


def _ended_late(answer: TransactionsEnded, text: str) -> TransactionsEnded:
    """Nobody is told that a transaction has ended whose end a power cut, or the next master of a
    group, could take back. Slaves of a master without a group do not count when they are late: an
    end is no less stored than what it is about."""
    codes = [code or NotConfirmed.code for code in answer.codes]
    texts = [old or f"stored, but {text}" for old in answer.texts]
    return TransactionsEnded(codes, texts)
