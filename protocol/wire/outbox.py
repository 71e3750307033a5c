"""The outbox of a channel: requests that no connection has taken yet, oldest first."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from cometmq.protocol.wire.dealer import Dealer, Payload
from cometmq.protocol.wire.pending import Pending, PendingRequests

TELL_S: Final = 3.0  # how long what is told, and not asked, may wait for a connection


class Unsent(NamedTuple):
    """What waits for a connection."""

    head: bytes
    payload: Payload
    pending: Pending | None  # None: it is told
    until: float  # time.monotonic(); when it is told


class Outbox:
    """Guarded by the channel's lock, but for `drop`.

    Always: a request is in the outbox, or was handed over to a connection, or was given up; never
    two of these. Whoever takes it out of here decides which.
    """

    def __init__(self, dealer: Dealer, requests: PendingRequests) -> None:
        self._dealer = dealer
        self._requests = requests
        self._unsent: dict[int, Unsent] = {}

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._unsent

    def send(self, request_id: int, head: bytes, payload: Payload, pending: Pending | None) -> bool:
        """Hand it to the connection, behind what waits; False: it is kept until there is one.

        Args:
            pending: None: it is told, and not asked.
        """
        if not self._unsent and self._hand_over(head, payload, pending):
            return True
        until = time.monotonic() + TELL_S if pending is None else 0.0
        self._unsent[request_id] = Unsent(head, payload, pending, until)
        return False

    def drop(self, request_id: int) -> bool:
        """Whether it was still here: then it will never be sent."""
        return self._unsent.pop(request_id, None) is not None

    def send_waiting(self) -> None:
        """Send what is still wanted, if there is a connection."""
        if not self._dealer.is_connected:
            return
        for request_id in list(self._unsent):
            unsent = self._unsent.pop(request_id, None)
            if unsent is None or not self._is_wanted(request_id, unsent):
                continue
            if not self._hand_over(unsent.head, unsent.payload, unsent.pending):
                self._unsent = {request_id: unsent, **self._unsent}  # the next one tries again
                return

    def _hand_over(self, head: bytes, payload: Payload, pending: Pending | None) -> bool:
        if not self._dealer.send(head, payload):
            return False
        if pending is not None:
            pending.handed_over = True
        return True

    def _is_wanted(self, request_id: int, unsent: Unsent) -> bool:
        if unsent.pending is None:
            return time.monotonic() < unsent.until
        return request_id in self._requests
