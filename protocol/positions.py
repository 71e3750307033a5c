"""Where a queue begins and ends, in words: one vocabulary for clients, commands and Spark."""

from __future__ import annotations

from typing import Final

EARLIEST: Final = "earliest"  # the first message that there is
LATEST: Final = "latest"  # behind the last one
_ALIASES: Final = {EARLIEST: EARLIEST, LATEST: LATEST, "begin": EARLIEST, "end": LATEST}


def named(word: str) -> str | None:
    """`earliest` or `latest`, which may also be called `begin` and `end`; None: it is neither."""
    return _ALIASES.get(word)
