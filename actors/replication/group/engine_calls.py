"""The group's record as the `ha` process sees it: asked for in threads, answered in the actor's.

Calls of an engine block, for its time-out at most. Each is made in a thread of its own, which there
are few of: a read a second, and one for each change of the record or of the sessions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from cometmq.actors.replication.core.actions import Cas, Get
from cometmq.actors.replication.core.record import (
    GroupRecord,
    Life,
    decode_record,
    encode_record,
)
from cometmq.actors.replication.engines.engine import (
    Applied,
    Engine,
    Holding,
    Refused,
    Session,
    Stored,
    Watch,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineError
from cometmq.actors.replication.group.sessions import session_id
from cometmq.actors.runtime.event_log import EventLog
from cometmq.protocol.errors import CometError, ConfigError
from cometmq.protocol.retry import pause_s, spread

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_AGAIN_MOST_S: Final = 1.0


def _unforeseen(error: Exception) -> Exception:
    log.error("a call of the engine failed", exc_info=error)
    return error


class EngineListener(Protocol):
    """Who is told what has come, in the actor's thread; as the core's events of the same names."""

    def learned(self, version: int, record: GroupRecord | None, number: int = 0) -> None: ...

    def cas_applied(self, ticket: int, version: int) -> None: ...

    def cas_refused(self, ticket: int, version: int, record: GroupRecord) -> None: ...

    def cas_unknown(self, ticket: int) -> None: ...

    def session(self, until: float | None) -> None: ...

    def sessions(self, alive: Iterable[Life]) -> None: ...


class EngineCalls:
    """One engine, one group, and the session of one life.

    Args:
        open_engine: opens a handle; blocks.
        told: called in the actor's thread alone.
        call_soon: has a call made there.
        after: has a call made there after so many seconds.
        listen_to: has `on_readable` called there once a descriptor can be read.
    """

    def __init__(
        self,
        group: str,
        ttl_s: float,
        open_engine: Callable[[], Engine],
        told: EngineListener,
        *,
        call_soon: Callable[[Callable[[], object]], object],
        after: Callable[[float, Callable[[], None]], object],
        listen_to: Callable[[int], None],
    ) -> None:
        self._group = group
        self._ttl_s = ttl_s
        self._open_engine = open_engine
        self._told = told
        self._call_soon = call_soon
        self._after = after
        self._listen_to = listen_to
        self._engine: Engine | None = None
        self._watch: Watch | None = None
        self._session: Session | None = None
        self._life: Life | None = None
        self._holds_soon = False  # a session is being opened
        self.is_away = False  # and is to have none
        self._ids: frozenset[int] = frozenset()  # that have a session
        self._record: GroupRecord | None = None
        self._failures = 0
        self._closed = False
        self._said = EventLog()

    @property
    def record(self) -> GroupRecord | None:
        """The latest that was heard of; the core may be busy, and not know it."""
        return self._record

    @property
    def watched_fd(self) -> int:
        return -1 if self._watch is None else self._watch.fileno()

    # --- opening ---

    def open(self, life: Life) -> None:
        """Have the engine opened, the group watched, and say that this life is there; again and
        again until it succeeds."""
        self._life = life
        self._in_thread(self._open, self._opened)

    def live_as(self, life: Life) -> None:
        """The life has another number now: an empty store goes on behind its predecessor's lives.
        Its session stands for nobody that the record names."""
        if life == self._life or self._life is None:
            return
        self._life = life
        session, self._session = self._session, None
        if session is not None:
            self._in_thread(session.close, lambda _result: None)
        if self._engine is not None:
            self._hold()

    def _open(self) -> tuple[Engine, Watch]:
        engine = self._open_engine()
        try:
            return engine, engine.watch(self._group)
        except Exception:
            engine.close()
            raise

    def _opened(self, found: tuple[Engine, Watch] | Exception) -> None:
        if isinstance(found, Exception):
            self._failures += 1
            self._said.warn("open", "the engine cannot be opened: %s", found)
            pause = pause_s(self._failures, most_s=OPEN_AGAIN_MOST_S)
            self._after(spread(pause), lambda: self._in_thread(self._open, self._opened))
            return
        self._failures = 0
        self._engine, self._watch = found
        self._listen_to(self._watch.fileno())
        self.look()
        self._hold()

    # --- what is watched ---

    def look(self) -> None:
        """What the watch has seen."""
        if self._watch is None:
            return
        view = self._watch.take()
        if view is None:
            return
        self._ids = view.alive
        if view.stored is not None:
            self._tell_record(view.stored, 0)
        self._tell_alive()

    def _tell_record(self, stored: Stored, number: int) -> None:
        record = self._decoded(stored)
        if record is not None:
            self._told.learned(stored.version, record, number)

    def _decoded(self, stored: Stored) -> GroupRecord | None:
        try:
            record = decode_record(stored.record)
        except ConfigError as error:
            self._said.warn("record", "the record of group %s is none: %s", self._group, error)
            return None
        self._record = record
        return record

    @property
    def alive(self) -> frozenset[Life]:
        """Lives that the record names and that have a session; and our own."""
        lives = [] if self._record is None else map(self._record.life, self._record.replicas)
        known = {life for life in (*lives, self._life) if life is not None}
        return frozenset(life for life in known if session_id(life) in self._ids)

    def _tell_alive(self) -> None:
        self._told.sessions(self.alive)

    # --- our session ---

    def tick(self) -> None:
        """Say until when our session holds."""
        session = self._session
        if session is None:
            return
        holding = session.holding
        if holding is Holding.HELD:
            self._told.session(now_s() + session.left_s())
        elif holding is Holding.LOST:
            log.warning("the session with the engine is lost; another one is opened")
            self._session = None
            self._told.session(None)
            self._in_thread(session.close, lambda _result: None)
            self._hold()

    def leave(self) -> None:
        """Give up the session: the others see this replica as away, until `come_back`."""
        self.is_away = True
        session, self._session = self._session, None
        self._told.session(None)
        if session is not None:
            self._in_thread(session.close, lambda _result: None)

    def come_back(self) -> None:
        self.is_away = False
        if self._engine is not None:
            self._hold()

    def _hold(self) -> None:
        if self._holds_soon or self._closed or self.is_away:
            return
        self._holds_soon = True
        assert self._life is not None
        life = self._life

        def hold() -> Session:
            assert self._engine is not None
            return self._engine.open_session(self._group, session_id(life), self._ttl_s)

        self._in_thread(hold, lambda found: self._held(life, found))

    def _held(self, life: Life, found: Session | Exception) -> None:
        self._holds_soon = False
        if self._closed:
            return
        if life != self._life or self.is_away:
            if not isinstance(found, Exception):
                self._in_thread(found.close, lambda _result: None)
            self._hold()
            return
        if isinstance(found, Exception):
            self._failures += 1
            self._said.warn("session", "no session with the engine: %s", found)
            pause = pause_s(self._failures, most_s=OPEN_AGAIN_MOST_S)
            self._after(spread(pause), self._hold)
            return
        self._failures = 0
        self._session = found
        self.tick()

    # --- the record ---

    def get(self, action: Get) -> None:
        engine = self._engine
        if engine is None:
            return
        self._in_thread(lambda: engine.get(self._group), lambda found: self._got(action, found))

    def _got(self, action: Get, found: Stored | Exception | None) -> None:
        if isinstance(found, Exception):
            self._said.warn("get", "the group's record cannot be read: %s", found)
        elif found is None:
            self._said.warn(
                "none", "the engine has no record of group %s: `cometmq cluster init` makes one, "
                "and so does its first replica where that is new", self._group,
            )  # fmt: skip
            self._told.learned(0, None, action.number)
        else:
            self._tell_record(found, action.number)
            self._tell_alive()

    def cas(self, action: Cas) -> None:
        engine = self._engine
        if engine is None:
            self._call_soon(lambda: self._told.cas_unknown(action.ticket))
            return
        content = encode_record(action.record)
        self._in_thread(
            lambda: engine.cas(self._group, action.version, content),
            lambda outcome: self._changed(action, outcome),
        )

    def make(self, record: GroupRecord) -> None:
        """Make the group's record, unless there is one."""
        engine = self._engine
        if engine is not None:
            content = encode_record(record)
            self._in_thread(
                lambda: engine.cas(self._group, None, content), lambda _outcome: self.look()
            )

    def _changed(self, action: Cas, outcome: object) -> None:
        told = self._told
        if isinstance(outcome, Applied):
            self._record = action.record
            told.cas_applied(action.ticket, outcome.version)
            self._tell_alive()
            return
        if isinstance(outcome, Refused) and outcome.current is not None:
            record = self._decoded(outcome.current)
            if record is not None:
                told.cas_refused(action.ticket, outcome.current.version, record)
                self._tell_alive()
                return
        self._said.warn(
            "cas", "a change of the group's record is not known to be made: %s", outcome
        )
        told.cas_unknown(action.ticket)

    # --- threads ---

    def _in_thread(self, call: Callable[[], T], done: Callable[[T | Exception], object]) -> None:
        """Make the call there, and have its result, or what it raised, told here."""

        def run() -> None:
            result: T | Exception
            try:
                result = call()
            except Exception as error:
                result = error if isinstance(error, CometError) else _unforeseen(error)
            self._call_soon(lambda: None if self._closed else done(result))

        threading.Thread(target=run, name="engine", daemon=True).start()

    # --- end ---

    def close(self) -> None:
        """Our session ends at once, if the engine can be reached."""
        self._closed = True
        if self._engine is not None:
            try:
                self._engine.close()
            except EngineError as error:
                log.warning("the engine was not left in order: %s", error)
