"""Actors whose work waits for the disk: they do it in a second thread, and stay responsive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from cometmq.actors.runtime.request import Payload, Request
from cometmq.actors.runtime.service import ServiceActor, Timer
from cometmq.protocol.commands import Command, GetStatistics, Ping


class FromWorker(Request):
    """A request that the worker carries out. Only the actor's own thread touches its socket."""

    __slots__ = ("_actor", "_original")

    def __init__(self, original: Request, actor: DiskActor) -> None:
        super().__init__(original.command, original.payload, original.principal)
        self._original = original
        self._actor = actor

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        self._actor.call_home(partial(self._original.reply, answer, payload))

    @property
    def sender(self) -> bytes:
        return self._original.sender


class DiskActor(ServiceActor):
    """An actor that works in a second thread, the worker, so that the first hears whoever asks
    while the disk takes its time.

    The worker does one thing after the other: commands, doorbell, timers, calls and `settle`, so
    that a subclass need not know of it. In the actor's thread are `on_start`, before the worker
    begins, the answer to Ping, and `statistics`, which must not rely on anything being in step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._to_do: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._rung = False  # the doorbell has rung, and the worker has not come to it

    # --- from any thread ---

    def call_soon(self, action: Callable[[], object]) -> None:
        """Have the worker do it, after what it has to do already."""
        self._to_do.put(action)

    def call_home(self, action: Callable[[], object]) -> None:
        """Have the actor's own thread do it. Nothing if it ended."""
        super().call_soon(action)

    # --- the actor's thread ---

    def _actor_loop_setup(self) -> None:
        super()._actor_loop_setup()
        if self.start_error is None:
            self._worker = threading.Thread(target=self._work_off, name="worker", daemon=True)
            self._worker.start()

    def _work_through(self, requests: list[Request]) -> None:
        for request in requests:
            if isinstance(request.command, Ping | GetStatistics):
                self.handle(request)
            else:
                self.call_soon(partial(self.handle, FromWorker(request, self)))

    def _hear_doorbell(self) -> None:
        if not self._rung:
            self._rung = True
            self.call_soon(self._answer_doorbell)

    def _call_timer(self, timer: Timer) -> None:
        if not timer.waits:  # or it is behind by whole intervals
            timer.waits = True
            self.call_soon(partial(self._run_timer, timer))

    def _receive(self, message: Any) -> Any:
        if not isinstance(message, Command):
            return super()._receive(message)
        answer: Future[Any] = Future()  # asked within the process, which waits for it
        self.call_soon(partial(_settle, answer, partial(super()._receive, message)))
        return answer.result()

    def on_stop(self) -> None:
        if self._worker is not None:
            self._to_do.put(None)
            self._worker.join()
        super().on_stop()

    # --- the worker ---

    def _work_off(self) -> None:
        while (action := self._to_do.get()) is not None:
            try:
                self.guarded("its work", action)
            except AssertionError:
                self.report_broken_invariant()

    def _answer_doorbell(self) -> None:
        self._rung = False
        super()._hear_doorbell()

    def _run_timer(self, timer: Timer) -> None:
        timer.waits = False
        super()._call_timer(timer)

    def _add(self, timer: Timer) -> Timer:
        if threading.current_thread() is self._worker:
            self.call_home(partial(super()._add, timer))
            return timer
        return super()._add(timer)

    def stop_once_answered(self) -> None:
        self.call_soon(self.stop)


def _settle(answer: Future[Any], action: Callable[[], Any]) -> None:
    try:
        answer.set_result(action())
    except BaseException as error:
        answer.set_exception(error)
