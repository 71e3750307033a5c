"""The long form of the replication's simulator, as one command.

python -m tests.simulator --schedules 1000000 --processes 2 --minutes 60
python -m tests.simulator --mutant I --schedules 100000
python -m tests.simulator --replay 4711 --replicas 5
python -m tests.simulator --report
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from simulator.campaign import TALLY, append_line, campaign, next_seed, read_lines, report
from simulator.mutants import MUTANTS
from simulator.schedule import run

from cometmq.actors.replication.core.replica import Replica

PLANTED = "\n".join(f"  {name}  {each.__doc__}" for name, each in MUTANTS.items())


@click.command(
    help="Run the replication core through random courses of faults.\n\n"
    "Each run goes on behind the last seed of the tally, and adds lines to it; Ctrl-C ends and "
    "keeps what was counted. Exit code 1: a promise was broken; its seed is printed, and stands in "
    "the tally.\n\n"
    "\b\nPlanted bugs, for --mutant (nothing goes to the tally; exit code 1: not noticed):\n"
    f"{PLANTED}"
)
@click.option("--schedules", default=100_000, help="How many, for each number of replicas.")
@click.option("--replicas", type=click.IntRange(3, 15), multiple=True, default=(3, 5))
@click.option("--processes", default=os.cpu_count() or 1, help="They run with the lowest priority.")
@click.option("--minutes", default=60.0, help="Nothing is begun later.")
@click.option("--seed", type=int, help="The first one. Default: behind the tally's last.")
@click.option("--mutant", type=click.Choice(list(MUTANTS)), help="A planted bug in the core.")
@click.option("--replay", type=int, help="One seed, and print what comes of it.")
@click.option("--tally", type=click.Path(path_type=Path), default=TALLY, show_default=True)
@click.option("--report", "wants_report", is_flag=True, help="Print the totals and do nothing.")
def main(
    schedules: int,
    replicas: tuple[int, ...],
    processes: int,
    minutes: float,
    seed: int | None,
    mutant: str | None,
    replay: int | None,
    tally: Path,
    wants_report: bool,
) -> None:
    if wants_report:
        print(report(read_lines(tally)))
        return
    if replay is not None:
        for count in replicas:
            outcome = run(replay, count, MUTANTS[mutant] if mutant else Replica)
            print(f"{count} replicas, seed {replay}: {outcome}")
        return
    until = time.monotonic() + minutes * 60
    asked: list[int] = []

    def stop(signal_number: int, frame: object) -> None:
        """The first Ctrl-C asks; the second means it."""
        if asked:
            raise KeyboardInterrupt
        asked.append(signal_number)
        print("\nending; once more breaks off", flush=True)

    signal.signal(signal.SIGINT, stop)
    found = False
    for count in replicas:
        lines = [] if mutant else read_lines(tally)
        first = next_seed(lines, count) if seed is None else seed
        if asked:
            break
        for line in campaign(
            count,
            schedules,
            seed=first,
            processes=processes,
            is_over=lambda: bool(asked) or time.monotonic() >= until,
            mutant=mutant or "",
        ):
            if not mutant:
                append_line(line, tally)
            print(
                f"{count} replicas, seeds {line.seed} to {line.seed + line.schedules - 1}: "
                f"{line.acks} acknowledged, {len(line.violations)} violations",
                flush=True,
            )
            for bad, text in list(line.violations.items())[:20]:
                print(f"VIOLATED: {count} replicas, seed {bad}: {text}", file=sys.stderr)
            found |= bool(line.violations)
    sys.exit(found is not bool(mutant))


if __name__ == "__main__":
    main()
