"""The actor's loop: a pykka actor whose mailbox is made of sockets, which no failure ends.

There is one loop, pykka's own. Its inbox (inbox.py) waits for everything an actor can be woken by:
commands on its ROUTER sockets, pykka messages from its own process, its doorbell, answers on
sockets of its own, a timer.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import pykka

from cometmq.actors.runtime.guard import Unforeseen, explained
from cometmq.actors.runtime.inbox import (
    Call,
    DoorbellRang,
    Drained,
    Readable,
    SocketInbox,
    TimerDue,
)
from cometmq.actors.runtime.request import Request
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import NotConfirmed, UnknownCommand

log = logging.getLogger(__name__)

RETRY_S: Final = 1  # after a handler that failed and may not have come to see to its next call


class Timer:
    """Something to do in the actor's thread when its time has come."""

    __slots__ = ("action", "due", "interval_s", "waits")

    def __init__(self, due: float, interval_s: float | None, action: Callable[[], None]) -> None:
        self.due = due  # time.monotonic()
        self.interval_s = interval_s  # None: once
        self.action: Callable[[], None] | None = action
        self.waits = False  # its time has come, and another thread is to call it

    def cancel(self) -> None:
        """It will not be called; its place is cleared when its time comes."""
        self.action = None

    def __lt__(self, other: Timer) -> bool:
        return self.due < other.due


class LoopActor(pykka.ThreadingActor):
    """Whatever it is woken by fails (a timer, a doorbell, a call), it is logged, and the actor
    lives on. But an AssertionError, a broken invariant, ends the process, and the supervisor
    starts it again (guard.py).

    What takes long goes in steps (`call_soon`): between two of them it hears its sockets.
    """

    role: ClassVar[str] = "service"

    inbox: SocketInbox

    def __init__(self) -> None:
        super().__init__()
        self.inbox = self.actor_inbox  # type: ignore[assignment]  # our own, from below
        self._timers: list[Timer] = []  # a heap
        self.started = threading.Event()  # on_start has returned, or failed with `start_error`
        self.start_error: Exception | None = None
        self.ended = threading.Event()  # the loop is over, its sockets are closed
        # For who waits for other things as well: called in this actor's thread after either.
        self.on_milestone: Callable[[], object] = lambda: None

    @staticmethod
    def _create_actor_inbox() -> Any:
        return SocketInbox()

    def _actor_loop(self) -> None:
        try:
            super()._actor_loop()
        except Exception:  # of the inbox: pykka guards what it has handed out
            self._handle_failure(*sys.exc_info())
            self.on_failure(*sys.exc_info())
        finally:
            self.ended.set()
            self.on_milestone()

    def _actor_loop_setup(self) -> None:
        try:
            self.on_start()
        except Exception as error:
            self.start_error = error
            self.actor_stopped.set()
        finally:
            self.started.set()
            self.on_milestone()

    # --- for subclasses ---

    def every(self, interval_s: float, action: Callable[[], None]) -> Timer:
        """Call `action` in this actor's thread again and again."""
        return self._add(Timer(time.monotonic() + interval_s, interval_s, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Call `action` once, unless the timer is cancelled before."""
        return self._add(Timer(time.monotonic() + delay_s, None, action))

    def call_soon(self, action: Callable[[], object]) -> None:
        """Call `action` in this actor's thread; any thread may ask for it. Nothing if it ended."""
        with contextlib.suppress(pykka.ActorDeadError):
            self.actor_ref.tell(Call(action))

    def on_doorbell(self) -> None:
        """A counter that this actor armed a wake-up for has moved."""

    def on_readable(self, source: Any) -> None:
        """What was registered with `inbox.listen_to` can be read."""

    def on_requests(self, requests: list[Request]) -> None:
        """Everything the sockets held."""
        raise NotImplementedError

    def answer_within(self, command: Command) -> Command | None:
        """A command of this very process, where an answer is what the handler returns."""
        raise UnknownCommand(f"{self.role} does not take {type(command).__name__}")

    def on_broken_invariant(self) -> None:
        """Nothing that this actor knows can be relied on: it ends at once, with its process."""
        os._exit(70)

    # --- the loop's side ---

    def on_receive(self, message: Any) -> Any:
        try:
            return self._receive(message)
        except AssertionError:
            self.report_broken_invariant()

    def report_broken_invariant(self) -> None:
        """The exception that is being handled says which."""
        log.critical("%s: broken invariant\n%s", self.role, traceback.format_exc())
        self.on_broken_invariant()

    def _receive(self, message: Any) -> Any:
        if isinstance(message, Drained):
            self._work_through(message.requests)
        elif isinstance(message, DoorbellRang):
            self._hear_doorbell()
        elif isinstance(message, TimerDue):
            self._run_timers()
        elif isinstance(message, Readable):
            self._hear_source(message.source)
        elif isinstance(message, Call):
            self.guarded("a call", message.action)
        elif isinstance(message, Command):
            return self.answer_within(message)
        else:
            kind = type(message).__name__
            raise UnknownCommand(f"{type(self).__name__} takes commands, not {kind}")
        return None

    def guarded(self, what: str, action: Callable[[], object]) -> bool:
        """Call it; False if it failed, which is logged. A broken invariant is passed on."""
        try:
            action()
        except Exception as caught:
            error = explained(caught, "%s: %s failed", self.role, what)
            if not isinstance(error, Unforeseen):
                log.warning("%s: %s", self.role, error)
            return False
        return True

    def _work_through(self, requests: list[Request]) -> None:
        """What fails outside of the guard of a single request is answered to all of them: who was
        answered before ignores it."""
        try:
            self.on_requests(requests)
        except Exception as caught:
            error = explained(caught, "%s: %d requests failed", self.role, len(requests))
            for request in requests:
                request.fail(NotConfirmed(f"{error}; it may be done"))

    def _hear_doorbell(self) -> None:
        """It may have failed before it saw to being woken again."""
        if not self.guarded("its doorbell", self.on_doorbell):
            self.after(RETRY_S, self._hear_doorbell)

    def _hear_source(self, source: Any) -> None:
        """It may have failed before it read anything, and would be called again at once."""
        if self.guarded("reading", partial(self.on_readable, source)):
            return
        if self.inbox.is_listening_to(source):
            self.inbox.forget(source)
            self.after(RETRY_S, partial(self.inbox.listen_to, source))

    def _add(self, timer: Timer) -> Timer:
        heapq.heappush(self._timers, timer)
        self._set_alarm()
        return timer

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            timer = heapq.heappop(self._timers)
            if timer.action is not None and timer.interval_s is not None:
                timer.due = now + timer.interval_s
                heapq.heappush(self._timers, timer)
            self._call_timer(timer)
        self._set_alarm()

    def _call_timer(self, timer: Timer) -> None:
        if timer.action is not None:  # else it was cancelled
            self.guarded("a timer", timer.action)

    def _set_alarm(self) -> None:
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        self.inbox.wake_at = self._timers[0].due if self._timers else None
