"""What can go wrong with an engine. Texts name the engine and what was asked of it."""

from __future__ import annotations

import os

from cometmq.protocol.errors import ArgumentIllegal, CometError


class EngineError(CometError):
    """The root of these; alone: a handle that is closed, or was opened before a fork."""

    code = 9150


class EngineUnreachable(EngineError):
    """Nobody has answered in time, and no record was changed. Try again."""

    code = 9151
    retriable = True


class EngineFault(EngineError):
    """An answer that cannot be: of another program, a damaged file, without permission."""

    code = 9152


class Rejected(EngineFault):
    """The answer, or that there is none, says that nothing was done, and will not be."""


class Lost(Exception):
    """What was asked may be done, or be done yet: its answer did not come. Drivers alone know this;
    others get `engine.Unknown`, or EngineUnreachable."""


class RecordTooLarge(ArgumentIllegal):
    """A record over RECORD_BYTES_MAX. The text holds both numbers."""

    code = 9154


class SessionHeld(EngineError):
    """Another session of the same broker id lives: wait for its end, or give the broker another
    id."""

    code = 9155
    retriable = True


class Here:
    """The process that something belongs to: neither threads nor connections go through a fork."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    def check(self) -> None:
        """Raise EngineError in a process that was forked since."""
        if os.getpid() != self._pid:
            raise EngineError(
                f"{self._what} was opened in process {self._pid} and is used in {os.getpid()}: "
                "open it after the fork"
            )
