"""The futures of `send_async`, and the thread that calls back."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from cometmq.client.sending.receipt import Receipt
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.steady import Steady
from cometmq.protocol.wire.uninterrupted import uninterrupted_class

log = logging.getLogger(__name__)

CLOSE_S: Final = 30.0  # for what users wrote

Callback = Callable[[Receipt | None, CometError | None], None]


class Callbacks:
    """Runs what users wrote, away from the thread that receives answers: it may send and wait.

    The thread is there from the first call on.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = Steady("cometmq producer callbacks", self._turn)

    def put(self, call: Callable[[], object]) -> None:
        self._thread.start()
        self._calls.put(call)

    def close(self) -> None:
        """Returns when everything that was put before has been called, or after 30 s."""
        self._calls.put(None)
        if not self._thread.join(CLOSE_S):
            log.error("callbacks of send_async take over %g s; not waited for", CLOSE_S)

    def _turn(self) -> bool:
        call = self._calls.get()
        if call is None:
            return False
        try:
            call()
        except Exception:
            log.exception("a callback of send_async failed")
        return True


@uninterrupted_class()
class Sent(Future[Receipt]):
    """Gets its receipt in the thread that received the answer, which must not be held up: whoever
    waits is woken there, and what is to be called is called by `callbacks`."""

    def __init__(self, callbacks: Callbacks, callback: Callback | None) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._callback = callback
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[Receipt]], Any]) -> None:
        super().add_done_callback(lambda future: self._callbacks.put(partial(fn, future)))

    def settle(self, receipt: Receipt) -> None:
        """Its batch has been answered."""
        error: CometError | None = None
        try:
            receipt.wait()
        except CometError as raised:
            error = raised
            self.set_exception(error)
        else:
            self.set_result(receipt)
        if self._callback is not None:
            told = None if error is not None else receipt
            self._callbacks.put(partial(self._callback, told, error))
