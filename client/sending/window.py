"""The in-flight window: batches that are not settled yet, and room for more of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from cometmq.client.sending.attempts import GRACE_S
from cometmq.client.sending.receipt import Batch
from cometmq.protocol.errors import CometError, SystemBusy


class Window:
    """Guarded by the producer's lock.

    Always: `in_flight_bytes` is the sum of the bodies of all batches that were `sent_off` and are
    not settled; every batch that somebody may wait for is in `unsettled`, in the order in which
    they were opened.

    Args:
        bytes_max: beyond that many bytes in flight, sending waits.
        timeout_s: how long a batch may take; sending waits a little longer than that.
    """

    def __init__(self, lock: Any, bytes_max: int, timeout_s: float) -> None:
        self.in_flight_bytes = 0
        self.unsettled: dict[Batch, None] = {}
        self._bytes_max = bytes_max
        self._wait_s = timeout_s + GRACE_S
        self._room = threading.Condition(lock)
        self._first_error: CometError | None = None  # of a batch that `flush` answers for
        self._closed = False

    @property
    def has_room(self) -> bool:
        return self.in_flight_bytes <= self._bytes_max

    def wait_for_room(self) -> None:
        """Sleep while more is on its way than allowed; under the lock, which it lets go.

        Raises SystemBusy when that lasts longer than a batch may take.
        """
        if self.has_room:
            return
        until = time.monotonic() + self._wait_s
        while not self.has_room and not self._closed:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise SystemBusy(
                    f"{self.in_flight_bytes} bytes of this producer are unanswered, over its "
                    f"max_in_flight_bytes; this message was not sent"
                )
            self._room.wait(left_s)

    def opened(self, batch: Batch) -> None:
        self.unsettled[batch] = None

    def dropped(self, batch: Batch) -> None:
        """It was never sent off, and nobody waits for it."""
        self.unsettled.pop(batch, None)

    def sent_off(self, batch: Batch) -> None:
        """It is closed: its bytes count."""
        self.in_flight_bytes += len(batch.body)

    def settled(self, batch: Batch, error: CometError | None) -> None:
        """It was answered, or given up. To be called before `batch.settle`, which drops bytes."""
        self.unsettled.pop(batch, None)
        self.in_flight_bytes -= len(batch.body)
        self._room.notify_all()
        if error is not None and batch.remembered and self._first_error is None:
            self._first_error = error

    def divided(self, batch: Batch, parts: Iterable[Batch]) -> None:
        """Replace a batch by its parts."""
        self.unsettled.pop(batch, None)
        self.in_flight_bytes -= len(batch.body)
        for part in parts:
            self.opened(part)
            self.sent_off(part)

    @property
    def failed(self) -> bool:
        """Whether `take_error` has one."""
        return self._first_error is not None

    def take_error(self) -> CometError | None:
        """The first error since this was last asked, of a batch that is remembered."""
        first, self._first_error = self._first_error, None
        return first

    def close(self) -> list[Batch]:
        """What is not settled, and never will be; whoever waits for room goes on."""
        self._closed = True
        left = list(self.unsettled)
        self.unsettled.clear()
        self._room.notify_all()
        return left
