"""`cometmq spark stats` and `lag`: what came, and what groups are behind."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import name_server_option, output_option
from cometmq.cli.output import JSON, hint, print_json, warn
from cometmq.cli.spark.running import (
    EXIT_FINDINGS,
    job,
    plan,
    session_of,
    session_options,
    source_of,
    source_options,
    tasks,
)
from cometmq.cli.spark.shown import duration, plain, print_lag, print_stats, size

if TYPE_CHECKING:
    from cometmq.spark.jobs.lag import GroupLag


def check_plot(plot: Path | None) -> None:
    if plot is not None and plot.suffix != ".html":
        raise click.UsageError(f"--plot {plot}: plots are HTML pages, name a file *.html")


@click.command()
@source_options
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.html",
              help="Also write a page with a bar an hour.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def stats(
    store: Path | None, name_server: str | None, topics: tuple[str, ...], plot: Path | None,
    dry_run: bool, master: str, driver_memory: str, conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Count messages by topic and hour; with a plot.

    Counts, bytes, sizes of records (mean, p50, p95, p99, max), and queue offsets that are missing.

    \b
    cometmq spark stats --store ./store --plot traffic.html
    """
    options = source_of(store, name_server, topics)
    check_plot(plot)
    if dry_run:
        plan(options, output)
        return
    from cometmq.spark.jobs import stats as jobs

    session = session_of(master, driver_memory, conf)
    with tasks("stats", "tasks") as progress:
        found = jobs.stats(session, progress, **options)
    if plot is not None:
        jobs.write_plot(found, plot)
    if output == JSON:
        print_json(plain(found))
    else:
        print_stats(found.rows, jobs.HourStats.__struct_fields__, output)
    hint(f"{found.messages:,} messages, {size(found.size_bytes)}; {duration(found.seconds)}")


@click.command()
@click.option("-g", "--group", "groups", multiple=True, help="Repeatable; else all.")
@click.option("--every", type=click.FloatRange(0.1), metavar="SECONDS",
              help="Go on, with rates, until Ctrl-C.")  # fmt: skip
@click.option("--samples", type=click.IntRange(1), help="With --every: end after so many.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.html",
              help="Also write a page: a line a group and topic, written anew at each sample.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be asked, and stop.")
@name_server_option
@output_option
@job
def lag(
    groups: tuple[str, ...], every: float | None, samples: int | None, plot: Path | None,
    dry_run: bool, name_server: str, output: str,
) -> None:  # fmt: skip
    """What consumer groups are behind: messages, bytes, time.

    One row a group and queue; on a terminal as many columns as there is room for. What is not known
    is empty (null in JSON), never 0. Of a group with tags, messages that it will pass over count as
    well. Ends with exit code 1 if the last sample has a queue that is stalled or expired.

    \b
    cometmq spark lag --group billing --every 30 --plot lag.html
    """
    check_plot(plot)
    if dry_run:
        plan({"name_server": name_server, "groups": list(groups) or "all"}, output)
        return
    from cometmq.spark.jobs.lag import SAMPLES_MAX, GroupLag, LagSampler, write_plot

    sampler = LagSampler(name_server, groups)
    history: deque[list[GroupLag]] = deque(maxlen=SAMPLES_MAX)
    pause = threading.Event()
    taken = 0
    try:
        while True:
            rows = sampler.sample()
            taken += 1
            print_lag(rows, GroupLag.__struct_fields__, output)
            for group, error in sampler.refused.items():
                warn(f"group {group} is omitted: {error}")
            if plot is not None:
                history.append(rows)
                write_plot(history, plot)
            if every is None or taken == samples:
                break
            pause.wait(every)
    finally:
        sampler.close()
    if any(row.state in ("stalled", "expired") for row in rows):
        raise SystemExit(EXIT_FINDINGS)
