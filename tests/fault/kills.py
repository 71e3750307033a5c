"""kill -9 and SIGSTOP of every process, at random moments and at named points of the code."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from family import EndedEarly
from fault.campaigns import Options, Tally, campaign, new_tally
from fault.points import POINTS, Point
from fault.rig import TARGETS, Outcome, Rig

from cometmq.protocol.errors import CometError

ROUND_FAULTS: Final = 100  # on one store; then a new one, so that failures stay small

BROKE_OFF: Final = (AssertionError, CometError, EndedEarly, psutil.Error)

Fault = Callable[[Rig, int], None]


@campaign("kills", "kill -9 of every process, and of all at once, at random moments")
def random_kills(options: Options) -> Iterator[Tally]:
    targets = [target for target in TARGETS if options.wants(target)]
    yield from rounds(options, "kills", lambda rig, number: kill_one(rig, targets, number))


def kill_one(rig: Rig, targets: Sequence[str], number: int) -> None:
    """Each in turn, a moment of random length after the one before."""
    time.sleep(rig.chance.random() ** 3 * 0.3)
    target = targets[number % len(targets)]
    if not rig.may_kill(target):
        target = rig.chance.choice([t for t in targets if rig.may_kill(t)] or [target])
    rig.kill(target)


# What leads to these points is at work in tests of their own.
ELSEWHERE: Final = frozenset(
    {"derived", "transactions", "replication", "named", "timers", "filters"}
)


@campaign("points", "kill -9 at named points of the code; --only takes their names too")
def kills_at_points(options: Options) -> Iterator[Tally]:
    """In rounds of their own where old segments go."""
    wanted = [
        point for point in POINTS.values()
        if point.when not in ELSEWHERE
        and (options.wants(point.role) or options.wants(point.name))
    ]  # fmt: skip
    for retention in (False, True):
        points = [point for point in wanted if (point.when == "clean") == retention]
        if points:
            share = len(points) / len(wanted)
            yield from rounds(
                options, "points", partial(kill_at_one, points), retention=retention, share=share
            )


def kill_at_one(points: Sequence[Point], rig: Rig, number: int) -> None:
    """All of them in an order of the rig's own, then again."""
    order = [point for point in points if rig.sync or not point.sync_only]
    random.Random(f"{rig.seed} {number // len(order)}").shuffle(order)
    rig.kill_at(order[number % len(order)])


@campaign("pauses", "SIGSTOP of every process for 1 to 5 s, or --stop, then SIGCONT")
def pauses(options: Options) -> Iterator[Tally]:
    targets = [target for target in TARGETS if options.wants(target)]

    def pause(rig: Rig, number: int) -> None:
        rig.pause(targets[number % len(targets)], options.stop_s or rig.chance.uniform(1, 5))

    yield from rounds(options, "pauses", pause)


def rounds(
    options: Options,
    name: str,
    fault: Fault,
    *,
    retention: bool = False,
    share: float = 1.0,
    make: type[Rig] = Rig,
    round_faults: int = ROUND_FAULTS,
) -> Iterator[Tally]:
    """Rig after rig until the faults or the time are used up; its Tally after each."""
    left = max(1, round(options.faults * share))
    number = 0
    while left > 0 and not options.over:
        sync, seed = options.sync_of(number), options.seed + number
        folder = options.folder(f"{name}-{seed}-{'sync' if sync else 'async'}")
        try:
            outcome = one_round(
                options, folder, seed, sync, min(left, round_faults), fault, retention, make
            )
        except BROKE_OFF as error:
            text = f"{type(error).__name__}: {error}"
            options.failed(f"{name}, seed {seed}, kept in {folder}: {text}")
            yield new_tally(name, seed, sync, name, "*", outcome=f"broke off: {text[:300]}")
            return
        yield from settle(options, name, seed, sync, outcome)
        left -= max(1, len(outcome.faults))
        number += 1


def settle(options: Options, name: str, seed: int, sync: bool, outcome: Outcome) -> Iterator[Tally]:
    """Tell of a round; what was found wrong stays where it is."""
    counts = outcome.verdict.counts
    options.say(
        f"{name}: seed {seed}, {'SYNC' if sync else 'ASYNC'}_FLUSH, {len(outcome.faults)} "
        f"faults, {counts['acknowledged']} acknowledged, {counts['lost']} lost, "
        f"{counts['duplicates']} duplicates, {outcome.took_s:.0f} s"
    )
    yield from outcome.tally(name, seed, sync)
    if outcome.ok:
        shutil.rmtree(outcome.folder)
    else:
        options.failed(f"{name}, seed {seed}, kept in {outcome.folder}:\n{outcome.verdict}")


def one_round(
    options: Options,
    folder: Path,
    seed: int,
    sync: bool,
    count: int,
    fault: Fault,
    retention: bool = False,
    make: type[Rig] = Rig,
) -> Outcome:
    with make(folder, seed=seed, sync=sync, retention=retention) as rig:
        for number in range(count):
            if options.over:
                break
            fault(rig, number)
            options.progress(f"seed {seed}: {number + 1} of {count}")
            if retention and number % 3 == 0:
                rig.clean()
        return rig.finish()
