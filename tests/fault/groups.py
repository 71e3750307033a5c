"""A group of three replicas, its clients, and what the group's campaigns do to it.

    with GroupRig(folder, seed=7, sync=True) as rig:
        (master,) = rig.pick("master")
        rig.fault("kill", "master")
        master.kill()
        rig.wait_served()                # by another one
        master.start()
        rig.wait_healed("a kill")        # all are in sync, and each producer goes on
        outcome = rig.finish()           # drained, ended in order, and judged: group_judge.py

The replicas are real brokers with a file system each, so that its power can be cut, and with
`apart` a network namespace each, so that links between them can be. The clients live through all
of it, in processes of their own.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from family import pull
from fault.availability import ROLES, Availability
from fault.checker import add_store_findings
from fault.consuming_work import ConsumingWork
from fault.ensemble import Ensemble
from fault.group_judge import Peeker, judge
from fault.group_replica import GROUP, TAIL, Replica
from fault.history import History
from fault.network import HOST, Network
from fault.reading import Values
from fault.rig import Acks, Outcome, gaps_ms
from fault.timed_work import TimedWork
from fault.work import ASK_S, PlainWork, Work
from patience import patient
from ports import free_ports

from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.actors.launch.addresses import address_of
from cometmq.actors.replication.core.record import GroupRecord, decode_record
from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.errors import EngineUnreachable
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.client import Admin
from cometmq.client.routes import Routes
from cometmq.cluster.administration import add, remove
from cometmq.cluster.looking import Looker
from cometmq.cluster.place import GroupPlace
from cometmq.protocol.commands import PullMessages, PullResult
from cometmq.protocol.errors import CometError, ConfigError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import Counter

NAMES: Final = ("n0", "n1", "n2")
SPARE: Final = "n3"  # is in the group once it is added, and another one removed
WORKS: Final[Mapping[str, Callable[[], Work]]] = {
    "plain": PlainWork,
    "timed": TimedWork,
    "consuming": ConsumingWork,
}
SESSION_S: Final = 2.0
#: A machine that others use is slow; what hangs hangs longer.
HEAL_S: Final = patient(240.0)


@dataclass(frozen=True)
class Shape:
    """What the replicas of a group have each for itself, and what their clients do.

    Args:
        work: one of WORKS.
        kind: of their file systems; empty: they share one.
        apart: network namespaces.
        servers: number of etcd servers: one, on the bridge, or three, each on the machine of a
            replica; 0: SQLite, for which all are on one machine.
    """

    kind: str = ""
    apart: bool = False
    servers: int = 0
    work: str = "plain"

    @property
    def has(self) -> set[str]:
        names = {
            "disk": bool(self.kind),
            "network": self.apart,
            "together": not self.apart,
            "etcd": self.servers > 0,
            "one server": self.servers == 1,
            "three servers": self.servers == 3,
        }
        return {self.work, *(name for name, is_there in names.items() if is_there)}

    def __str__(self) -> str:
        engine = ("", ", etcd", "", ", three servers of etcd")[self.servers]
        return f"{self.work}, {self.kind or 'one disk'}{', apart' * self.apart}{engine}"


ONE_DISK: Final = Shape()


@dataclass
class GroupRig:
    """
    Args:
        folder: has to be new; disks, histories, logs.
        clients: what they do, if it is not as the shape says.
    """

    folder: Path
    seed: int = 0
    sync: bool = False
    shape: Shape = ONE_DISK
    clients: Work | None = None
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # what came of faults
    former: list[Replica] = field(default_factory=list)  # that are in the group no more, or not yet

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.chance = random.Random(f"{self.seed} {self.sync}")
        self.histories = self.folder / "history"
        self.acks = Acks(self.histories)
        self.kind = self.clients or WORKS[self.shape.work]()
        with ExitStack() as stack:
            stack.push(self._close_replicas)
            self.network = stack.enter_context(Network(NAMES)) if self.shape.apart else None
            self._make_engine(stack)
            self.name_server = f"{self._host(HOST)}:{free_ports()}"
            server = NameServerActor.start(bind=[(f"tcp://{self.name_server}", False)])
            stack.callback(server.stop)
            self.replicas = [self._replica(name, place) for place, name in enumerate(NAMES)]
            if not self.network:
                self.former = [self._replica(SPARE, len(NAMES))]
            stack.push(self._close_replicas)
            for replica in self.replicas:
                replica.start()
            self.wait_served()
            self._create_topics()
            self.looker = stack.enter_context(Looker(self._place(), self.engine))
            transport = "zmq" if self.shape.kind else "auto"
            self.work = stack.enter_context(
                self.kind.clients(
                    self.name_server, self.histories, seed=self.seed, transport=transport
                )
            )
            routes = stack.enter_context(contextlib.closing(Routes(self.name_server)))
            stack.enter_context(Availability(lambda: self._addresses(routes), self.work.history))
            peeks = History.create(self.histories / "peeker.jsonl", "peeker")
            self.peeker = stack.enter_context(
                Peeker(self.replicas, self.kind.topics, peeks, self.seed)
            )
            self.wait_healed("the start")
            self._stack = stack.pop_all()
        return self

    def _host(self, name: str) -> str:
        return self.network.address(name) if self.network else "127.0.0.1"

    def _make_engine(self, stack: ExitStack) -> None:
        self.engine_url = f"sqlite:{self.folder / 'engine'}"
        if self.shape.servers:
            machines = NAMES if self.shape.servers > 1 else (HOST,)
            place = self.folder / "etcd"
            self.servers = stack.enter_context(Ensemble(place, machines, self.network))
            self.engine_url = self.servers.url
        self.engine: Engine = stack.enter_context(open_engine(self.engine_url, 20.0))
        names = NAMES if self.network else (*NAMES, SPARE)
        self.addresses = {name: f"{self._host(name)}:{free_ports()}" for name in names}
        self._secret = self.folder / "secret"
        self._secret.write_text(secrets.token_hex(32) + "\n")
        self._secret.chmod(0o600)

    def _replica(self, name: str, place: int) -> Replica:
        peers = [
            f"{each}-{address}"
            for each, address in self.addresses.items()
            if each in (*NAMES, name)
        ]
        keys = {
            **self.kind.settings,
            "cleanResourceInterval": 1_000,  # it says when a disk is full, and when no longer
            "cleanFileForciblyEnable": False,  # but no room must not cost a message
            "bindAddress": self._host(name),
            "brokerName": GROUP,
            "namesrvAddr": self.name_server,
            "enableDLegerCommitLog": True,
            "dLegerGroup": GROUP,
            "dLegerPeers": ";".join(peers),
            "dLegerSelfId": name,
            "groupEngine": self.engine_url,
            "groupSecretFile": str(self._secret),
            "groupSessionTimeout": int(SESSION_S * 1000),
            "flushDiskType": "SYNC_FLUSH" if self.sync else "ASYNC_FLUSH",
        }
        space = str(self.network.path(name)) if self.network else ""
        return Replica(name, self.folder, keys, self.shape.kind, space)

    def _place(self) -> GroupPlace:
        stores = {each.name: each.store for each in (*self.replicas, *self.former)}
        return GroupPlace(group=GROUP, engine=self.engine_url, stores=stores)

    def _create_topics(self) -> None:
        with Admin(self.name_server, timeout_s=HEAL_S) as admin:
            for topic, queues in self.kind.topics.items():
                self.until(partial(self._created, admin, topic, queues), f"topic {topic}")

    def _created(self, admin: Admin, topic: str, queues: int) -> bool:
        try:
            admin.create_topic(topic, queues)
        except CometError as error:
            if not error.retriable:
                raise
            return False
        return True

    def _close_replicas(self, kind: type[BaseException] | None, *_: object) -> None:
        for replica in (*getattr(self, "replicas", ()), *self.former):
            replica.close(fails=kind is not None)
        self.replicas, self.former = [], []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    # --- looking ---

    def record(self) -> GroupRecord | None:
        try:
            stored = self.engine.get(GROUP)
        except EngineUnreachable:
            return None
        return None if stored is None else decode_record(stored.record)

    def replica(self, name: str) -> Replica:
        return next(each for each in self.replicas if each.name == name)

    def serving(self) -> Replica | None:
        """The master, where it takes messages."""
        record = self.record()
        if record is None or not record.master:
            return None
        master = self.replica(record.master)
        return master if master.serves else None

    def _addresses(self, routes: Routes) -> list[str]:
        """Of the processes of masters, for Availability; those of namespaces by their ports."""
        if self.network is not None:
            return [a for each in routes.masters(ASK_S) for a in (each.commitlog, each.coordinator)]
        controls = [each.control() for each in self.replicas if each.counter(Counter.SERVICE)]
        tokens = [control.meta["token"] for control in controls if control is not None]
        return [address_of(token, role) for token in tokens for role in ROLES]

    def pick(self, target: str) -> list[Replica]:
        """ "master", "follower" (one of them), "all"."""
        master = self.wait_served()
        if target == "all":
            return list(self.replicas)
        others = [each for each in self.replicas if each is not master]
        return [master] if target == "master" else [self.chance.choice(others)]

    def fault(self, what: str, target: str, point: str = "") -> None:
        self.work.fault(what, target, point)

    def state(self) -> str:
        """For what is said of a failure."""
        lines = [str(self.record())]
        for each in self.replicas:
            counters = {c.name: each.counter(c) for c in (Counter.WROTE, Counter.REPLICATED)}
            lines.append(f"--- {each.name} runs: {each.runs}, {counters}\n{each.log[-TAIL:]}")
        return "\n".join(lines)

    # --- who is in the group ---

    def add_replica(self) -> Replica:
        """One that is not, with an empty store."""
        new = self.former.pop()
        add(self.engine, GROUP, new.name, self.addresses[new.name])
        self.replicas.append(new)
        new.start()
        return new

    def remove_replica(self, replica: Replica) -> None:
        """Once enough others are in sync. Its broker ends by itself, if it runs."""
        self.replicas.remove(replica)  # before it ends

        def removed() -> bool:
            try:
                remove(self.engine, GROUP, replica.name)
            except ConfigError as error:  # who is just joining, or has just been elected
                self.counts[f"refused: {str(error).partition(':')[0][-40:]}"] += 1
                return False
            return True

        try:
            self.until(removed, f"{replica.name} is not removed")
            if replica.broker is not None:
                self.until_ended(replica)
                replica.why_ended()
                assert f"has no replica {replica.name}" in replica.log
        finally:
            self.former.append(replica)
        replica.empty()

    # --- waiting ---

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = HEAL_S) -> None:
        """Look until it holds; nothing tells when. No replica ends by itself meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            self.check_alive()
            assert time.monotonic() < deadline, f"{what}: not after {timeout_s:g} s\n{self.state()}"
            time.sleep(0.05)

    def check_alive(self) -> None:
        for each in self.replicas:
            if each.broker is not None and each.broker.has_ended:
                raise AssertionError(f"{each.name} has ended: {each.why_ended()}\n{self.state()}")

    def wait_served(self, *, without: Replica | None = None) -> Replica:
        """Until a master takes messages, another one than `without`."""
        found: list[Replica | None] = [None]

        def serves() -> bool:
            found[0] = self.serving()
            return found[0] is not None and found[0] is not without

        self.until(serves, "no master takes messages")
        assert found[0] is not None
        return found[0]

    def wait_resumed(self, after: str) -> None:
        """Until every producer has been told of one more message."""
        self.work.check_alive()
        names = [child.spec.p for child in self.work.producers]
        behind = self.acks.wait_for_each(names, HEAL_S)
        assert not behind, f"{behind} got nothing stored after {after}:\n{self.state()}"

    def wait_in_sync(self, after: str) -> None:
        """Until a master serves and all are in its set."""

        def healed() -> bool:
            record = self.record()
            if record is None or self.serving() is None:
                return False
            return all(each.is_in(record) for each in self.replicas)

        self.until(healed, f"not all are in sync after {after}")

    def until_ended(self, replica: Replica) -> None:
        """By itself."""
        self._until_settled(replica, lambda: False)

    def until_ended_or_in_sync(self, replica: Replica) -> None:
        """What a replica makes of a store that was damaged."""

        def is_in() -> bool:
            record = self.record()
            return record is not None and replica.is_in(record)

        self._until_settled(replica, is_in)

    def _until_settled(self, replica: Replica, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HEAL_S
        while replica.runs and not holds():
            assert time.monotonic() < deadline, f"{replica.name} runs on\n{self.state()}"
            time.sleep(0.05)

    def wait_healed(self, after: str) -> None:
        self.wait_in_sync(after)
        self.wait_resumed(after)
        self.work.history.end("ok", "healed", due_ms=time.time_ns() // 1_000_000)
        self.peeker.check()

    # --- the end ---

    def finish(self) -> Outcome:
        """Everything healed, drained, ended in order, and judged."""
        self.work.stop_producers()
        self.wait_in_sync("the last fault")
        with contextlib.closing(Routes(self.name_server)) as routes:
            self.kind.drain(self.work, Values(partial(self._pull, routes)))
        self.work.stop(self.work.children)
        self.peeker.close()
        confirmed = self._wait_confirmed()
        with ThreadPoolExecutor(len(NAMES)) as pool:
            statuses = list(pool.map(lambda each: each.end(), self.replicas))
        verdict, faults = judge(self.histories, self.replicas, confirmed, self.kind, self.former)
        ends = zip(self.replicas, statuses, strict=True)
        add_store_findings(
            verdict, [f"{each.name} ended with {status}" for each, status in ends if status]
        )
        gaps = gaps_ms(verdict.acknowledged_ns, [op.t_ns for op in faults])
        return Outcome(verdict, faults, gaps, self.folder, time.monotonic() - self._began)

    def _pull(self, routes: Routes, command: PullMessages) -> tuple[PullResult, list[Message]]:
        """From the master, whoever that is by then."""
        found: list[tuple[PullResult, list[Message]]] = []

        def pulled() -> bool:
            try:
                for master in routes.masters(ASK_S):
                    with Channel(master.readers[0]) as line:
                        found.append(pull(line, command))
            except CometError as error:
                if not error.retriable:
                    raise
            return bool(found)

        self.until(pulled, f"no answer to {command}")
        return found[0]

    def _wait_confirmed(self) -> dict[str, int]:
        """Until all have, and know as confirmed, what the master has: then nothing is sent any
        more. What each knows as confirmed."""
        found: dict[str, int] = {}

        def equal() -> bool:
            found.update({each.name: each.counter(Counter.REPLICATED) for each in self.replicas})
            ends = {each.counter(Counter.WROTE) for each in self.replicas}
            is_ready = all(each.is_ready for each in self.replicas)
            return is_ready and set(found.values()) == ends and len(ends) == 1

        self.until(equal, "the replicas do not come to have and know the same")
        return found
