"""The whole report: every workload, every system in turns, and the OpenMessaging Benchmark rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cometmq.bench.omb.command import run_all
from cometmq.bench.omb.workload import find, parse
from cometmq.bench.results import Results
from cometmq.bench.session import Session

# Cheap and telling first: a run that is broken off has them.
WORKLOADS: Final = (
    "produce", "end-to-end", "sync-flush", "embedded", "drain", "fan-out", "sizes", "consume",
    "many-queues", "recovery", "cold-read", "cleaning",
)  # fmt: skip
SOAK_S: Final = 600.0
OMB: Final = (
    "1-topic-1-partition-100b", "1-topic-1-partition-1kb",
    "max-rate-1-topic-1-partition-1p-1c-100b", "max-rate-1-topic-1-partition-1p-1c-1kb",
    "max-rate-1-topic-1-partition-1p-1c-64kb", "1m-10-topics-1-partition-100b",
    "1-topic-16-partitions-1kb", "simple-workload",
)  # fmt: skip
OMB_QUICK: Final = OMB[:3:2]
OMB_MINUTES: Final = 2.0  # of the 5 to 15 that the files ask for; named in the bundle


def full_report(session: Session, *, quick: bool) -> Results:
    """Measure; the bundle holds what there is after each workload."""
    session.run(WORKLOADS)
    if not quick:
        _soak(session)
    workloads = [parse(find(name)) for name in (OMB_QUICK if quick else OMB)]
    run_all(session, workloads, minutes=None if quick else OMB_MINUTES, quick=quick)
    return session.save()


def _soak(session: Session) -> None:
    """One round is long enough."""
    before, rounds = session.ctx, session.rounds
    session.ctx, session.rounds = replace(before, seconds=SOAK_S), 1
    try:
        session.run(["soak"], with_controls=False)
    finally:
        session.ctx, session.rounds = before, rounds
