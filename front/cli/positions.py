"""Places in a topic as people write them: `earliest`, `latest`, an offset, a time, how long ago."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from cometmq.conf import Unit, to_number
from cometmq.protocol.positions import named


@dataclass(frozen=True)
class Offset:
    """A queue offset; a negative one counts from the end."""

    value: int


Position = str | Offset | datetime  # EARLIEST or LATEST

HELP = (
    "earliest, latest, an offset, -N (the last N of each queue), a time (2026-11-21T08:00, local "
    "unless it names a zone), or how long ago (10min, 2h)."
)


def position(value: Any) -> Position:
    """An option's type; see HELP."""
    if not isinstance(value, str):
        return value  # type: ignore[no-any-return]  # converted before
    try:
        return parse(value.strip())
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is none of: {HELP}") from None


def parse(text: str) -> Position:
    word = named(text)
    if word is not None:
        return word
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return Offset(int(text))
    if re.fullmatch(r"[0-9]+(ms|s|min|h|d)", text):
        return datetime.now(UTC) - timedelta(milliseconds=to_number(text, Unit.MS))
    return datetime.fromisoformat(text).astimezone()
