"""Faults of a group's engine: etcd with one server or three. Links, servers, machines."""

from __future__ import annotations

import signal
import time
from typing import Final

from fault.group_faults import HELD_S, cut, cut_for_a_while, fault
from fault.groups import NAMES, SESSION_S, GroupRig, Shape
from fault.network import HOST

ENSEMBLE: Final = ("network", "three servers")
THREE_SERVERS: Final = Shape(apart=True, servers=3)


@fault("engine-cut", "master", "follower", needs=("network", "one server"))
def engine_cut(rig: GroupRig, target: str) -> None:
    """From the engine, the name server and the clients; and of a master in half of the cases from
    one of its followers."""
    (victim,) = rig.pick(target)
    links = [(victim.name, HOST)]
    if target == "master" and rig.chance.random() < 0.5:
        other = rig.chance.choice([name for name in NAMES if name != victim.name])
        links += [(victim.name, other), (other, victim.name)]
    rig.fault("engine-cut", target)
    cut_for_a_while(rig, links)


@fault("engine-minority", "both", "from-master", "to-master", "follower", needs=ENSEMBLE)
def engine_minority(rig: GroupRig, target: str) -> None:
    """A machine and its server of the engine from the two others, both ways or one: the master's,
    of which the others elect another one while the cut lasts; or a follower's, and the group goes
    on without it. Clients and name server reach all of them."""
    (victim,) = rig.pick("follower" if target == "follower" else "master")
    others = [name for name in NAMES if name != victim.name]
    to_it, from_it = [(o, victim.name) for o in others], [(victim.name, o) for o in others]
    links = {"from-master": from_it, "to-master": to_it}.get(target, from_it + to_it)
    led = rig.servers.leader() == victim.name
    rig.fault("engine-minority", target, "with the leader" if led else "")
    with cut(rig, links):
        if target != "follower":
            rig.wait_served(without=victim)
        rig.wait_resumed("a machine was cut off")
        time.sleep(rig.chance.uniform(0.0, HELD_S[1]))  # the fault itself
        rig.wait_resumed("a machine was cut off for long")
    rig.servers.wait_ready()


@fault("engine-node", "leader", "follower", "with-master", needs=ENSEMBLE)
def engine_node(rig: GroupRig, target: str) -> None:
    """Kill (kill -9) one etcd server of three: the leader, another one, or the one on the master's
    machine together with the master."""
    master = rig.wait_served()
    leader = rig.servers.leader()
    if target == "with-master":
        gone = master.name
    elif target == "leader":
        gone = leader
    else:
        gone = rig.chance.choice([name for name in NAMES if name != leader])
    rig.fault("engine-node", target)
    rig.servers.kill(gone)
    if target == "with-master":
        master.kill()
        rig.wait_served(without=master)
    rig.wait_resumed("the end of a server of the engine")
    time.sleep(rig.chance.uniform(0.0, 2 * SESSION_S))  # the fault itself
    if target == "with-master":
        master.start()
    rig.servers.start(gone)


@fault("engine-hang", "leader", "follower", "all", needs=ENSEMBLE)
def engine_hang(rig: GroupRig, target: str) -> None:
    """SIGSTOP of one server of three, which keeps its connections and answers nothing: sessions
    are kept by the others, or another master is elected. Or of all: the group goes on as it is."""
    master = rig.wait_served()
    leader = rig.servers.leader()
    names = [name for name in NAMES if name != leader]
    hung = {"leader": [leader], "follower": [rig.chance.choice(names)], "all": list(NAMES)}[target]
    rig.fault("engine-hang", target)
    rig.servers.signal(signal.SIGSTOP, *hung)
    try:
        if target != "all":
            rig.wait_resumed("a server of the engine hangs")
        until = time.monotonic() + rig.chance.uniform(*HELD_S)
        while time.monotonic() < until:  # the fault itself
            if target == "all":
                serving = [each for each in rig.replicas if each.serves]
                assert serving == [master], rig.state()
            time.sleep(0.1)
        rig.wait_resumed("the engine hangs for long")
        same = target == "all" or rig.wait_served() is master
        rig.counts[f"{'the same' if same else 'another'} master while the engine hangs"] += 1
    finally:
        rig.servers.signal(signal.SIGCONT, *hung)
    rig.servers.wait_ready()


@fault("engine-kill", "server", "with-master", needs=("etcd",))
def engine_kill(rig: GroupRig, target: str) -> None:
    """kill -9 of the engine, all servers of it; the group goes on as it is, and after its sessions
    have ended too. Or of the master's broker as well: nobody takes over before the engine is back.
    """
    master = rig.wait_served()
    what = "all" if target == "server" and len(rig.servers.names) == 3 else target
    rig.fault("engine-kill", what)
    rig.servers.kill(*rig.servers.names)
    if target == "with-master":
        master.kill()
    until = time.monotonic() + rig.chance.uniform(*HELD_S)
    while time.monotonic() < until:  # the fault itself
        assert [each for each in rig.replicas if each.serves] == [master] * master.runs, rig.state()
        time.sleep(0.1)
    if master.runs:
        rig.wait_resumed("the end of the engine")
    rig.servers.start(*rig.servers.names)
    if not master.runs:
        rig.wait_served(without=master)
        master.start()
    else:
        same = rig.wait_served() is master
        rig.counts[f"{'the same' if same else 'another'} master after the engine's return"] += 1
