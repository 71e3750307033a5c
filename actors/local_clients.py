"""What the first reader does for clients on this machine that read the store by themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from cometmq.actors.family import Family
from cometmq.actors.service import Request, ServiceActor
from cometmq.protocol.channel import Channel, Pending
from cometmq.protocol.commands import (
    Attended,
    AttendQueues,
    Command,
    GetLocal,
    LocalStore,
    WakeSleepers,
)
from cometmq.protocol.errors import BadRequest, CometError, NotMapped, ShuttingDown, SystemBusy
from cometmq.shm.control import CONTROL_FILE, Counter
from cometmq.shm.local import boot_id

LEASE_MS: Final = 15_000  # a client that has not asked again by then is not woken any more
WAIT_MS_MAX: Final = 5_000
QUEUES_MAX: Final = 1_024  # of one client
HELD_MAX: Final = 10_000


@dataclass(slots=True)
class Held:
    request: Request
    min_offset: int
    deadline: float  # time.monotonic()


class LocalClients:
    """Says where the store lies, passes on who sleeps, and tells of deletions.

    A client that lives holds a request here, which breaks when this process does: that is how it
    learns that the store may be another's now.
    """

    def __init__(self, actor: ServiceActor, family: Family, dispatcher: Channel) -> None:
        self._actor = actor
        self._family = family
        self._dispatcher = dispatcher
        self._is_first = family.role == "reader-0"
        self._nonce = family.control.meta.get("nonce")
        self._min = family.control.read(Counter.MIN_OFFSET)
        self._held: list[Held] = []

    def describe(self, command: GetLocal) -> Command:
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
            tail=self._family.tells_tail,
        )

    def attend(self, command: AttendQueues, request: Request) -> None:
        """Answered once the dispatcher knows, and then not before it has to be."""
        if not self._is_first or not self._nonce or command.nonce != self._nonce:
            raise NotMapped("the mapped store is not, or no longer, this broker's")
        if len(command.queues) > QUEUES_MAX:
            raise BadRequest(f"{len(command.queues)} queues, at most {QUEUES_MAX}")
        if len(self._held) >= HELD_MAX:
            raise SystemBusy(f"{HELD_MAX} clients are attended already")
        self._dispatcher.request(
            WakeSleepers(command.queues, LEASE_MS), on_done=partial(self._told, command, request)
        )

    def _told(self, command: AttendQueues, request: Request, pending: Pending) -> None:
        """In the channel's thread."""
        self._actor.call_soon(lambda: self._hold(command, request, pending))

    def _hold(self, command: AttendQueues, request: Request, pending: Pending) -> None:
        try:
            pending.result()
        except CometError as error:
            request.fail(error)
            return
        wait_s = min(max(command.wait_ms, 0), WAIT_MS_MAX) / 1000
        if not wait_s or self._min.value > command.min_offset:
            request.reply(Attended(self._min.value))
            return
        self._held.append(Held(request, command.min_offset, time.monotonic() + wait_s))
        self._actor.after(wait_s, self._end_overdue)

    def tell_of_deleted(self, log_min: int) -> None:
        """The log begins later now: who has older segments mapped is to let go."""
        self._answer(lambda held: held.min_offset < log_min)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        self._answer(lambda held: held.deadline <= now)

    def _answer(self, is_due: Callable[[Held], bool]) -> None:
        due = [held for held in self._held if is_due(held)]
        self._held = [held for held in self._held if not is_due(held)]
        for held in due:
            held.request.reply(Attended(self._min.value))

    def settle(self) -> None:
        for held in self._held:
            held.request.fail(ShuttingDown("the broker is shutting down"))
        self._held.clear()
