"""The disk's campaigns: power cuts under load, the nth system call, damaged files.

python -m tests.fault power-cuts --kills 300 --flush sync --only xfs
python -m tests.fault nth-call --kills 500 --only cut
python -m tests.fault flips --kills 5000
"""

from __future__ import annotations

import errno
import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import golden
from fault.calls import Fault, Scenario
from fault.campaigns import Options, Tally, campaign, commit_under_test, today
from fault.disk import FILE_SYSTEMS, Disk, trouble
from fault.flips import Victim, flip, make_store
from fault.power import PowerCuts
from fault.service_power import ServiceCuts

FAULTS: Final = {
    "eio": Fault(errno.EIO),
    "enospc": Fault(errno.ENOSPC, forever=True),
    "cut": Fault(0),
}
CUTS_OF_A_DISK: Final = 100  # then a fresh one: a start reads all that there is
SERVED_EVERY: Final = 20  # flips: the rest is judged without a broker


def line(options: Options, name: str, fault: str, target: str) -> Tally:
    return Tally(
        campaign=name,
        seed=options.seed,
        commit=commit_under_test(),
        date=today(),
        fault=fault,
        target=target,
    )


@campaign("power-cuts", "cut the power under load; --only ext4, xfs")
def power_cuts(options: Options) -> Iterator[Tally]:
    yield from cut_disks(options, "power-cuts", PowerCuts)


@campaign("service-cuts", "the same of a service that appends by itself; --only ext4, xfs")
def service_cuts(options: Options) -> Iterator[Tally]:
    yield from cut_disks(options, "service-cuts", ServiceCuts)


def cut_disks(options: Options, name: str, cuts_of: type[PowerCuts]) -> Iterator[Tally]:
    """--kills are the cuts in all, shared out among file systems and kinds of flush."""
    kinds = [kind for kind in FILE_SYSTEMS if options.wants(kind) and usable(options, kind)]
    ways = {"sync": (True,), "async": (False,)}.get(options.flush, (True, False))
    each = -(-options.faults // max(1, len(kinds) * len(ways)))
    for kind in kinds:
        for sync in ways:
            for first in range(0, each, CUTS_OF_A_DISK):
                if options.over:
                    return
                cuts = min(CUTS_OF_A_DISK, each - first)
                yield cut_one_disk(options, name, cuts_of, kind, sync, cuts, first)


def usable(options: Options, kind: str) -> bool:
    reason = trouble(kind)
    if reason:
        options.say(f"NOT TESTED: no {kind} of our own: {reason}")
    return not reason


def cut_one_disk(
    options: Options,
    name: str,
    cuts_of: type[PowerCuts],
    kind: str,
    sync: bool,
    cuts: int,
    first: int,
) -> Tally:
    place = options.folder("power")
    found = line(options, name, "power cut", kind)
    found.flush = "sync" if sync else "async"
    found.seed = options.seed + first
    with Disk(place, kind, space_bytes=16 << 30) as disk:
        done = cuts_of(disk, sync=sync, seed=found.seed, logs=place)
        try:
            while disk.cuts < cuts and not options.over:
                done.cycle()
                options.progress(f"{kind}, {found.flush}: {disk.cuts} cuts, {done.lost} lost")
            done.finish()
        except Exception as error:
            found.outcome = "; ".join(
                [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
            )[:2000]
            options.failed(found.outcome)
        found.faults, found.acknowledged, found.lost = disk.cuts, done.acknowledged, done.lost
        found.counts = dict(Counter(done.moments)) | {
            "slowest_start_ms": int(done.slowest_start_s * 1000),
        }
    if found.outcome == "ok":
        shutil.rmtree(place)
    return found


@campaign("nth-call", "the nth system call fails; --only eio, enospc, cut")
def nth_calls(options: Options) -> Iterator[Tally]:
    """--kills are spread over all the calls of the scenario; the seed moves where it begins."""
    wanted = [name for name in FAULTS if options.wants(name)]
    for name in wanted:
        if name == "cut" and not usable(options, "ext4"):
            continue
        place = options.folder("nth")
        disk = Disk(place, "ext4") if name == "cut" else None
        try:
            yield from fail_calls(
                options, name, Scenario(place, disk), options.faults // len(wanted)
            )
        finally:
            if disk is not None:
                disk.close()
            if not options.failures:
                shutil.rmtree(place)


def fail_calls(options: Options, name: str, scenario: Scenario, faults: int) -> Iterator[Tally]:
    found = line(options, "nth-call", name, "store")
    calls = scenario.count(FAULTS[name])
    step = max(1, calls // max(1, faults))
    hit: Counter[str] = Counter()
    for n in range(1 + options.seed % step, calls + 1, step):
        if options.over:
            break
        outcome = scenario.run(FAULTS[name], n)
        found.faults += bool(outcome.what)
        found.acknowledged += len(outcome.acknowledged)
        hit[outcome.what.partition(" ")[0] or "none"] += 1
        options.progress(str(outcome))
        if outcome.complaints:
            found.outcome = f"{outcome}: {outcome.complaints}"[:2000]
            options.failed(found.outcome)
    found.counts = dict(hit) | {"calls": calls}
    yield found


@campaign("flips", "bits, pages and ends of files")
def flips(options: Options) -> Iterator[Tally]:
    """Over four stores in turn; every 20th damage is opened by a whole broker."""
    place = options.folder("flips")
    victims = make_victims(place, options.seed)
    chance = random.Random(options.seed)
    found = line(options, "flips", "damage", "store")
    counts: Counter[str] = Counter()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # each damage is reported by recovery, at length
    try:
        for number in range(options.faults):
            if options.over:
                break
            served = number % SERVED_EVERY == 0
            victim = victims[number // SERVED_EVERY % 2 if served else number % len(victims)]
            verdict = flip(victim, chance, served=served)
            found.faults += 1
            counts[f"{verdict.damage.target} {verdict.damage.kind}"] += 1
            counts["refused"] += bool(verdict.refused)
            counts["entries that verify finds"] += verdict.missing
            counts.update({f"changed {name}": n for name, n in verdict.changed.items()})
            if verdict.complaints:
                found.outcome = f"flip {number}, {verdict.damage}: {verdict.complaints}"[:2000]
                options.failed(found.outcome)
    finally:
        logging.disable(before)
    found.counts = dict(counts)
    yield found
    if found.outcome == "ok":
        shutil.rmtree(place)


def make_victims(place: Path, seed: int) -> list[Victim]:
    """Two stores of our own, which a broker serves with small segments, and two of RocketMQ."""
    victims = []
    for clean in (True, False):
        folder = place / f"ours-{clean}"
        folder.mkdir()
        settings = make_store(folder / "store", clean=clean, seed=seed)
        victims.append(Victim(folder / "store", settings))
    return victims + [
        Victim(golden.unpack(name, place)) for name in ("loghub-clean", "loghub-abort")
    ]
