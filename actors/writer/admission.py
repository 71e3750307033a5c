"""Admission control: whether a send is taken, and if not, why."""

from __future__ import annotations

import logging
from typing import Final

from cometmq.actors.runtime.gate import Gate
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import CometError, ShuttingDown, SystemBusy

# What is drained so soon after a put was sent while it lasted.
CAME_MEANWHILE_S: Final = 0.1

log = logging.getLogger(__name__)


class Admission:
    """Decides before anything is stored, so that what is refused may simply come again.

    Sends that came while a put hung cannot be told apart by age: their time in a socket is not
    known. All that the sockets held when it was over are refused once, as RocketMQ refuses what
    comes while a put holds its lock for too long.

    Args:
        gate: of a master in a group, which is asked once for each group of sends.
    """

    def __init__(self, settings: BrokerSettings, gate: Gate | None = None) -> None:
        self._gate = gate
        self._refusal: CometError | None = None  # of the gate, for this group of sends
        self._bytes_max = settings.max_in_flight_send_bytes
        self._wait_max_s = settings.wait_time_in_send_queue_ms / 1000
        self._put_max_s = settings.os_page_cache_busy_time_out_ms / 1000
        self._closed: CometError | None = None
        self._last_put_s = 0.0
        self._last_end = 0.0  # time.monotonic()
        self._busy: SystemBusy | None = None  # for the group of sends that is being looked at

    # --- for as long as it lasts ---

    def close(self, reason: CometError) -> None:
        """Take nothing until `open`; a broker that is shutting down does not open again."""
        if not isinstance(self._closed, ShuttingDown):
            if self._closed is None and not isinstance(reason, ShuttingDown):
                log.warning("writes are refused: %s", reason)
            self._closed = reason

    def open(self) -> None:
        if self._closed is not None and not isinstance(self._closed, ShuttingDown):
            log.warning("writes are taken")
            self._closed = None

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    # --- for a group of sends ---

    def begin_group(self, now: float, waits_since: float | None) -> None:
        """Before a group is stored.

        Args:
            now: time.monotonic(), as all times here.
            waits_since: when the first of those that wait for the disk was stored.
        """
        self._busy = None
        if self._gate is not None:
            self._refusal = self._gate.why_not_stored()
        oldest_wait_s = 0.0 if waits_since is None else now - waits_since
        if self._last_put_s > self._put_max_s and now < self._last_end + CAME_MEANWHILE_S:
            self._busy = SystemBusy(
                f"the page cache is busy: the put before took {self._last_put_s * 1000:.0f} ms, "
                f"at most {self._put_max_s * 1000:.0f} (osPageCacheBusyTimeOutMills): try again"
            )
        elif oldest_wait_s > self._wait_max_s:
            self._busy = SystemBusy(
                f"the disk is busy: a send has waited for it for {oldest_wait_s * 1000:.0f} ms, "
                f"at most {self._wait_max_s * 1000:.0f} (waitTimeMillsInSendQueue): try again"
            )
        if self._busy is not None:
            log.warning("sends are refused: %s", self._busy)

    def end_group(self, began: float, now: float) -> None:
        self._last_put_s, self._last_end = now - began, now

    def check(self, waiting_bytes: int) -> None:
        """Raises the reason why a batch is not stored.

        Args:
            waiting_bytes: what is stored and waits to be confirmed.
        """
        if self._busy is not None and self._closed is None:
            raise self._busy
        self.check_lasting(waiting_bytes)

    def check_alone(self) -> None:
        """`check` for a command that is in no group of sends."""
        if self._gate is not None:
            self._refusal = self._gate.why_not_stored()
        self.check(0)

    def check_lasting(self, waiting_bytes: int) -> None:
        """`check` for who is in no group: a thread that had to wait for the put before its own."""
        if self._closed is not None:
            raise self._closed
        if self._refusal is not None:
            raise self._refusal
        if waiting_bytes > self._bytes_max:
            raise SystemBusy(
                f"{waiting_bytes} bytes wait for the disk, or for slaves, at most "
                f"{self._bytes_max} (maxInFlightSendBytes): try again"
            )
