"""`cometmq spark dlq`: what groups have failed of."""

from __future__ import annotations

from pathlib import Path

import click

from cometmq.cli.options import output_option
from cometmq.cli.output import JSON, hint, print_json, print_rows
from cometmq.cli.spark.running import (
    job,
    plan,
    session_of,
    session_options,
    store_options,
    tasks,
    where_of,
)
from cometmq.cli.spark.shown import duration, plain


@click.command()
@store_options
@click.option("-g", "--group", "groups", multiple=True, help="Repeatable; else all.")
@click.option("--retries", is_flag=True, help="Also what was delivered again.")
@click.option("--poison", type=click.IntRange(2), default=3, show_default=True, metavar="N",
              help="A key is poison that has failed so often.")  # fmt: skip
@click.option("--export", type=click.Path(path_type=Path), metavar="DIR",
              help="Also write all of it, bodies too, as Parquet into a new directory.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def dlq(
    store: Path | None, name_server: str | None, groups: tuple[str, ...], retries: bool,
    poison: int, export: Path | None, dry_run: bool, master: str, driver_memory: str,
    conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Count the dead letters of groups, and export them.

    By group, topic and tags: messages, distinct keys, keys that failed again and again, and when.
    They are sent again by `cometmq group dlq resend`.

    \b
    cometmq spark dlq --store ./store --export ./letters
    """
    options = where_of(store, name_server)
    if dry_run:
        plan({**options, "groups": list(groups) or "all"}, output)
        return
    from cometmq.spark.jobs import dead_letters as jobs

    session = session_of(master, driver_memory, conf)
    with tasks("dlq", "tasks") as progress:
        found = jobs.dead_letters(
            session, groups, retries=retries, poison=poison, export=export, progress=progress,
            **options,
        )  # fmt: skip
    if output == JSON:
        print_json(plain(found))
    else:
        rows = [plain(row) for row in found.rows]
        print_rows(rows, output, columns=jobs.Failures.__struct_fields__)
    where = f" in {found.exported}" if found.exported else ""
    hint(f"{found.messages:,} messages{where}; {duration(found.seconds)}")
