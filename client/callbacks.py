"""The thread that serves the futures and callbacks of `send_async`."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from cometmq.client.receipt import Receipt
from cometmq.protocol.errors import CometError

log = logging.getLogger(__name__)

Callback = Callable[[Receipt | None, CometError | None], None]
Entry = tuple[Future[Receipt], Callback | None, Receipt]


class Callbacks:
    """Runs what users wrote, away from the thread that receives answers: it may send and wait."""

    def __init__(self) -> None:
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="cometmq producer callbacks", daemon=True
        )
        self._thread.start()

    def put(self, entry: Entry) -> None:
        self._entries.put(entry)

    def close(self) -> None:
        """Returns when everything that was put before has been served."""
        self._entries.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            _serve(*entry)


def _serve(future: Future[Receipt], callback: Callback | None, receipt: Receipt) -> None:
    error: CometError | None = None
    try:
        receipt.wait()
    except CometError as raised:
        error = raised
        future.set_exception(error)
    else:
        future.set_result(receipt)
    if callback is not None:
        try:
            callback(None if error is not None else receipt, error)
        except Exception:
            log.exception("a callback of send_async failed")
