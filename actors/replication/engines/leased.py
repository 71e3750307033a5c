"""A session as every engine has it: a lease that a thread renews, and a clock that is looked at."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol

from cometmq.actors.replication.engines.engine import Holding, now_s
from cometmq.actors.replication.engines.errors import EngineError, Here
from cometmq.protocol.retry import pause_s, spread

log = logging.getLogger(__name__)

RENEWALS: Final = 4  # in a time to live
_LEAST_S: Final = 0.05  # to renew in, however little is left


class Lease(Protocol):
    """An engine's side of a session."""

    ttl_s: float  # granted; nobody is told of its end before that has passed since it was asked for

    def renew(self, asked_at_s: float, timeout_s: float) -> float | None:
        """Until when nobody is told of its end, if it is renewed at that `now_s`; None: the engine
        says that it has ended. Raises EngineUnreachable."""
        ...

    def release(self) -> None:
        """End it, if the engine can be reached. Raises EngineError."""
        ...


class LeasedSession:
    """See `engine.Session`.

    Args:
        asked_at_s: `now_s` before the lease was asked for.
        on_close: told once, when it is closed.
    """

    def __init__(
        self,
        lease: Lease,
        group: str,
        broker_id: int,
        asked_at_s: float,
        on_close: Callable[[LeasedSession], None],
    ) -> None:
        self.group = group
        self.broker_id = broker_id
        self.ttl_s = lease.ttl_s
        self._lease = lease
        self._on_close = on_close
        self._name = f"the session of broker {broker_id} in group {group}"
        self._here = Here(self._name)
        self._held_until_s = asked_at_s + lease.ttl_s
        self._lost = False
        self._told = Holding.HELD
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # around what `close` takes away
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"session-{broker_id}", daemon=True)
        self._thread.start()

    @property
    def holding(self) -> Holding:
        self._here.check()
        if self._lost or self._closing.is_set():
            return Holding.LOST
        return Holding.HELD if now_s() < self._held_until_s else Holding.IN_DOUBT

    def left_s(self) -> float:
        if self.holding is not Holding.HELD:
            return 0.0
        return max(0.0, self._held_until_s - now_s())

    def fileno(self) -> int:
        self._here.check()
        return self._changed

    def clear(self) -> None:
        self._here.check()
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._changed >= 0:
                os.eventfd_read(self._changed)

    def close(self) -> None:
        self._here.check()
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._thread.join()
        try:
            self._lease.release()
        except EngineError as error:
            log.warning("%s ends by its time: %s", self._name, error)
        with self._lock:
            os.close(self._changed)
            self._changed = -1
        self._on_close(self)

    # --- in its thread ---

    def _run(self) -> None:
        failures, pause = 0, self.ttl_s / RENEWALS
        while not self._closing.wait(pause):
            try:
                self._renew()
            except Exception as error:
                failures += 1
                pause = min(self.ttl_s / RENEWALS, spread(pause_s(failures)))
                if failures == 1:
                    log.warning("%s was not renewed: %s", self._name, error)
            else:
                failures, pause = 0, self.ttl_s / RENEWALS
            self._tell()
            if self._lost:
                return

    def _renew(self) -> None:
        asked_at_s = now_s()
        # No longer than it is held: that it is in doubt is told when it is.
        quarter = self.ttl_s / RENEWALS
        left = self._held_until_s - asked_at_s
        until_s = self._lease.renew(asked_at_s, max(_LEAST_S, left) if left > 0 else quarter)
        if until_s is None:
            self._lost = True
        else:
            self._held_until_s = until_s

    def _tell(self) -> None:
        holding = Holding.LOST if self._lost else self.holding
        if holding is self._told:
            return
        level = logging.INFO if holding is Holding.HELD else logging.WARNING
        log.log(level, "%s is %s", self._name, holding.value)
        self._told = holding
        with self._lock:
            if self._changed >= 0:
                os.eventfd_write(self._changed, 1)
