"""Two faults at a time: the second comes before the first is made good.

The first is a kill -9 of a child, a SIGSTOP, or the order to end. The second, a moment of random
length later: a kill -9 of another child, of the one that takes the first one's place, of the whole
broker, of its supervisor or its zygote; or the order to end. Whatever has ended is started again,
and an end with nothing but children killed has to be an orderly one: `abort` is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import psutil
from family import CHILDREN, RECOVER_TIMEOUT_S
from fault.campaigns import Options, Tally, campaign
from fault.kills import rounds
from fault.rig import Rig

from cometmq.shm.os.files import ABORT_FILE

FIRSTS: Final = ("kill", "kill", "stop", "end")
SECONDS: Final = ("kill", "kill", "kill", "restarted", "end", "whole")
WHOLE: Final = ("supervisor", "zygote", "all")
VICTIMS: Final = (*CHILDREN, "supervisor", "zygote")
MOMENT_S: Final = 0.3  # at most, between the two


class Pair(NamedTuple):
    first: str  # kill, stop, end
    role: str  # whom; "broker" for an end
    second: str  # kill, end
    other: str

    @property
    def ends(self) -> bool:
        """Whether the broker is to end of it."""
        return "end" in (self.first, self.second) or self.other in WHOLE

    @property
    def is_orderly(self) -> bool:
        return "end" in (self.first, self.second) and self.other not in WHOLE


def pair_with(rig: Rig, victim: str) -> Pair:
    """One in which this process is killed; the rest is drawn."""
    chance = rig.chance
    if victim in WHOLE:
        first = chance.choice(FIRSTS)
        role = "broker" if first == "end" else chance.choice(CHILDREN)
        return Pair(first, role, "kill", victim)
    first, second = chance.choice(FIRSTS), chance.choice(SECONDS)
    if first == "end" or (first == "stop" and second == "end"):
        return Pair(first, chance.choice(CHILDREN) if first == "stop" else "broker", "kill", victim)
    others = {
        "kill": chance.choice([role for role in CHILDREN if role != victim]),
        "restarted": victim,
        "end": "broker",
        "whole": chance.choice(WHOLE),
    }
    second_kind = "end" if second == "end" else "kill"
    if first == "stop":  # the victim is the one that is killed meanwhile
        stopped = chance.choice([role for role in CHILDREN if role != victim])
        return Pair("stop", stopped, "kill", victim)
    return Pair("kill", victim, second_kind, others[second])


def fault_with(rig: Rig, pair: Pair) -> None:
    """Do both, and see that everything is made good."""
    killed = [pair.role] if pair.first == "kill" else []
    killed += [pair.other] if pair.second == "kill" and pair.other in CHILDREN else []
    rig._spare(*killed)
    before = rig.broker.pids()
    rig.work.fault(f"{pair.first}+{pair.second}", pair.role, pair.other)
    _do(rig, pair.first, pair.role, before)
    time.sleep(rig.chance.random() ** 2 * MOMENT_S)
    if pair.other == pair.role and pair.first == "kill":
        before = {pair.other: _successor(rig, pair.other, before[pair.other])}
    _do(rig, pair.second, pair.other, before)
    if pair.first == "stop":
        time.sleep(rig.chance.random())
        with contextlib.suppress(ProcessLookupError):
            os.kill(before[pair.role], signal.SIGCONT)
    if pair.ends:
        _start_again(rig, pair)
    else:
        for role in killed:
            rig.broker.wait_serves(role, not_pid=before[role])
    rig.wait_resumed(" ".join(pair))


def _do(rig: Rig, what: str, target: str, pids: dict[str, int]) -> None:
    """Without waiting for what comes of it."""
    if target == "all":
        rig.broker.kill_all()
        return
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}[what]
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, ValueError):
        if target == "zygote":
            os.kill(rig.broker.zygote_pid(), number)
        elif target in ("supervisor", "broker"):
            os.kill(rig.broker.pid, number)
        else:
            os.kill(pids[target], number)


def _successor(rig: Rig, role: str, pid: int) -> int:
    """The process that takes its place, as soon as there is one."""
    deadline = time.monotonic() + RECOVER_TIMEOUT_S
    while time.monotonic() < deadline:
        for process in rig.broker.processes():
            with contextlib.suppress(psutil.Error):
                if process.pid != pid and process.name() == f"cmq-{role}"[:15]:
                    return process.pid
    raise AssertionError(f"nobody takes the place of {role}:\n{rig.broker.log[-4000:]}")


def _start_again(rig: Rig, pair: Pair) -> None:
    if pair.other != "all":
        rig.broker.wait_ended()
    if pair.is_orderly and (rig.store / ABORT_FILE).exists():
        raise AssertionError(f"{pair}: abort stayed:\n{rig.broker.log[-4000:]}")
    rig.broker = rig._start()


def pair_one(rig: Rig, victims: Sequence[str], number: int) -> None:
    """Each process in turn is killed as one of the two."""
    victim = victims[number % len(victims)]
    if victim in CHILDREN and not rig.may_kill(victim):
        victim = rig.chance.choice([v for v in victims if rig.may_kill(v)] or [victim])
    fault_with(rig, pair_with(rig, victim))


@campaign("pairs", "two faults at a time: kills, stops, ends, and restarts that are killed")
def pairs(options: Options) -> Iterator[Tally]:
    victims = [victim for victim in VICTIMS if options.wants(victim)]
    yield from rounds(options, "pairs", lambda rig, number: pair_one(rig, victims, number))
