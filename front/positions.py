"""Places in a topic as people write them: `begin`, `end`, an offset, a time, how long ago."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from cometmq.conf import Unit, to_number


@dataclass(frozen=True)
class Offset:
    """A queue offset; a negative one counts from the end."""

    value: int


Position = str | Offset | datetime  # "begin" or "end"

HELP = (
    "begin, end, an offset, -N (the last N of each queue), a time (2026-11-21T08:00, local unless "
    "it names a zone), or how long ago (10min, 2h)."
)


class PositionType(click.ParamType):
    """See HELP."""

    name = "position"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Position:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # a default, or converted before
        try:
            return parse(value.strip())
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is none of: {HELP}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "POSITION"


def parse(text: str) -> Position:
    if text in ("begin", "end"):
        return text
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return Offset(int(text))
    if re.fullmatch(r"[0-9]+(ms|s|min|h|d)", text):
        return datetime.now(UTC) - timedelta(milliseconds=to_number(text, Unit.MS))
    return datetime.fromisoformat(text).astimezone()
