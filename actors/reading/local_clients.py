"""Mapped clients of this machine: what the first reader tells those that read the store."""

from __future__ import annotations

import os
import time
from typing import Final

from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import Attended, AttendQueues, Command, GetLocal, LocalStore
from cometmq.protocol.errors import CometError, NotMapped
from cometmq.shm.live.control import CONTROL_FILE, Counter
from cometmq.shm.os.processes import boot_id

SILENT_S: Final = 15.0  # a client that has not asked again by then is not woken any more
WAIT_MS_MAX: Final = 5_000
HELD_MAX: Final = 10_000


class Attention(HeldRequest[None]):
    """An AttendQueues, and where the log began as its client knows."""

    __slots__ = ("min_offset",)

    def __init__(self, request: Request, min_offset: int, deadline: float) -> None:
        super().__init__(None, request, deadline)
        self.min_offset = min_offset


class LocalClients:
    """Says where the store lies, and tells of deletions.

    A client that lives holds a request here, which breaks when this process does: that is how it
    learns that the store may be another's now. While there is one that may only read the store,
    which cannot say when it sleeps, all are woken without being asked for (`WakeWords.silent`).
    """

    def __init__(self, actor: ServiceActor, family: Family) -> None:
        self._actor = actor
        self._family = family
        self._is_first = family.role == "reader-0"
        self._nonce = family.control.meta.get("nonce")
        self._min = family.control.read(Counter.MIN_OFFSET)
        self._held: TimedRequests[None, Attention] = TimedRequests(
            actor, "local clients", HELD_MAX, lambda _held: Attended(self._min.value)
        )
        self._silent_until = 0.0  # time.monotonic()

    def on_get_local(self, command: GetLocal, _request: Request) -> Command:
        if not self._is_first:
            raise NotMapped("ask the first reader")
        if not command.boot_id or command.boot_id != boot_id():
            raise NotMapped("the broker is on another machine")
        settings, store = self._family.settings, self._family.store
        control = os.stat(store / CONTROL_FILE)
        return LocalStore(
            str(store.resolve()),
            control.st_dev,
            control.st_ino,
            settings.mapped_file_size_commit_log_bytes,
            settings.mapped_file_size_consume_queue_bytes,
            tail=True,
            cover=int(self._family.cover),
        )

    def on_attend_queues(self, command: AttendQueues, request: Request) -> Command | None:
        """Answered at once, or not before it has to be."""
        if not self._is_first or not self._nonce or command.nonce != self._nonce:
            raise NotMapped("the mapped store is not, or no longer, this broker's")
        if command.silent:
            self._hear_silent()
        wait_s = min(max(command.wait_ms, 0), WAIT_MS_MAX) / 1000
        if not wait_s or self._min.value > command.min_offset:
            return Attended(self._min.value)
        self._held.add(Attention(request, command.min_offset, time.monotonic() + wait_s))
        return None

    def _hear_silent(self) -> None:
        words = self._family.control.wake_words
        assert words is not None
        if not words.silent or not self._silent_until:
            words.silent = True
            self._actor.after(SILENT_S, self._end_silence)
        self._silent_until = time.monotonic() + SILENT_S

    def _end_silence(self) -> None:
        left_s = self._silent_until - time.monotonic()
        if left_s > 0:
            self._actor.after(left_s, self._end_silence)
            return
        words = self._family.control.wake_words
        assert words is not None
        words.silent, self._silent_until = False, 0.0

    def tell_of_deleted(self, log_min: int) -> None:
        """The log begins later now: who has older segments mapped is to let go."""
        for held in self._held:
            if held.min_offset < log_min:
                self._held.release(held).reply(Attended(self._min.value))

    def settle(self, error: CometError) -> None:
        self._held.fail_all(error)
