"""The campaigns of replicated groups: what is done to them, again and again, under load.

    python -m tests.fault groups --kills 100 --only kill --only power-cut
    python -m tests.fault groups --only partition --minutes 60
    python -m tests.fault groups --only timed --only stop --only rolling
    python -m tests.fault fail-over --kills 50

A round is one group from its start to its judgement, with some faults of all kinds that are
wanted. Every second round runs in network namespaces; partitions are tried in these alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import psutil
import reference
from etcd_servers import trouble as etcd_trouble
from family import EndedEarly
from fault import disk, network
from fault.campaigns import Options, Tally, campaign, new_tally
from fault.disk import DiskTrouble
from fault.group_judge import SEGMENT_BYTES
from fault.group_replica import Replica
from fault.groups import HEAL_S, ONE_DISK, SESSION_S, WORKS, GroupRig, Shape
from fault.network import NetworkTrouble
from fault.timed_work import supersede
from fault.work import Work

from cometmq.cluster.administration import FailOver
from cometmq.protocol.errors import CometError
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

CAMPAIGN: Final = "groups"
RIG_TROUBLE: Final = (DiskTrouble, NetworkTrouble)
ROUND_FAULTS: Final = 12
WORK_S: Final = 2.0  # at most, between two faults
# Of the rounds, in turn. On one disk clients map the stores.
SHAPES: Final = (
    ONE_DISK,
    Shape("ext4"),
    Shape("xfs", apart=True),
    Shape("xfs"),
    Shape("ext4", apart=True, servers=1),
    Shape("xfs", apart=True, servers=3),
)
ROLES: Final = ("ha", "commitlog", "supervisor", "dispatcher", "coordinator", "flush", "reader-0")
HELD_S: Final = (2.0, 14.0)  # of partitions and full disks; a follower is left out after 10
FILLER: Final = "filler"


@dataclass(frozen=True)
class Fault:
    """One kind.

    Args:
        targets: those it is done to, in turn.
        needs: of what a shape `has`.
    """

    name: str
    do: Callable[[GroupRig, str], None]
    targets: tuple[str, ...]
    needs: tuple[str, ...] = ()


FAULTS: Final[dict[str, Fault]] = {}


def fault(
    name: str, *targets: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[GroupRig, str], None]], Callable[[GroupRig, str], None]]:
    def register(do: Callable[[GroupRig, str], None]) -> Callable[[GroupRig, str], None]:
        FAULTS[name] = Fault(name, do, targets, needs)
        return do

    return register


# --- ends of processes ----------------------------------------------------------------------------


@fault("kill", "master", "follower", "all")
def kill(rig: GroupRig, target: str, *, told: bool = True) -> None:
    """kill -9 of whole brokers; they come back at once, or once the others go on without them.

    Args:
        told: it is a fault of its own.
    """
    gone = rig.pick(target)
    if told:
        rig.fault("kill", target)
    for each in gone:
        each.kill()
    come_back(rig, gone)


def come_back(rig: GroupRig, gone: list[Replica]) -> None:
    if len(gone) == 1 and rig.chance.random() < 0.7:
        rig.wait_served(without=gone[0])
        if rig.chance.random() < 0.7:
            rig.wait_resumed("the end of a replica")
    for each in rig.chance.sample(gone, len(gone)):
        each.start()


@fault("kill-process", "master", "follower")
def kill_process(rig: GroupRig, target: str) -> None:
    """kill -9 of one process; its supervisor makes it good, or all end with that. One that has not
    begun to serve ends of any such death, as a start that fails does."""
    (victim,) = rig.pick(target)
    rig.until(lambda: victim.is_ready, f"{victim.name} does not serve")
    role = rig.chance.choice([role for role in ROLES if role in victim.pids()])
    rig.fault("kill-process", target, role)
    pid = victim.pids()[role]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if role == "supervisor":
        assert victim.broker is not None
        victim.broker.wait_ended()
        victim.broker = None
        come_back(rig, [victim])
    else:
        rig.until(lambda: victim.pids().get(role, pid) != pid, f"another {role} of {victim.name}")


@fault("pair", "successor", "anybody", "starting")
def pair(rig: GroupRig, target: str) -> None:
    """A second kill before the first is made good: of the one that has taken over, or is about to;
    or of the same one as it starts."""
    (first,) = rig.pick("master")
    rig.fault("pair", target)
    first.kill()
    if target == "successor":
        gone = [first, rig.wait_served(without=first)]
    elif target == "anybody":
        gone = [first, rig.chance.choice([each for each in rig.replicas if each is not first])]
        time.sleep(rig.chance.uniform(0.0, 2 * SESSION_S))
    else:
        first.start()
        time.sleep(rig.chance.uniform(0.0, 2 * SESSION_S))
        gone = [first]
    gone[-1].kill()
    for each in rig.chance.sample(gone, len(gone)):
        each.start()


@fault("power-cut", "master", "follower", "all", needs=("disk",))
def power_cut(rig: GroupRig, target: str) -> None:
    """Under ASYNC_FLUSH not of all: then nobody is left who surely has everything."""
    if target == "all" and not rig.sync:
        target = "two"
    gone = rig.pick("all")[:2] if target == "two" else rig.pick(target)
    rig.fault("power-cut", target)
    for each in gone:
        each.cut_power()
    for each in gone:
        each.power_on()
    come_back(rig, gone)


@fault("stop", "master", "follower")
def stop(rig: GroupRig, target: str) -> None:
    """SIGSTOP of the whole broker past its session, and SIGCONT: then it acknowledges nothing."""
    (victim,) = rig.pick(target)
    rig.fault("stop", target)
    victim.signal(signal.SIGSTOP)
    if target == "master":
        rig.wait_served(without=victim)
    else:
        time.sleep(rig.chance.uniform(SESSION_S, 4 * SESSION_S))  # the fault itself
    victim.signal(signal.SIGCONT)


# --- links ----------------------------------------------------------------------------------------


@fault("partition", "both", "from-master", "to-master", "followers", needs=("network",))
def partition(rig: GroupRig, target: str) -> None:
    """The master from both followers, both ways or one; or the followers from each other."""
    assert rig.network is not None
    (master,) = rig.pick("master")
    others = [each.name for each in rig.replicas if each is not master]
    links = {
        "both": [(master.name, o) for o in others] + [(o, master.name) for o in others],
        "from-master": [(master.name, o) for o in others],
        "to-master": [(o, master.name) for o in others],
        "followers": [(others[0], others[1]), (others[1], others[0])],
    }
    rig.fault("partition", target)
    cut_for_a_while(rig, links[target])


def cut_for_a_while(rig: GroupRig, links: list[tuple[str, str]]) -> None:
    with cut(rig, links):
        time.sleep(rig.chance.uniform(*HELD_S))  # the fault itself


@contextlib.contextmanager
def cut(rig: GroupRig, links: list[tuple[str, str]]) -> Iterator[None]:
    assert rig.network is not None
    try:
        for sender, receiver in links:
            rig.network.cut(sender, receiver)
        yield
    finally:
        rig.network.heal()


# --- disks ----------------------------------------------------------------------------------------


@fault("disk-full", "follower", "master", needs=("disk",))
def disk_full(rig: GroupRig, target: str) -> None:
    """And freed after a while. Nobody ends of it, and nobody is helped."""
    (victim,) = rig.pick(target)
    rig.fault("disk-full", target)
    with full_disk(victim):
        until = time.monotonic() + rig.chance.uniform(*HELD_S)
        while time.monotonic() < until:
            rig.check_alive()
            time.sleep(0.1)  # the fault itself


@contextlib.contextmanager
def full_disk(victim: Replica) -> Iterator[None]:
    """Somebody else takes all the room there is, to the last block."""
    assert victim.disk is not None
    path = victim.disk.folder / FILLER
    try:
        with path.open("wb") as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, size)
        yield
    finally:
        path.unlink()


@fault("flip", "follower")
def flip(rig: GroupRig, target: str) -> None:
    """A bit of a confirmed message, while its replica is down. Its start finds it, and ends; or it
    lies before what a start after kill -9 looks at: then nobody ever gets it from there."""
    (victim,) = rig.pick(target)
    confirmed = victim.counter(Counter.REPLICATED)
    victim.kill()
    where = rig.chance.choice(("tail", "sealed"))
    rig.fault("flip", target, where)
    record = flip_a_bit(rig, victim, confirmed, where)
    victim.start()
    rig.until_ended_or_in_sync(victim)
    rig.counts[f"{where} flips that the start has {'not ' * victim.runs}met"] += 1
    replace_damaged(rig, victim, record)


@fault("damage", "follower", "master")
def damage(rig: GroupRig, target: str) -> None:
    """The same while it runs, and serves."""
    (victim,) = rig.pick(target)
    rig.fault("damage", target)
    confirmed = victim.counter(Counter.REPLICATED)
    replace_damaged(rig, victim, flip_a_bit(rig, victim, confirmed, "tail"))


def replace_damaged(rig: GroupRig, victim: Replica, record: reference.Record) -> None:
    """By an empty store. If it still runs its reader is asked for the message, and all end."""
    if victim.runs and rig.network is None:
        with contextlib.suppress(CometError):
            messages = victim.read(record.topic, record.queue_id, record.queue_offset)
            raise AssertionError(f"{victim.name} has served {len(messages)} messages of damage")
        rig.until_ended(victim)
    if victim.runs:
        victim.kill()
    else:
        why = victim.why_ended()
        assert "damaged" in victim.log, why
    rig.wait_served(without=victim)
    victim.empty()
    victim.start()


def flip_a_bit(rig: GroupRig, victim: Replica, confirmed: int, where: str) -> reference.Record:
    found = [
        unit
        for unit in reference.walk_log(victim.store)
        if isinstance(unit, reference.Record)
        and unit.topic in rig.kind.topics
        and unit.lies_at < confirmed
    ]
    tail = [unit for unit in found if unit.lies_at >= confirmed - confirmed % SEGMENT_BYTES]
    sealed = found[: len(found) - len(tail)]
    record = rig.chance.choice((tail if where == "tail" else sealed) or found)
    at = record.lies_at + record.raw.index(record.body) + rig.chance.randrange(len(record.body))
    path = victim.store / COMMITLOG_DIR / segment_name(at - at % SEGMENT_BYTES)
    with path.open("r+b") as file:
        file.seek(at % SEGMENT_BYTES)
        (byte,) = file.read(1)
        file.seek(at % SEGMENT_BYTES)
        file.write(bytes([byte ^ 1 << rig.chance.randrange(8)]))
    return record


# --- what operators do ----------------------------------------------------------------------------


@fault("rolling", "all")
def rolling(rig: GroupRig, target: str) -> None:
    """Every broker ends in order and comes back, followers first."""
    (master,) = rig.pick("master")
    rig.fault("rolling", target)
    for each in sorted(rig.replicas, key=lambda replica: replica is master):
        status = each.end()
        assert status == 0, f"{each.name} ended with {status}\n{rig.state()}"
        each.start()
        rig.wait_in_sync(f"the restart of {each.name}")


@fault("replace", "follower", "master")
def replace(rig: GroupRig, target: str) -> None:
    """By an empty store."""
    (victim,) = rig.pick(target)
    rig.fault("replace", target)
    victim.kill()
    rig.wait_served(without=victim)
    victim.empty()
    victim.start()


@fault("add-remove", "follower", "master", "dead", needs=("together",))
def add_remove(rig: GroupRig, target: str) -> None:
    """A fourth replica comes with an empty store, one of the others goes for good, and somebody is
    killed before, between, or after that."""
    rig.wait_in_sync("nothing")
    rig.fault("add-remove", target)
    kill_at = rig.chance.choice(("joining", "all in sync", "removed"))
    rig.add_replica()
    kill_somebody(rig, kill_at == "joining")
    rig.wait_in_sync("a replica was added")
    kill_somebody(rig, kill_at == "all in sync")
    if target == "master":
        victim = hand_over(rig)
    else:
        (victim,) = rig.pick("follower")
    if target == "dead":
        victim.kill()
    rig.remove_replica(victim)
    kill_somebody(rig, kill_at == "removed")
    rig.wait_resumed("a replica was removed")
    kill(rig, "master", told=False)


def kill_somebody(rig: GroupRig, now: bool) -> None:
    if now:
        (victim,) = rig.pick(rig.chance.choice(("master", "follower")))
        victim.kill()
        come_back(rig, [victim])


def hand_over(rig: GroupRig) -> Replica:
    """By the one who is master now, which then is not."""
    (master,) = rig.pick("master")
    while rig.wait_served() is master:
        rig.wait_in_sync("a fail-over")
        with contextlib.suppress(CometError):
            FailOver(rig.engine, rig.looker, None).wait_served()
    return master


@fault("failover", "master")
def failover(rig: GroupRig, target: str) -> None:
    """By command. Somebody else may be elected meanwhile, on a machine that others use."""
    rig.wait_in_sync("nothing")
    rig.fault("failover", target)
    with contextlib.suppress(CometError):
        FailOver(rig.engine, rig.looker, None).wait_served()


# --- clients --------------------------------------------------------------------------------------


@fault("kill-client", "producer", "consumer")
def kill_client(rig: GroupRig, target: str) -> None:
    """kill -9; another takes its place."""
    those = rig.work.producers if target == "producer" else rig.work.consumers
    rig.work.replace(rig.chance.choice(those))


@fault("supersede", "producer", needs=("timed",))
def take_name(rig: GroupRig, _target: str) -> None:
    """Another process takes the name of a producer that goes on for a while."""
    supersede(rig.work, rig.acks, rig.chance, HEAL_S)


# --- campaigns ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One group from its start to its judgement.

    Args:
        name: of the campaign.
        do: one fault, and that everything is made good.
        count: how many.
    """

    name: str
    seed: int
    sync: bool
    do: Callable[[GroupRig], None]
    count: int
    shape: Shape = ONE_DISK
    clients: Work | None = None

    @property
    def flush(self) -> str:
        return "SYNC_FLUSH" if self.sync else "ASYNC_FLUSH"


@campaign(CAMPAIGN, "replicated groups: kills, cuts, partitions, pauses, disks; --only them, works")
def groups(options: Options) -> Iterator[Tally]:
    """Of each shape a round of each work, then of the next."""
    works = [name for name in WORKS if name in options.only] or list(WORKS)
    shapes = [
        dataclasses.replace(shape, work=work)
        for shape in SHAPES
        if usable(options, shape)
        for work in works
    ]
    faults = [each for name, each in FAULTS.items() if name in options.only]
    wanted = faults or list(FAULTS.values())
    plans = [(shape, fitting(wanted, shape)) for shape in shapes if fitting(wanted, shape)]
    assert plans, "none of these can be tried here"
    left, number = options.faults, 0
    while left > 0 and not options.over:
        shape, faults = plans[number % len(plans)]
        cycle = 0 if len(plans) % 2 else number // len(plans)  # each shape has both, in turn
        sync, seed = options.sync_of(number + cycle), options.seed + number
        deck = Deck(options, faults, random.Random(seed))
        count = min(left, ROUND_FAULTS)
        name = CAMPAIGN if shape.work == "plain" else f"{CAMPAIGN}-{shape.work}"
        yield from run_round(options, Round(name, seed, sync, deck.do_next, count, shape))
        left, number = left - count, number + 1


def usable(options: Options, shape: Shape) -> bool:
    why = disk.trouble(shape.kind) if shape.kind else ""
    why = why or (network.trouble() if shape.apart else "")
    why = why or (etcd_trouble() if shape.servers else "")
    if why:
        options.say(f"NOT TESTED: groups with {', '.join(sorted(shape.has - {shape.work}))}: {why}")
    return not why


def fitting(faults: Sequence[Fault], shape: Shape) -> list[Fault]:
    return [each for each in faults if set(each.needs) <= shape.has]


class Deck:
    """Faults in an order of its own: all kinds, then all again; each kind's targets likewise."""

    def __init__(self, options: Options, faults: Sequence[Fault], chance: random.Random) -> None:
        self._options, self._chance = options, chance
        self._faults = list(faults)
        self._left: list[Fault] = []
        self._targets: dict[str, list[str]] = {each.name: [] for each in faults}

    def _draw(self) -> tuple[Fault, str]:
        if not self._left:
            self._left = self._chance.sample(self._faults, len(self._faults))
        one = self._left.pop()
        targets = self._targets[one.name]
        if not targets:
            targets += self._chance.sample(one.targets, len(one.targets))
        return one, targets.pop()

    def do_next(self, rig: GroupRig) -> None:
        one, target = self._draw()
        self._options.say(f"  {one.name} of {target}")
        time.sleep(rig.chance.random() ** 2 * WORK_S)  # between two faults
        one.do(rig, target)
        rig.wait_healed(f"{one.name} of {target}")


def run_round(options: Options, one: Round) -> list[Tally]:
    """Its lines of the tally. What was found stays in its folder, and in `options.failures`."""
    folder = options.folder(f"{one.name}-{one.seed}")
    try:
        with GroupRig(folder, one.seed, one.sync, one.shape, one.clients) as rig:
            for _ in range(one.count):
                if options.over:
                    break
                one.do(rig)
            outcome = rig.finish()
    except (AssertionError, CometError, EndedEarly, psutil.Error, *RIG_TROUBLE) as error:
        text = f"{type(error).__name__}: {error}"
        options.failed(f"{one.name}, seed {one.seed}, kept in {folder}: {text}")
        outcome_ = f"broke off: {text[:300]}"
        return [new_tally(one.name, one.seed, one.sync, one.name, "*", outcome=outcome_)]
    counts = outcome.verdict.counts
    options.say(
        f"{one.name}: seed {one.seed}, {one.flush}, {one.shape}: {len(outcome.faults)} faults, "
        f"{counts['masterships']} masterships, {counts['acknowledged']} acknowledged, "
        f"{counts['lost']} lost, {counts['unknown']} unknown, {counts['duplicates']} duplicates, "
        f"{outcome.took_s:.0f} s; {dict(rig.counts)}"
    )
    if outcome.ok:
        shutil.rmtree(folder)
    else:
        options.failed(f"{one.name}, seed {one.seed}, kept in {folder}:\n{outcome.verdict}")
    return outcome.tally(one.name, one.seed, one.sync)
