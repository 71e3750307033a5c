"""A SQLite file that several processes of one machine change, and how its faults are told.

Write-ahead log, one connection for reading and one for writing, each taken by one thread at a time.
A process that is stopped (SIGSTOP) within a transaction keeps SQLite's lock until it goes on or is
killed: the error names it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from cometmq.actors.replication.engines.errors import EngineFault, EngineUnreachable
from cometmq.shm.os.durable import PRIVATE, sync_folder
from cometmq.shm.os.processes import command_of

APPLICATION_ID: Final = 0x434D5145  # "CMQE", in the file's header
LAYOUT: Final = 1  # its user_version

SMALL_LOG_PAGES: Final = 16

_WRITE_LOCK: Final = 120  # the byte of the -shm file: SQLite's WALINDEX_LOCK_OFFSET
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DISK: Final = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM})


class CommitUnknown(Exception):
    """The commit failed: after a crash of the machine it may be there all the same."""


class Database:
    """Opens the file, and makes it if it is not there.

    Args:
        synchronous: FULL has a commit on the disk before it returns; OFF survives kills, and not
            the machine's.
        schema: statements that make the tables.
        timeout_s: to wait for another process's transaction.

    Raises EngineFault, EngineUnreachable.
    """

    def __init__(
        self, path: Path, schema: str, synchronous: Literal["FULL", "OFF"], timeout_s: float
    ) -> None:
        self.path = path
        self._synchronous = synchronous
        self._timeout_s = timeout_s
        self._locks = threading.Lock(), threading.Lock()
        with self._faults():
            # SQLite gives the files beside it the same mode.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, PRIVATE))
                sync_folder(path.parent)
            self._writer = self._connect()
            self._make(schema)
            self._reader = self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode=rw",
            uri=True,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise EngineFault(f"{self.path}: SQLite cannot share files on this file system")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            if self._synchronous == "OFF":  # it costs nothing, so the log stays small
                connection.execute(f"PRAGMA wal_autocheckpoint = {SMALL_LOG_PAGES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self, schema: str) -> None:
        with self.writing() as connection:
            (kind,) = connection.execute("PRAGMA application_id").fetchone()
            (layout,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if not kind and not tables:
                for statement in schema.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {LAYOUT}")
            elif kind != APPLICATION_ID:
                raise EngineFault(f"{self.path} is a SQLite file of something else")
            elif layout != LAYOUT:
                raise EngineFault(
                    f"{self.path} has layout {layout}, this release knows {LAYOUT}: use the "
                    "release that made it"
                )

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """For statements that read: each sees all that is committed."""
        with self._taken(0), self._faults():
            yield self._reader

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which nobody else's comes between. An exception undoes it.

        Raises EngineUnreachable, and nothing was changed; CommitUnknown.
        """
        with self._taken(1), self._faults():
            connection = self._writer
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                self._undo(connection)
                raise
            if not connection.in_transaction:
                return  # it was undone, there was nothing to change
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._undo(connection)
                raise CommitUnknown(f"{self.path}: {error}") from error

    @staticmethod
    def _undo(connection: sqlite3.Connection) -> None:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")

    def close(self) -> None:
        for lock, connection in zip(self._locks, (self._reader, self._writer), strict=True):
            with lock, contextlib.suppress(sqlite3.Error):
                connection.close()

    @contextlib.contextmanager
    def _taken(self, which: int) -> Iterator[None]:
        if not self._locks[which].acquire(timeout=self._timeout_s):
            raise self._busy()
        try:
            yield
        finally:
            self._locks[which].release()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _BUSY:
                raise self._busy() from error
            if code in _DISK:
                raise EngineUnreachable(f"{self.path}: {error}: look at the disk") from error
            raise EngineFault(f"{self.path}: {error}") from error
        except OSError as error:
            raise EngineFault(f"{self.path}: {error.strerror}") from error

    def _busy(self) -> EngineUnreachable:
        holder = self._holder()
        who = f"process {holder} ({command_of(holder)[:120]})" if holder else "another process"
        return EngineUnreachable(
            f"{self.path}: {who} has been changing it for {self._timeout_s:g} s: if it is stopped "
            "let it go on, or kill it"
        )

    def _holder(self) -> int:
        """The process with SQLite's write lock, or 0. By /proc: to open the file and close it again
        would let go of this process's own locks."""
        with contextlib.suppress(OSError, ValueError):
            inode = str(self.path.with_name(f"{self.path.name}-shm").stat().st_ino)
            for line in Path("/proc/locks").read_text().splitlines():
                # 1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE FIRST LAST
                words = line.split()
                if len(words) < 8 or words[-3].rpartition(":")[2] != inode:
                    continue
                if words[3] == "WRITE" and words[-2] == str(_WRITE_LOCK):
                    return int(words[-4])
        return 0
