"""`cometmq spark audit`: log and queues of a store, compared both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from cometmq.cli.options import output_option
from cometmq.cli.output import JSON, hint, print_json, print_rows
from cometmq.cli.spark.running import EXIT_FINDINGS, job, plan, session_of, session_options, tasks
from cometmq.cli.spark.shown import plain

FINDING_COLUMNS: Final = (
    "severity", "kind", "segment", "topic", "queue_id", "queue_offset", "physical_offset",
    "expected", "actual",
)  # fmt: skip


@click.command()
@click.option("--store", required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--rebuild",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write the ConsumeQueues as they should be; never into the store.",
)
@click.option("--max-findings", default=100, show_default=True, type=click.IntRange(1),
              help="Shown of one kind, queue and segment.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def audit(
    store: Path, rebuild: Path | None, max_findings: int, dry_run: bool, master: str,
    driver_memory: str, conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Compare log and queues of a store, both ways.

    Every record: CRC, place, time, and its entry in the queue; every queue: entries that no record
    has. A broker may be serving the store. Changes nothing. Ends with exit code 1 if something is
    wrong.

    \b
    cometmq spark audit --store ./store
    """
    from cometmq.spark.jobs import audit as jobs

    planned = jobs.plan_audit(store, max_findings)
    if dry_run:
        plan({"store": planned.bounds.store, "served": planned.bounds.served,
              "segments": len(planned.tasks), "bytes": planned.size_bytes}, output)  # fmt: skip
        return
    with tasks("audit") as progress:
        found = jobs.audit(
            session_of(master, driver_memory, conf), store,
            findings_max=max_findings, progress=progress,
        )  # fmt: skip
    if output == JSON:
        print_json(plain(found))
    else:
        rows = [plain(finding) for finding in found.findings]
        print_rows(
            [{name: row[name] for name in FINDING_COLUMNS} for row in rows], output,
            columns=FINDING_COLUMNS,
        )  # fmt: skip
        hint(
            f"{found.records} records in [{found.log_min}, {found.log_max}), {len(found.queues)} "
            f"queues, {len(rows)} findings and {found.left_out} more; {found.seconds:.1f} s"
        )
        for name in found.not_checked:
            hint(f"not checked: {name}")
    if rebuild is not None:
        hint(f"{jobs.rebuild_queues(store, rebuild)} queues written to {rebuild}")
    if found.findings:
        raise SystemExit(EXIT_FINDINGS)
