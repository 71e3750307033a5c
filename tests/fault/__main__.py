"""The long form of the fault tests, as one command.

python -m tests.fault --kills 300 --seed 1 --minutes 30
python -m tests.fault kills points pauses --only commitlog
python -m tests.fault pauses --stop 30
python -m tests.fault --report > table.md
python -m tests.fault --plot fail-over.png
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from fault.campaigns import (
    CAMPAIGNS,
    HELP,
    TALLY,
    Options,
    append_tally,
    commit_under_test,
    read_tally,
    report,
)
from fault.fail_over import plot as draw_fail_overs

#: Importing one of these registers its campaigns.
MODULES = (
    "fault.kills",
    "fault.pairs",
    "fault.disk_campaigns",
    "fault.consuming",
    "fault.timed",
    "fault.group_faults",
    "fault.engine_faults",
    "fault.fail_over",
)
for module in MODULES:
    importlib.import_module(module)

LIST = "\n".join(f"  {name:<12} {HELP[name]}" for name in CAMPAIGNS)


@click.command(
    help="Break the broker again and again, and judge what is left.\n\n"
    f"\b\nCampaigns (default: kills):\n{LIST}\n\n"
    "Every round adds lines to the tally, so figures accumulate over runs; Ctrl-C ends after the "
    "fault under way and keeps what was counted. Exit code 1: something was found; the store and "
    "the histories are kept, seed and path are printed.",
)
@click.argument("campaigns", nargs=-1, type=click.Choice(list(CAMPAIGNS)))
@click.option("--kills", "faults", default=100, help="How many faults, for each campaign.")
@click.option("--seed", type=int, help="Default: drawn, and printed.")
@click.option("--minutes", default=30.0, help="No fault is begun later.")
@click.option("--stop", "stop_s", default=0.0, help="pauses: how long, in s. Default: 1 to 5.")
@click.option("--only", multiple=True, help="A target, a role or a point; may be repeated.")
@click.option("--flush", type=click.Choice(["sync", "async", "both"]), default="both")
@click.option(
    "--place", type=click.Path(file_okay=False, exists=True, path_type=Path), help="For stores."
)
@click.option("--tally", type=click.Path(path_type=Path), default=TALLY, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the tally's fail-overs.")
@click.option("--commit", "commits", multiple=True, help="--plot, --report: what begins so alone.")
@click.option("--report", "wants_report", is_flag=True, help="Print the totals and do nothing.")
def main(
    campaigns: tuple[str, ...],
    wants_report: bool,
    plot: Path | None,
    commits: tuple[str, ...],
    tally: Path,
    **asked: Any,
) -> None:
    if plot is not None or wants_report:
        lines = [each for each in read_tally(tally) if each.commit.startswith(commits or "")]
        if plot is not None:
            draw_fail_overs(lines, plot)
        else:
            print(report(lines))
        return
    if asked["seed"] is None:
        asked["seed"] = int.from_bytes(os.urandom(3))
    options = Options(**{name: value for name, value in asked.items() if value is not None})
    print(f"seed {options.seed}, commit {commit_under_test()}", flush=True)
    signal.signal(signal.SIGINT, lambda *_: stop(options))
    for name in campaigns or ("kills",):
        for line in CAMPAIGNS[name](options):
            append_tally(line, tally)
    for failure in options.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(bool(options.failures))


def stop(options: Options) -> None:
    """The first Ctrl-C asks; the second means it."""
    if options.stopped:
        raise KeyboardInterrupt
    print("\nending after this round's judgement; once more breaks off", flush=True)
    options.stopped = True


if __name__ == "__main__":
    main()
