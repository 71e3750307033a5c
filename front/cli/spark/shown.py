"""What a person sees of lag and traffic: a row a queue or an hour, with units, no wider than there
is room.

In a pipe and as JSON there are the plain values, all of them, and times in UTC.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from cometmq.cli.output import JSON, console, fitting, print_record, print_rows

if TYPE_CHECKING:
    from rich.console import Console

    from cometmq.spark.jobs.lag import GroupLag
    from cometmq.spark.jobs.stats import HourStats

# Left out where there is no room, the first ones first.
LAG_SPARE: Final = ("end", "committed", "size", "in/s", "out/s", "expired")
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
STATS_SPARE: Final = ("p50", "p95", "queues", "p99", "mean", "max")


def plain(value: Any) -> Any:
    """Convert a struct for output, with fractions rounded to three places: milliseconds."""
    import msgspec

    return _to_places(msgspec.to_builtins(value))


def _to_places(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _to_places(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_to_places(each) for each in value]
    return value


def print_lag(rows: Sequence[GroupLag], columns: Sequence[str], output: str) -> None:
    if output == JSON or not sys.stdout.isatty():
        print_rows([plain(row) for row in rows], output, columns=columns)
    else:
        draw_lag(rows, console())


def print_stats(rows: Sequence[HourStats], columns: Sequence[str], output: str) -> None:
    if output == JSON or not sys.stdout.isatty():
        print_rows([plain(row) for row in rows], output, columns=columns)
    else:
        draw_stats(rows, console())


def print_summary(record: Mapping[str, Any], output: str) -> None:
    """What a job has done; with units where a person looks at it."""
    if output != JSON and sys.stdout.isatty():
        record = {name: _with_unit(name, value) for name, value in record.items()}
    print_record(record, output)


def draw_lag(rows: Sequence[GroupLag], console: Console) -> None:
    """A table for each group."""
    several = len({row.broker for row in rows}) > 1
    for group in dict.fromkeys(row.group for row in rows):
        shown = [_lag_row(row, with_broker=several) for row in rows if row.group == group]
        _leave_out_empty(shown, ("expired", "in/s", "out/s"))
        when = local(next(row.ts_ms for row in rows if row.group == group), "%H:%M:%S")
        console.print(fitting(shown, console, title=f"{group}, at {when}", spare=LAG_SPARE))


def draw_stats(rows: Sequence[HourStats], console: Console) -> None:
    """A table for each topic."""
    for topic in dict.fromkeys(row.topic for row in rows):
        shown = [_hour_row(row) for row in rows if row.topic == topic]
        console.print(fitting(shown, console, title=topic, spare=STATS_SPARE))


def _lag_row(row: GroupLag, *, with_broker: bool) -> dict[str, object]:
    shown: dict[str, object] = {"topic": row.topic}
    if with_broker:
        shown["broker"] = row.broker
    shown |= {
        "queue": row.queue_id,
        "lag": row.lag_messages,
        "age": None if row.lag_ms is None else duration(row.lag_ms / 1000),
        "size": size(row.lag_bytes),
        "committed": row.committed,
        "end": row.max_offset,
        "expired": row.expired_messages,
        "in/s": _rounded(row.rate_in),
        "out/s": _rounded(row.rate_out),
        "left": None if row.eta_s is None else duration(row.eta_s),
        "state": row.state,
    }
    return shown


def _leave_out_empty(rows: Sequence[dict[str, object]], names: Sequence[str]) -> None:
    for name in names:
        if not any(row[name] for row in rows):
            for row in rows:
                del row[name]


def _hour_row(row: HourStats) -> dict[str, object]:
    return {
        "hour": local(int(datetime.fromisoformat(row.hour).timestamp() * 1000), "%Y-%m-%d %H:%M"),
        "messages": row.messages,
        "size": size(row.size_bytes),
        "mean": size(round(row.size_mean)),
        "p50": size(row.size_p50),
        "p95": size(row.size_p95),
        "p99": size(row.size_p99),
        "max": size(row.size_max),
        "queues": row.queues,
        "missing": row.missing,
    }


# --- values with units ---


def size(count: int) -> str:
    """Bytes: `512 B`, `1.4 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = 1
    while count >= 999.95 * 1024**power and power < len(_UNITS):
        power += 1
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def duration(seconds: float) -> str:
    """`0.3 s`, `12.2 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left_s = divmod(round(seconds), 60)
    hours, left_min = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {left_s} s"
    days, left_h = divmod(hours, 24)
    return f"{days:,} d {left_h} h" if days else f"{hours} h {left_min} min"


def local(ms: int, form: str) -> str:
    """A time in the zone of whoever looks at it."""
    return datetime.fromtimestamp(ms / 1000).astimezone().strftime(form)


def _rounded(rate: float | None) -> float | int | None:
    if rate is None:
        return None
    return round(rate, 1) if abs(rate) < 100 else round(rate)


def _with_unit(name: str, value: object) -> object:
    if name == "seconds" and isinstance(value, int | float):
        return duration(value)
    if name.endswith("_bytes") and isinstance(value, int) and value >= 1024:
        return f"{size(value)} ({value:,} bytes)"
    return value
