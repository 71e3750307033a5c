"""How long a group takes no messages after its master's end, idle and under load, and as a plot.

    python -m tests.fault fail-over --kills 50 --only idle
    python -m tests.fault --plot fail-over.png

A master is killed as a whole and stays away until the producers go on; what counts is what they
saw: the longest time between two acknowledgements.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from fault.campaigns import Options, Tally, campaign, percentile
from fault.group_faults import Round, run_round
from fault.groups import SESSION_S, GroupRig
from fault.work import PlainWork

NAME: Final = "fail-over"
LOADS: Final[dict[str, tuple[Sequence[str], float]]] = {  # producers, and each one's pause in s
    "idle": (("single",), 0.02),
    "load": (("single", "linger", "batch"), 0.005),
}
KILLS: Final = 12  # of one group
TARGETS_S: Final = {"p50": 2.5, "p99": 5.0}


@campaign(NAME, "kill -9 of a group's master, and how long nothing is stored; --only idle, load")
def fail_overs(options: Options) -> Iterator[Tally]:
    loads = [name for name in LOADS if options.wants(name)]
    left, number = options.faults, 0
    while left > 0 and not options.over:
        name = loads[number % len(loads)]
        producers, pace_s = LOADS[name]
        kills = min(left, KILLS)
        lines = run_round(
            options,
            Round(
                NAME,
                options.seed + number,
                options.sync_of(number // len(loads)),
                lambda rig, name=name: kill_master(rig, name),
                kills,
                clients=PlainWork(producers, pace_s),
            ),
        )
        yield from lines
        left, number = left - kills, number + 1


def kill_master(rig: GroupRig, load: str) -> None:
    time.sleep(SESSION_S * rig.chance.random())  # at any moment of a session
    (master,) = rig.pick("master")
    rig.fault("kill", load)
    master.kill()
    rig.wait_resumed("the end of the master")
    master.start()
    rig.wait_healed("the end of the master")


def plot(lines: Iterable[Tally], path: Path) -> None:
    """The times of all such kills in the tally, as cumulative distributions."""
    times: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line.campaign == NAME:
            times[line.target] += [ms / 1000 for ms in line.recover_ms]
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(8, 4.8), dpi=120)
    for name, found in sorted(times.items()):
        found.sort()
        parts = [(index + 1) / len(found) for index in range(len(found))]
        p50, p99 = percentile(found, 50), percentile(found, 99)
        label = f"{name}: {len(found)} kills, p50 {p50:.1f} s, p99 {p99:.1f} s"
        axis.step(found, parts, where="post", label=label)
    for name, wanted_s in TARGETS_S.items():
        axis.axvline(wanted_s, color="#8a8a8a", linestyle=":", label=f"aim: {name} {wanted_s:g} s")
    axis.set(xlabel="s without an acknowledgement", ylabel="share of kills", ylim=(0, 1))
    axis.set_title(f"A master is killed with kill -9; session {SESSION_S:g} s")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, bbox_inches="tight")
