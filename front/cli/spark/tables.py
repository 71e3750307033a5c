"""`cometmq spark ingest` and `compact`: a topic as a table."""

from __future__ import annotations

from pathlib import Path

import click

from cometmq.cli.options import output_option
from cometmq.cli.spark.running import (
    EXIT_FINDINGS,
    job,
    plan,
    session_of,
    session_options,
    source_of,
    source_options,
    summary,
    tasks,
)


@click.command()
@source_options
@click.option("--table", required=True, type=click.Path(path_type=Path), metavar="DIR")
@click.option("--schema", default="", metavar="DDL",
              help='Bodies are JSON of it: "id bigint, name string". Else rows as they are.',
)  # fmt: skip
@click.option("--on-bad", type=click.Choice(["dlq", "suspend", "skip"]), default="dlq",
              show_default=True, help="With --schema: bodies that do not fit.")  # fmt: skip
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
              help="How far it came.  [default: TABLE__checkpoint]")  # fmt: skip
@click.option("--trigger", default="", metavar="INTERVAL",
              help='Go on in such steps ("60 seconds") until Ctrl-C; else what there is now.',
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def ingest(
    store: Path | None, name_server: str | None, topics: tuple[str, ...], table: Path, schema: str,
    on_bad: str, checkpoint: Path | None, trigger: str, dry_run: bool, master: str,
    driver_memory: str, conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Bring a topic into a Parquet table, each message once.

    Goes on where the last run ended. Bodies that do not fit go to TABLE__dlq with their place; then
    the exit code is 1.

    \b
    cometmq spark ingest --name-server 127.0.0.1:9876 -t orders --table ./orders
    """
    options = source_of(store, name_server, topics) | {"isolation": "durable"}
    if dry_run:
        plan(options | {"table": str(table)}, output)
        return
    from cometmq.spark.jobs import ingest as jobs

    session = session_of(master, driver_memory, conf)
    with tasks("ingest", "rows") as progress:
        done = jobs.ingest(
            session, table, schema=schema, on_bad=on_bad, checkpoint=checkpoint, trigger=trigger,
            progress=progress, **options,
        )  # fmt: skip
    summary(done, output)
    if done.bad:
        raise SystemExit(EXIT_FINDINGS)


@click.command()
@source_options
@click.option("--table", required=True, type=click.Path(path_type=Path), metavar="DIR",
              help="A new directory.")  # fmt: skip
@click.option("--keep-tombstones", is_flag=True, help="Keys whose newest body is empty too.")
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def compact(
    store: Path | None, name_server: str | None, topics: tuple[str, ...], table: Path,
    keep_tombstones: bool, dry_run: bool, master: str, driver_memory: str, conf: tuple[str, ...],
    output: str,
) -> None:  # fmt: skip
    """Write the newest message of each key as a table.

    \b
    cometmq spark compact --store ./store -t customers --table ./customers
    """
    options = source_of(store, name_server, topics)
    if dry_run:
        plan(options | {"table": str(table)}, output)
        return
    from cometmq.spark.jobs import compact as jobs

    session = session_of(master, driver_memory, conf)
    with tasks("compact", "tasks") as progress:
        done = jobs.compact(
            session, table, keep_tombstones=keep_tombstones, progress=progress, **options
        )
    summary(done, output)
