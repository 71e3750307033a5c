# ruff: noqa: E501 -- a golden text is as wide as it is
"""What `cometmq spark lag` and `stats` draw: golden texts that a person has looked at."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import cli_process
import click
import pytest
from rich.console import Console

from cometmq.cli.spark.running import job, session_of
from cometmq.cli.spark.shown import draw_lag, draw_stats, duration, size
from cometmq.spark.jobs.lag import GroupLag, write_plot
from cometmq.spark.jobs.stats import HourStats

NOW_MS = 1_795_364_476_423


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def row(queue_id: int, committed: int | None, end: int, **other: object) -> GroupLag:
    fields: dict[str, object] = {
        "ts_ms": NOW_MS, "group": "billing", "topic": "orders", "broker": "alpha",
        "queue_id": queue_id, "committed": committed, "max_offset": end,
        "lag_messages": end - (committed or 0), "expired_messages": 0,
        "lag_bytes": (end - (committed or 0)) * 159, "lag_ms": 12_240, "rate_in": None,
        "rate_out": None, "eta_s": None, "state": "ok",
    }  # fmt: skip
    return GroupLag(**(fields | other))  # type: ignore[arg-type]


LAG = [
    row(0, 3126, 3126, lag_ms=0, eta_s=0.0, rate_in=12_345.6, rate_out=12_400.0),
    row(1, None, 3_120_000, state="never"),
    row(11, 17, 1_000_000_000, lag_ms=None, eta_s=7300.0, rate_in=0.25, rate_out=1.5),
]
HOURS = [
    HourStats("orders", "2026-11-21T23:00Z", 17, 2_700, 158.8, 158, 159, 159, 159, 8, 0),
    HourStats("orders", "2026-11-22T00:00Z", 14_000_017, 2_226_002_703, 159.0, 158, 220, 4_000,
              70_000, 8, 1),
]  # fmt: skip


def drawn(width: int, rows: list[GroupLag] | list[HourStats]) -> str:
    console = Console(width=width, file=io.StringIO())
    (draw_lag if isinstance(rows[0], GroupLag) else draw_stats)(rows, console)  # type: ignore[operator]
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


LAG_120 = """\
billing, at 17:21:16
 topic    queue           lag   age      size        committed             end     in/s    out/s   left        state
 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────
 orders       0             0   0.0 s    0 B             3,126           3,126   12,346   12,400   0.0 s       ok
 orders       1     3,120,000   12.2 s   473.1 MiB           -       3,120,000        -        -   -           never
 orders      11   999,999,983   -        148.1 GiB          17   1,000,000,000      0.2      1.5   2 h 1 min   ok
"""
LAG_80 = """\
billing, at 17:21:16
 topic    queue           lag   age        in/s    out/s   left        state
 ───────────────────────────────────────────────────────────────────────────
 orders       0             0   0.0 s    12,346   12,400   0.0 s       ok
 orders       1     3,120,000   12.2 s        -        -   -           never
 orders      11   999,999,983   -           0.2      1.5   2 h 1 min   ok
no room for: end, committed, size (-o json has all)
"""
STATS_120 = """\
orders
 hour                 messages   size      mean    p50     p95     p99       max        queues   missing
 ───────────────────────────────────────────────────────────────────────────────────────────────────────
 2026-11-22 00:00           17   2.6 KiB   159 B   158 B   159 B   159 B     159 B           8         0
 2026-11-22 01:00   14,000,017   2.1 GiB   159 B   158 B   220 B   3.9 KiB   68.4 KiB        8         1
"""
STATS_80 = """\
orders
 hour                 messages   size      mean    p99       max        missing
 ──────────────────────────────────────────────────────────────────────────────
 2026-11-22 00:00           17   2.6 KiB   159 B   159 B     159 B            0
 2026-11-22 01:00   14,000,017   2.1 GiB   159 B   3.9 KiB   68.4 KiB         1
no room for: p50, p95, queues (-o json has all)
"""


@pytest.mark.parametrize(
    ("rows", "width", "text"),
    [(LAG, 120, LAG_120), (LAG, 80, LAG_80), (HOURS, 120, STATS_120), (HOURS, 80, STATS_80)],
    ids=["lag at 120", "lag at 80", "stats at 120", "stats at 80"],
)
def test_what_is_drawn(rows: list[GroupLag] | list[HourStats], width: int, text: str) -> None:
    assert drawn(width, rows) == text


def test_a_long_name_is_folded_and_no_number_is() -> None:
    text = drawn(60, [row(7, 5, 1_000_000_005, topic="t" * 90, group="g" * 90, state="stalled")])
    assert "1,000,000,000" in text
    assert "stalled" in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (12.24, "12.2 s"), (250, "4 min 10 s"), (7500, "2 h 5 min"),
     (3 * 86_400 + 4 * 3600, "3 d 4 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_048_575, "1.0 MiB"), (5 << 30, "5.0 GiB"),
     (1 << 63, "8.0 EiB")],
)  # fmt: skip
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_a_plot_of_lag(tmp_path: Path) -> None:
    """A line a group and topic, of the sums of their queues; and names are only names."""
    hostile = "<script>alert(1)</script>"
    samples = [
        [row(0, 0, 10 * sample, ts_ms=NOW_MS + 60_000 * sample), row(1, 0, 5, group=hostile)]
        for sample in range(3)
    ]
    write_plot(samples, tmp_path / "lag.html")
    page = (tmp_path / "lag.html").read_text()
    assert page.count("<svg") == page.count("<polyline") == 2
    assert page.count("<circle") == 6
    assert "2026-11-22 17:23:16: 20 messages" in page
    assert "25 messages are unread at the last of 3 samples" in page
    assert "<script>" not in page


# --- what Spark says itself ---


@click.command()
@click.option("--fault", is_flag=True)
@job
def greeted(fault: bool) -> None:
    session_of("local[1]", "1g", ())
    os.write(2, b"the job's\n")
    if fault:
        raise ValueError("no sentence of ours")


@pytest.fixture
def greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Spark that starts."""

    def session(master: str, *, conf: dict[str, str]) -> Mock:
        os.write(2, b"the greeting\n")
        return Mock()

    monkeypatch.setattr("cometmq.spark.session", session)


@pytest.mark.usefixtures("greeting")
def test_what_spark_says_is_kept_aside(capfd: pytest.CaptureFixture[str]) -> None:
    greeted.main([], standalone_mode=False)
    assert capfd.readouterr().err == "the job's\n"


@pytest.mark.usefixtures("greeting")
def test_it_is_shown_beside_a_fault(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no sentence"):
        greeted.main(["--fault"], standalone_mode=False)
    assert capfd.readouterr().err == "the job's\nSpark said:\nthe greeting\n"


def test_a_spark_that_does_not_start(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho no such machine >&2; exit 1\n")
    java.chmod(0o755)
    done = cli_process.run(
        "spark", "ingest", "--name-server", "127.0.0.1:1", "--table", "t",
        "--checkpoint", "c", cwd=tmp_path, JAVA_HOME=str(tmp_path),
    )  # fmt: skip
    first, *said, last = done.stderr.decode().splitlines()
    assert (done.returncode, first, said[0]) == (3, "Spark said:", "no such machine")
    assert last.startswith("Error: Spark did not start: it needs Java 17")
