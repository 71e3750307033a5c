"""Watches as every engine has them: one thread of a handle looks when it is told to.

An engine tells that something has moved (`poke`), and the thread looks what there is. Since a
notice may be lost (with a writer that was killed behind its change, with a server that hangs) it
also looks every CHECK_S by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from cometmq.actors.replication.engines.engine import View
from cometmq.actors.replication.engines.errors import EngineError, Here
from cometmq.protocol.retry import pause_s, spread

log = logging.getLogger(__name__)

CHECK_S: Final = 2.0

#: A group as it is, and in how many seconds it may change by itself (None: it is told of).
Look = Callable[[str], tuple[View, float | None]]


class Source(Protocol):
    """A descriptor by which others tell what has moved."""

    def fileno(self) -> int: ...

    def heard(self) -> Iterable[str]:
        """Groups that may have changed. Does not block."""
        ...


class GroupWatch:
    """See `engine.Watch`."""

    def __init__(self, group: str, on_close: Callable[[GroupWatch], None]) -> None:
        self.group = group
        self._here = Here(f"the watch of group {group}")
        self._on_close = on_close
        self._view: View | None = None
        self._lock = threading.Lock()
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def view(self) -> View | None:
        self._here.check()
        return self._view

    def fileno(self) -> int:
        self._here.check()
        return self._changed

    def take(self) -> View | None:
        self._here.check()
        with self._lock:
            if self._changed >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._changed)
            return self._view

    def offer(self, view: View) -> bool:
        """What was seen, oldest first; whether it differs from what was seen before."""
        with self._lock:
            before, self._view = self._view, view
            if before and (before.stored, before.alive) == (view.stored, view.alive):
                return False
            if self._changed >= 0:
                os.eventfd_write(self._changed, 1)
            return True

    def close(self) -> None:
        self._here.check()
        with self._lock:
            if self._changed < 0:
                return
            os.close(self._changed)
            self._changed = -1
        self._on_close(self)


class _Watched:
    """A group that somebody watches."""

    __slots__ = ("due", "failures", "watches")

    def __init__(self) -> None:
        self.watches: list[GroupWatch] = []
        self.due = 0.0  # time.monotonic() of the next look
        self.failures = 0


class Watcher:
    """The thread, which there is from the first watch on.

    Args:
        look: asks the engine. Raises EngineError.
        source: what others tell by, if not by `poke`.
        on_missed: told of a change that nobody had told of.
    """

    def __init__(
        self,
        where: str,
        look: Look,
        source: Source | None = None,
        on_missed: Callable[[], None] | None = None,
    ) -> None:
        self._where = where
        self._look = look
        self._source = source
        self._on_missed = on_missed
        self._groups: dict[str, _Watched] = {}
        self._told: set[str] = set()  # looked at although their time has not come
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="engine-watcher", daemon=True)
        self._thread.start()

    def watch(self, group: str) -> GroupWatch:
        watch = GroupWatch(group, self._remove)
        with self._lock:
            self._groups.setdefault(group, _Watched()).watches.append(watch)
        self.poke(group)
        return watch

    def poke(self, group: str | None = None) -> None:
        """Something may have changed; None: anywhere. From any thread."""
        with self._lock:
            if not self._ending:
                self._told |= set(self._groups) if group is None else {group}
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        with self._lock:
            self._ending = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            left = [watch for group in self._groups.values() for watch in group.watches]
        for watch in left:
            watch.close()
        os.close(self._wake)

    def _remove(self, watch: GroupWatch) -> None:
        with self._lock:
            group = self._groups[watch.group]
            group.watches.remove(watch)
            if not group.watches:
                del self._groups[watch.group]

    # --- in its thread ---

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._source is not None:
            poller.register(self._source.fileno(), select.POLLIN)
        while not self._ending:
            poller.poll(self._sleep_ms())
            for group, watched, told in self._due():
                if self._ending:
                    return
                self._look_at(group, watched, told)

    def _sleep_ms(self) -> float:
        with self._lock:
            due = min((each.due for each in self._groups.values()), default=None)
        return -1 if due is None else max(0.0, due - time.monotonic()) * 1000 + 1

    def _due(self) -> list[tuple[str, _Watched, bool]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        heard = set() if self._source is None else set(self._source.heard())
        now = time.monotonic()
        with self._lock:
            told, self._told = self._told | heard, set()
            return [
                (group, watched, group in told)
                for group, watched in self._groups.items()
                if group in told or watched.due <= now
            ]

    def _look_at(self, group: str, watched: _Watched, told: bool) -> None:
        expected = watched.failures > 0 or told
        try:
            view, alone_in_s = self._look(group)
        except Exception as error:
            watched.failures += 1
            watched.due = time.monotonic() + spread(pause_s(watched.failures))
            if watched.failures == 1 and not self._ending:
                trouble = error if isinstance(error, EngineError) else repr(error)
                log.warning("group %s cannot be seen: %s", group, trouble)
            return
        if watched.failures:
            log.info("group %s is seen again in %s", group, self._where)
        watched.failures = 0
        wait = CHECK_S if alone_in_s is None else min(CHECK_S, alone_in_s)
        watched.due = time.monotonic() + wait
        with self._lock:
            watches = list(watched.watches)
        first = any(watch.view is None for watch in watches)
        moved = [watch for watch in watches if watch.offer(view)]
        if moved and not (expected or first or alone_in_s is not None) and self._on_missed:
            self._on_missed()
