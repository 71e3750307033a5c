"""The whole report: every workload, every system in turns, and the OpenMessaging Benchmark rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from cometmq.bench.omb.command import run_all
from cometmq.bench.omb.workload import find, parse
from cometmq.bench.results import Results
from cometmq.bench.session import OMB, Session

# Cheap and telling first: a run that is broken off has them. Rounds and seconds of a measurement
# where the command line has neither: four peers together take about 45 minutes.
WORKLOADS: Final[dict[str, tuple[int, float]]] = {
    "produce": (3, 2.0),
    "end-to-end": (3, 3.0),
    "sync-flush": (3, 1.0),
    "embedded": (5, 2.0),
    "drain": (3, 2.0),
    "fan-out": (3, 2.0),
    "consume": (3, 2.0),
    "many-queues": (3, 2.0),
    "recovery": (1, 2.0),
    "cold-read": (1, 3.0),
    "cleaning": (1, 3.0),
    "beyond-memory": (1, 2.0),
    "sizes": (1, 1.0),
    "soak": (1, 60.0),
}
WINDOWS: Final = 3  # of a warm-up
DRAIN_BYTES: Final = 4 << 30
NOT_QUICK: Final = ("soak",)
OMB_FILES: Final = (
    "1-topic-1-partition-100b", "1-topic-1-partition-1kb",
    "max-rate-1-topic-1-partition-1p-1c-100b", "max-rate-1-topic-1-partition-1p-1c-1kb",
)  # fmt: skip
OMB_QUICK: Final = OMB_FILES[:3:2]
OMB_MINUTES: Final = 0.25  # of the 5 to 15 that the files ask for; named in the bundle


def full_report(
    session: Session, parts: Sequence[str] | None = None, *, quick: bool, rounds: int | None,
    seconds: float | None,
) -> Results:  # fmt: skip
    """Measure; the bundle holds what there is after each workload.

    Args:
        parts: these workloads only; default: all.
        rounds, seconds: instead of those above.
    """
    before, rounds_before = session.ctx, session.rounds
    for workload, (own_rounds, own_seconds) in WORKLOADS.items():
        if workload in (parts or WORKLOADS) and not (quick and workload in NOT_QUICK):
            if not quick:
                session.rounds = rounds or own_rounds
                session.ctx = replace(before, seconds=seconds or own_seconds, windows=WINDOWS)
            if workload == "drain" and not quick:
                session.ctx = replace(session.ctx, cold_bytes=DRAIN_BYTES)
            session.run([workload], with_controls=workload != "soak")
    session.ctx, session.rounds = before, rounds_before
    if OMB in (parts or (OMB,)):
        files = [parse(find(name)) for name in (OMB_QUICK if quick else OMB_FILES)]
        run_all(session, files, minutes=None if quick else OMB_MINUTES, quick=quick)
    return session.save()
