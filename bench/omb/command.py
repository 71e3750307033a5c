"""`cometmq bench omb`: one workload after the other, on each system."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from cometmq.bench.extra import BenchError
from cometmq.bench.omb.run import run_workload
from cometmq.bench.omb.workload import Workload, find, known_workloads, parse
from cometmq.bench.report import omb_rows, write_report
from cometmq.bench.session import Session, folders
from cometmq.cli.output import JSON, hint, print_json, print_rows

QUICK_S: Final = 3.0
LIST: Final = "list"


def run_files(
    files: Sequence[str], output: str, out: Path | None, store: Path | None,
    minutes: float | None, options: dict[str, Any], session_of: Callable[..., Session],
) -> None:  # fmt: skip
    if list(files) == [LIST]:
        print_rows([_row_of(parse(find(name))) for name in known_workloads()], output)
        return
    workloads = [parse(find(name)) for name in files]  # all of them, before anything starts
    with folders(out, store) as (bundle, scratch):
        session = session_of(bundle, scratch, **options)
        run_all(session, workloads, minutes=minutes, quick=options["quick"])
        if output == JSON:
            print_json(session.omb)
        else:
            print_rows(omb_rows(session.omb), output)
        if out is not None:
            write_report(session.save(), bundle)
            hint(f"the bundle: {bundle / 'report.html'}")
        faults = [f"{each['driver']}, {each['workload']}: {'; '.join(each['faults'])}"
                  for each in session.omb if each["faults"]]  # fmt: skip
        if faults:
            raise click.ClickException("\n".join(faults))


def run_all(
    session: Session, workloads: Sequence[Workload], *, minutes: float | None, quick: bool
) -> None:
    """Each workload once on each system; a report in the benchmark's own form for each."""
    for workload in workloads:
        seconds = 60 * (minutes or workload.testDurationMinutes)
        warmup_s = 60 * workload.warmupDurationMinutes
        if minutes:
            warmup_s = min(warmup_s, seconds / 3)
        if quick:
            seconds, warmup_s = min(seconds, QUICK_S), min(warmup_s, QUICK_S / 3)
        for name in session.usable():
            hint(f"omb {workload.name} on {name}: {seconds:,.0f} s")
            report = _run(session, name, workload, seconds, warmup_s)
            session.omb.append(report)
            path = session.out / f"{workload.name}-{name}.json"
            path.write_text(json.dumps(report, indent=1) + "\n")


def _run(
    session: Session, name: str, workload: Workload, seconds: float, warmup_s: float
) -> dict[str, Any]:
    ctx = replace(session.ctx, bytes=max(session.ctx.bytes, 1 << 24))
    try:
        return run_workload(ctx, session.make(name), workload, seconds=seconds, warmup_s=warmup_s)
    except (BenchError, OSError) as error:
        notes = [each.strip() for each in getattr(error, "__notes__", ())]
        fault = "; ".join([str(error), *notes])
        return {
            "workload": workload.name, "driver": name, "publishRate": [], "consumeRate": [],
            "backlog": [], "faults": [fault], "notes": [],
        }  # fmt: skip


def _row_of(workload: Workload) -> dict[str, object]:
    return {
        "workload": workload.name, "topics": workload.topics,
        "partitions": workload.partitionsPerTopic, "size": workload.messageSize,
        "producers": workload.producersPerTopic, "subscriptions": workload.subscriptionsPerTopic,
        "consumers": workload.consumerPerSubscription, "rate": workload.producerRate,
        "minutes": workload.testDurationMinutes, "backlog_gb": workload.consumerBacklogSizeGB,
    }  # fmt: skip
