"""Everybody: what every process answers, and the answers that any command may get."""

from __future__ import annotations

from cometmq.protocol.commands.root import (
    EVERY,
    Answer,
    Command,
    On,
    ServedBy,
    administer,
    by_administrators,
    by_clients,
)
from cometmq.protocol.integers import Int32, Int64


class Failed(Answer, frozen=True, tag=0):
    """The typed error of any command: `errors.from_code(code, text)`."""

    code: Int32
    text: str


class Done(Answer, frozen=True, tag=1):
    """The plain yes."""


class Ping(Command, frozen=True, tag=2):
    """Is anybody there? -> Pong. Answered by every process."""

    access = by_clients(served_by=ServedBy.EVERY)


class Pong(Answer, frozen=True, tag=3):
    role: str
    pid: Int64
    version: str


class GetStatistics(Command, frozen=True, tag=5):
    """-> Statistics. Answered by every process."""

    access = by_administrators(administer(EVERY, On.BROKER), served_by=ServedBy.EVERY)


class Statistics(Answer, frozen=True, tag=6):
    role: str
    values: dict[str, Int64 | float | str]
