"""The long form: as many schedules as there is time for, in several processes, and their tally.

A schedule is told by its number of replicas and its seed. A campaign goes on behind the last seed
that the tally has, so that figures accumulate over runs; a seed that has failed is run again by
`--replay`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from fault.campaigns import commit_under_test, today
from simulator.mutants import MUTANTS
from simulator.schedule import Outcome, run

from cometmq.actors.replication.core.replica import Replica

TALLY: Final = Path(__file__).resolve().with_name("tally.jsonl")
CHUNK: Final = 500  # schedules that a process takes at once
LINE: Final = 50_000  # schedules in a line of the tally, at most


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the tally: schedules of consecutive seeds."""

    replicas: int
    seed: int  # the first one
    schedules: int
    commit: str
    date: str
    acks: int = 0
    epochs: int = 0
    unavailable: int = 0  # at the end nobody was left who had all that was confirmed
    violations: dict[int, str] = {}  # by seed
    outcome: str = "ok"


class Chunk(msgspec.Struct):
    """Which schedules a process is to run."""

    replicas: int
    seed: int
    schedules: int
    mutant: str = ""


def of_chunk(chunk: Chunk) -> tuple[Chunk, list[Outcome]]:
    replica = MUTANTS[chunk.mutant] if chunk.mutant else Replica
    seeds = range(chunk.seed, chunk.seed + chunk.schedules)
    return chunk, [run(seed, chunk.replicas, replica) for seed in seeds]


def chunks(seed: int, schedules: int, replicas: int, mutant: str) -> Iterator[Chunk]:
    for first in range(seed, seed + schedules, CHUNK):
        yield Chunk(replicas, first, min(CHUNK, seed + schedules - first), mutant)


def campaign(
    replicas: int,
    schedules: int,
    *,
    seed: int,
    processes: int,
    is_over: Callable[[], bool],
    mutant: str = "",
) -> Iterator[Line]:
    """Lines for the tally, as they are complete; all that was run is in one.

    Args:
        is_over: asked after every few hundred schedules.
    """
    line = new_line(replicas, seed)
    with multiprocessing.Pool(processes, initializer=_behind_all_others) as pool:
        for chunk, outcomes in pool.imap(of_chunk, chunks(seed, schedules, replicas, mutant)):
            add(line, chunk, outcomes)
            if line.schedules >= LINE:
                yield line
                line = new_line(replicas, line.seed + line.schedules)
            if is_over():
                break
        pool.terminate()
    if line.schedules:
        yield line


def _behind_all_others() -> None:
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asked decides


def new_line(replicas: int, seed: int) -> Line:
    return Line(replicas=replicas, seed=seed, schedules=0, commit=commit_under_test(), date=today())


def add(line: Line, chunk: Chunk, outcomes: Iterable[Outcome]) -> None:
    assert chunk.seed == line.seed + line.schedules
    for seed, outcome in enumerate(outcomes, chunk.seed):
        line.schedules += 1
        line.acks += outcome.acks
        line.epochs += outcome.epochs
        line.unavailable += not outcome.is_available
        if outcome.violation:
            line.violations[seed] = outcome.violation
            line.outcome = "violated"


# --- the tally ------------------------------------------------------------------------------------


def append_line(line: Line, path: Path = TALLY) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_lines(path: Path = TALLY) -> list[Line]:
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line]


def next_seed(lines: Iterable[Line], replicas: int) -> int:
    """Behind all that were run."""
    return max(
        (line.seed + line.schedules for line in lines if line.replicas == replicas), default=0
    )


def report(lines: list[Line]) -> str:
    """Totals by the number of replicas, as a Markdown table."""
    rows = [
        "| replicas | schedules | acknowledged | masterships | nobody left | violations |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for replicas in sorted({line.replicas for line in lines}):
        found = [line for line in lines if line.replicas == replicas]
        numbers = [
            replicas,
            *(
                sum(getattr(line, name) for line in found)
                for name in ("schedules", "acks", "epochs", "unavailable")
            ),
            sum(len(line.violations) for line in found),
        ]
        rows.append("| " + " | ".join(f"{number:,}" for number in numbers) + " |")
    commits = ", ".join(sorted({line.commit for line in lines})) or "none"
    return "\n".join([*rows, "", f"Commits: {commits}."])
