"""The engine of several brokers on one machine: files in a folder, and nobody to set up.

    records.db            the groups' records. A change is on the disk before it is answered
    sessions-BOOT.db      sessions, with the time until which each is held, on CLOCK_BOOTTIME, which
                          all processes of the machine share. They end with the machine, so this
                          file is never synced, and no slow disk ends a session
    watchers/             sockets by which processes tell each other what has changed (bells.py)

The folder is the user's alone (0700), and so is every file in it (0600). It must not lie on a
network file system: neither locks nor clocks are shared there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.actors.replication.engines.bells import Bells, Ear
from cometmq.actors.replication.engines.database import CommitUnknown, Database
from cometmq.actors.replication.engines.engine import (
    RECORD_BYTES_MAX,
    TIMEOUT_S,
    Applied,
    Outcome,
    Refused,
    Stored,
    Unknown,
    View,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineFault, EngineUnreachable, SessionHeld
from cometmq.actors.replication.engines.handle import Handle
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.processes import boot_id, time_namespace

RECORDS_FILE: Final = "records.db"
WATCHERS_DIR: Final = "watchers"
ROOM_BYTES: Final = 131_072  # of sessions' files: some thousand sessions
_NS: Final = 1_000_000_000

# Versions come of one counter for all groups: so they grow also when a group is made again.
RECORDS_SCHEMA: Final = """
    CREATE TABLE last (version INTEGER NOT NULL);
    INSERT INTO last VALUES (0);
    CREATE TABLE records (
        name TEXT PRIMARY KEY, version INTEGER NOT NULL, record BLOB NOT NULL
    ) WITHOUT ROWID
"""
SESSIONS_SCHEMA: Final = """
    CREATE TABLE clock (namespace TEXT NOT NULL);
    CREATE TABLE room (bytes BLOB NOT NULL);
    CREATE TABLE sessions (
        name TEXT, broker INTEGER, nonce BLOB NOT NULL, until_ns INTEGER NOT NULL,
        PRIMARY KEY (name, broker)
    ) WITHOUT ROWID
"""


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SqliteEngine(Handle):
    """See `engine.Engine`.

    Args:
        folder: made if it is not there, and its files in it.

    Raises EngineFault, EngineUnreachable: other than of a server, this opens files.
    """

    def __init__(self, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(f"sqlite:{folder}", timeout_s)
        boot = boot_id()
        if not boot:
            raise EngineFault(f"{self.where}: this system does not tell its boots apart")
        with contextlib.ExitStack() as undo:
            try:
                _prepare(folder)
                _forget_other_boots(folder, boot)
                self._bells = Bells(folder / WATCHERS_DIR)
            except OSError as error:
                raise EngineFault(f"{self.where}: {error.strerror}") from error
            undo.callback(self._bells.close)
            self._records = Database(folder / RECORDS_FILE, RECORDS_SCHEMA, "FULL", timeout_s)
            undo.callback(self._records.close)
            path = folder / f"sessions-{boot}.db"
            self._sessions_file = Database(path, SESSIONS_SCHEMA, "OFF", timeout_s)
            undo.callback(self._sessions_file.close)
            self._check_clock()
            self._take_room()
            undo.pop_all()
        self._ear: Ear | None = None

    def _check_clock(self) -> None:
        """Times of another namespace cannot be compared with ours."""
        with self._sessions_file.writing() as connection:
            row = connection.execute("SELECT namespace FROM clock").fetchone()
            if row is None:
                connection.execute("INSERT INTO clock VALUES (?)", (time_namespace(),))
            elif row[0] != time_namespace():
                raise EngineFault(
                    f"{self.where}: processes of another time namespace use it, whose clock is "
                    "another one: run all brokers of the cluster in one"
                )

    def _take_room(self) -> None:
        """Space in the sessions' files, which stays: a disk that is full ends no session. The log
        is begun anew as soon as it has used what is taken here."""
        with self.session_change() as connection:
            connection.execute("INSERT INTO room VALUES (zeroblob(?))", (ROOM_BYTES,))
        with self.session_change() as connection:
            connection.execute("DELETE FROM room")

    # --- records ---

    def _get(self, group: str) -> Stored | None:
        with self._records.reading() as connection:
            row = connection.execute(
                "SELECT record, version FROM records WHERE name = ?", (group,)
            ).fetchone()
        return self._stored(group, row)

    def _stored(self, group: str, row: tuple[object, object] | None) -> Stored | None:
        if row is None:
            return None
        record, version = row
        if type(record) is not bytes or type(version) is not int or version <= 0:
            raise EngineFault(f"{self._records.path}: the row of group {group} is none of ours")
        if len(record) > RECORD_BYTES_MAX:
            raise EngineFault(f"{self._records.path}: group {group}: {len(record)} bytes")
        return Stored(record, version)

    def _change(self, group: str, expected: int | None, record: bytes | None) -> Outcome:
        try:
            outcome = self._changed(group, expected, record)
        except CommitUnknown as error:
            return Unknown(str(error))
        if isinstance(outcome, Applied):
            self.tell(group)
        return outcome

    def _changed(self, group: str, expected: int | None, record: bytes | None) -> Outcome:
        with self._records.writing() as connection:
            row = connection.execute(
                "SELECT record, version FROM records WHERE name = ?", (group,)
            ).fetchone()
            current = self._stored(group, row)
            if (current and current.version) != expected:
                connection.execute("ROLLBACK")
                return Refused(current)
            (version,) = connection.execute(
                "UPDATE last SET version = version + 1 RETURNING version"
            ).fetchone()
            if record is None:
                connection.execute("DELETE FROM records WHERE name = ?", (group,))
            else:
                connection.execute(
                    "INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (group, version, record)
                )
        return Applied(version)

    # --- sessions ---

    def _alive(self, group: str) -> frozenset[int]:
        return self._living(group)[0]

    def _living(self, group: str) -> tuple[frozenset[int], float | None]:
        """The ids, and in how many seconds the first of them may end."""
        # The clock first: what is over by then is over in all that is read later.
        now = _now_ns()
        rows = self._session_rows(group)
        if any(until <= now for _, until in rows):
            self._end_overdue(group)
            rows = self._session_rows(group)
        first = min((until for _, until in rows), default=None)
        left_s = None if first is None else max(0, first - now) / _NS
        return frozenset(broker for broker, _ in rows), left_s

    def _session_rows(self, group: str) -> list[tuple[int, int]]:
        with self._sessions_file.reading() as connection:
            return connection.execute(
                "SELECT broker, until_ns FROM sessions WHERE name = ?", (group,)
            ).fetchall()

    def _end_overdue(self, group: str) -> None:
        """A session has ended when its row is gone, and not before: between two looks at the clock
        it might have been renewed. Under the lock nobody renews."""
        with self.session_change() as connection:
            gone = connection.execute(
                "DELETE FROM sessions WHERE name = ? AND until_ns <= ?", (group, _now_ns())
            ).rowcount
        if gone:
            self.tell(group)

    @contextlib.contextmanager
    def session_change(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the sessions. Raises EngineUnreachable."""
        try:
            with self._sessions_file.writing() as connection:
                yield connection
        except CommitUnknown as error:
            raise EngineUnreachable(str(error)) from error

    def _lease(self, group: str, broker_id: int, ttl_s: float) -> _Row:
        row = _Row(self, group, broker_id, ttl_s)
        row.open()
        self.tell(group)
        return row

    # --- watches ---

    def _look(self, group: str) -> tuple[View, float | None]:
        at_s = now_s()
        alive, ends_in_s = self._living(group)
        return View(self._get(group), alive, at_s), ends_in_s

    def _source(self) -> Ear:
        try:
            self._ear = Ear(self._bells)
        except OSError as error:
            raise EngineFault(f"{self.where}/{WATCHERS_DIR}: {error.strerror}") from error
        return self._ear

    def tell(self, group: str) -> None:
        self._bells.ring(group)

    def _end(self) -> None:
        if self._ear is not None:
            self._ear.close()
        self._bells.close()
        self._records.close()
        self._sessions_file.close()


class _Row:
    """A session's row: a `leased.Lease`."""

    def __init__(self, engine: SqliteEngine, group: str, broker_id: int, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._engine = engine
        self._group = group
        self._broker_id = broker_id
        self._nonce = secrets.token_bytes(16)

    def open(self) -> None:
        key = self._group, self._broker_id
        with self._engine.session_change() as connection:
            now = _now_ns()
            connection.execute(
                "DELETE FROM sessions WHERE name = ? AND broker = ? AND until_ns <= ?", (*key, now)
            )
            row = connection.execute(
                "SELECT until_ns FROM sessions WHERE name = ? AND broker = ?", key
            ).fetchone()
            if row is not None:
                raise SessionHeld(
                    f"{self._engine.where}: broker {self._broker_id} of group {self._group} has a "
                    f"session already, for {(row[0] - now) / _NS:.3f} s at least"
                )
            until = now + int(self.ttl_s * _NS)
            connection.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?)", (*key, self._nonce, until)
            )

    def renew(self, asked_at_s: float, timeout_s: float) -> float | None:
        with self._engine.session_change() as connection:
            now = _now_ns()
            changed = connection.execute(
                "UPDATE sessions SET until_ns = ?1 + ?2 WHERE name = ?3 AND broker = ?4 "
                "AND nonce = ?5 AND until_ns > ?1",
                (now, int(self.ttl_s * _NS), self._group, self._broker_id, self._nonce),
            ).rowcount
        return asked_at_s + self.ttl_s if changed else None

    def release(self) -> None:
        with self._engine.session_change() as connection:
            connection.execute(
                "DELETE FROM sessions WHERE name = ? AND broker = ? AND nonce = ?",
                (self._group, self._broker_id, self._nonce),
            )
        self._engine.tell(self._group)


def _prepare(folder: Path) -> None:
    """Raises EngineFault, OSError."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise EngineFault(
            f"{folder}: the folder must belong to the brokers' user, and nobody else may write "
            f"there (chmod 700 {folder})"
        )
    if not (folder / RECORDS_FILE).exists():
        foreign = [each for each in os.listdir(folder) if not _is_ours(each)]
        if foreign:
            raise EngineFault(
                f"{folder} has no {RECORDS_FILE} but {min(foreign)!r}: name a folder of its own"
            )


def _is_ours(name: str) -> bool:
    """Another process may be preparing it at this moment."""
    return name == WATCHERS_DIR or name.startswith((RECORDS_FILE, "sessions-"))


def _forget_other_boots(folder: Path, boot: str) -> None:
    """Sessions end with the machine; their file may be damaged, since it is never synced."""
    for path in folder.glob("sessions-*.db*"):
        if not path.name.startswith(f"sessions-{boot}.db"):
            path.unlink(missing_ok=True)
