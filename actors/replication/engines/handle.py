"""What every engine's handle does alike: arguments, sessions, watches, the end."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from cometmq.actors.replication.engines.engine import (
    BROKER_ID_MAX,
    RECORD_BYTES_MAX,
    TIMEOUT_S,
    TTL_S_MAX,
    TTL_S_MIN,
    Outcome,
    Stored,
    View,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineError, Here, RecordTooLarge
from cometmq.actors.replication.engines.leased import Lease, LeasedSession
from cometmq.actors.replication.engines.watching import GroupWatch, Source, Watcher
from cometmq.protocol.errors import ArgumentIllegal
from cometmq.protocol.names import check_group

log = logging.getLogger(__name__)


class Handle(ABC):
    """See `engine.Engine`.

    Args:
        where: for messages: what it is and where.
        timeout_s: of a call.
    """

    def __init__(self, where: str, timeout_s: float = TIMEOUT_S) -> None:
        self.where = where
        self.timeout_s = timeout_s
        self._here = Here(where)
        self._closed = False
        self._lock = threading.Lock()  # around the three below
        self._sessions: set[LeasedSession] = set()
        self._watcher: Watcher | None = None

    # --- an engine's own ---

    @abstractmethod
    def _get(self, group: str) -> Stored | None: ...

    @abstractmethod
    def _change(self, group: str, expected: int | None, record: bytes | None) -> Outcome:
        """As `cas`; None: delete."""

    @abstractmethod
    def _alive(self, group: str) -> frozenset[int]: ...

    @abstractmethod
    def _lease(self, group: str, broker_id: int, ttl_s: float) -> Lease:
        """Raises SessionHeld, EngineUnreachable."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of everything; sessions and watches have ended."""

    def _look(self, group: str) -> tuple[View, float | None]:
        """For watches: see watching.py."""
        at_s = now_s()
        return View(self._get(group), self._alive(group), at_s), None

    def _source(self) -> Source | None:
        """What tells watches; called once, before the first."""
        return None

    def _missed(self) -> None:
        """A change was seen that nobody had told of; an engine may have something to mend."""
        log.debug("%s: a change was not told of", self.where)

    def _poke(self, group: str | None = None) -> None:
        """Have watches look."""
        watcher = self._watcher
        if watcher is not None:
            watcher.poke(group)

    # --- as in engine.Engine ---

    def get(self, group: str) -> Stored | None:
        self._check(group)
        return self._get(group)

    def cas(self, group: str, expected: int | None, record: bytes) -> Outcome:
        self._check(group)
        if not isinstance(record, bytes):
            raise ArgumentIllegal(f"record = {type(record).__name__}: a record is bytes")
        if len(record) > RECORD_BYTES_MAX:
            raise RecordTooLarge(
                f"record of group {group}: {len(record)} bytes, at most {RECORD_BYTES_MAX}"
            )
        if expected is not None:
            _check_version(expected)
        return self._change(group, expected, record)

    def delete(self, group: str, expected: int) -> Outcome:
        self._check(group)
        _check_version(expected)
        return self._change(group, expected, None)

    def alive(self, group: str) -> frozenset[int]:
        self._check(group)
        return self._alive(group)

    def open_session(self, group: str, broker_id: int, ttl_s: float) -> LeasedSession:
        self._check(group)
        if type(broker_id) is not int or not 0 <= broker_id <= BROKER_ID_MAX:
            raise ArgumentIllegal(f"broker_id = {broker_id!r:.40}: 0 to {BROKER_ID_MAX}")
        if type(ttl_s) not in (int, float) or not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise ArgumentIllegal(f"ttl_s = {ttl_s!r:.40}: {TTL_S_MIN} to {TTL_S_MAX} seconds")
        asked_at_s = now_s()
        lease = self._lease(group, broker_id, ttl_s)
        with self._lock:
            if not self._closed:
                session = LeasedSession(lease, group, broker_id, asked_at_s, self._forget)
                self._sessions.add(session)
                return session
        lease.release()
        raise EngineError(f"{self.where} is closed")

    def watch(self, group: str) -> GroupWatch:
        self._check(group)
        with self._lock:
            if self._closed:
                raise EngineError(f"{self.where} is closed")
            if self._watcher is None:
                self._watcher = Watcher(self.where, self._look, self._source(), self._missed)
            return self._watcher.watch(group)

    def close(self) -> None:
        self._here.check()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions, watcher = list(self._sessions), self._watcher
        for session in sessions:
            session.close()
        if watcher is not None:
            watcher.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, group: str) -> None:
        self._here.check()
        if self._closed:
            raise EngineError(f"{self.where} is closed")
        check_group(group)

    def _forget(self, session: LeasedSession) -> None:
        with self._lock:
            self._sessions.discard(session)


def _check_version(expected: int) -> None:
    if type(expected) is not int or not 0 < expected < 2**63:
        raise ArgumentIllegal(f"expected = {expected!r:.40}: a version that the engine has given")
