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
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
from family import EndedEarly, RunningBroker, pull
from fault.checker import add_store_findings
from fault.disk import Disk
from fault.ensemble import Ensemble
from fault.group_judge import Peeker, judge
from fault.history import History
from fault.network import HOST, Network
from fault.replica import BOOT, MODULE, NAMESPACE
from fault.rig import SETTINGS, Acks, Outcome, gaps_ms
from fault.workload import QUEUES, TOPICS, Workload
from ports import free_ports

from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.actors.launch.addresses import address_of
from cometmq.actors.replication.core.record import GroupRecord, Life, decode_record
from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.errors import EngineUnreachable
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.promises_file import PromisesFile
from cometmq.client import Admin
from cometmq.cluster.looking import Looker
from cometmq.cluster.place import GroupPlace
from cometmq.protocol.commands import PullMessages
from cometmq.protocol.errors import CometError, StoreError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel._kernel import Message
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Service

NAMES: Final = ("n0", "n1", "n2")
GROUP: Final = "orders"
GROUPS: Final = ("billing",)
PRODUCERS: Final = ("single", "impatient", "linger", "batch")
PACE_S: Final = 0.02  # of each client
SESSION_S: Final = 2.0
SPACE_BYTES: Final = 512 << 20
#: A machine that others use is slow; what hangs hangs longer.
HEAL_S: Final = 240.0
TAIL: Final = 3_000  # characters of a log, in what is said of a failure


class Replica:
    """One of the group's brokers, and its disk.

    Args:
        keys: its settings.
        space: its network namespace; empty: this process's.
    """

    def __init__(self, name: str, place: Path, keys: Mapping[str, object], kind: str, space: str):
        self.name = name
        self.disk = (
            Disk(place, kind, space_bytes=SPACE_BYTES, name=f"disk-{name}") if kind else None
        )
        self.store = (self.disk.folder if self.disk else place / name) / "store"
        self.store.parent.mkdir(exist_ok=True)
        self.log_path = place / f"{name}.log"
        self._keys, self._space = dict(keys), space
        self._boot = secrets.token_hex(8)
        self.broker: RunningBroker | None = None

    def start(self) -> None:
        self._before = self._promised()
        self.broker = RunningBroker(
            self.store,
            self._keys,
            wait=False,
            module=MODULE,
            environ={BOOT: self._boot, NAMESPACE: self._space},
            log_path=self.log_path,
        )

    # --- looking ---

    def _promised(self) -> Life | None:
        """The life of its store, as that has it."""
        try:
            promises = PromisesFile(self.store).load(GROUP, self.name)
        except (StoreError, OSError):
            return None
        return (self.name, promises.store_uuid, promises.incarnation)

    def is_in(self, record: GroupRecord) -> bool:
        """Whether the set has it, since it was started last."""
        life = record.life(self.name)
        return self.name in record.iss and life == self._promised() != self._before

    @property
    def runs(self) -> bool:
        return self.broker is not None and not self.broker.has_ended

    def control(self) -> ControlFile | None:
        """None between two runs."""
        try:
            return ControlFile.open(self.store / CONTROL_FILE, writable=False)
        except (StoreError, OSError):
            return None

    def counter(self, counter: Counter) -> int:
        """0 between two runs."""
        control = self.control()
        return control.read(counter).value if control is not None else 0

    @property
    def serves(self) -> bool:
        """As a master."""
        return self.runs and self.counter(Counter.SERVICE) in (Service.OPEN, Service.UNSURE)

    def pids(self) -> dict[str, int]:
        """By role."""
        assert self.broker is not None
        found = {}
        for process in self.broker.processes():
            with contextlib.suppress(psutil.Error):
                found[process.name().removeprefix("cmq-")] = process.pid
        return {**found, "supervisor": self.broker.pid}

    def read(self, topic: str, queue: int, queue_offset: int) -> list[Message]:
        """From its own reader, by its family's address."""
        control = self.control()
        assert control is not None
        address = address_of(control.meta["token"], "reader-0")
        with Channel(address, f"the reader of {self.name}") as line:
            return pull(line, PullMessages(topic, queue, queue_offset, 4))[1]

    @property
    def is_ready(self) -> bool:
        """All processes of its run serve; asked to end before, it ends as by a kill."""
        log = self.log
        return log.rfind("this run serves") > log.rfind("commitlog recovered")

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # --- faults ---

    def kill(self) -> None:
        """kill -9 of all its processes."""
        assert self.broker is not None
        self.broker.kill_all()
        self.broker = None

    def cut_power(self) -> None:
        """Until `power_on` its disk takes nothing. Nothing that it has answered since counts."""
        assert self.disk is not None
        self.disk.cut()

    def power_on(self) -> None:
        assert self.disk is not None
        self.kill()
        self.disk.power_on()
        self._boot = secrets.token_hex(8)

    def signal(self, number: int) -> None:
        assert self.broker is not None
        for process in self.broker.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> int:
        """In order; the exit status."""
        assert self.broker is not None
        status = self.broker.close()
        self.broker = None
        return status

    def why_ended(self) -> str:
        """Of one that has ended by itself, which then may be started again."""
        assert self.broker is not None
        try:
            self.broker.wait_ready()
            why = f"it had served; {self.broker.log[-TAIL:]}"
        except (CometError, EndedEarly) as error:
            why = str(error)[-TAIL:]
        self.broker.kill_all()
        self.broker = None
        return why

    def empty(self) -> None:
        """As a new disk in place of the old one."""
        shutil.rmtree(self.store)

    def close(self, *, fails: bool) -> None:
        if self.broker is not None:
            self.signal(signal.SIGCONT)
            self.broker.kill_all()
        if self.disk is not None:
            with contextlib.suppress(OSError, shutil.Error):  # of one whose power is cut
                if fails:
                    kept = self.log_path.with_suffix(".kept")
                    shutil.copytree(self.store, kept, dirs_exist_ok=True)
            self.disk.close(lazily=fails)


@dataclass(frozen=True)
class Shape:
    """What the replicas of a group have each for itself.

    Args:
        kind: of their file systems; empty: they share one.
        apart: network namespaces.
        servers: of ZooKeeper, the engine: one, on the bridge, or three, each on the machine of a
            replica; 0: SQLite, for which all are on one machine.
    """

    kind: str = ""
    apart: bool = False
    servers: int = 0

    @property
    def has(self) -> set[str]:
        names = {
            "disk": bool(self.kind),
            "network": self.apart,
            "zookeeper": self.servers > 0,
            "one server": self.servers == 1,
            "three servers": self.servers == 3,
        }
        return {name for name, is_there in names.items() if is_there}

    def __str__(self) -> str:
        engine = ("", ", ZooKeeper", "", ", three servers of ZooKeeper")[self.servers]
        return f"{self.kind or 'one disk'}{', apart' * self.apart}{engine}"


ONE_DISK: Final = Shape()


@dataclass
class GroupRig:
    """
    Args:
        folder: has to be new; disks, histories, logs.
        pace_s: of each client.
    """

    folder: Path
    seed: int = 0
    sync: bool = False
    shape: Shape = ONE_DISK
    producers: Sequence[str] = PRODUCERS
    pace_s: float = PACE_S
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # what came of faults

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.chance = random.Random(f"{self.seed} {self.sync}")
        self.histories = self.folder / "history"
        self.acks = Acks(self.histories)
        with ExitStack() as stack:
            stack.push(self._close_replicas)
            self.network = stack.enter_context(Network(NAMES)) if self.shape.apart else None
            self._make_engine(stack)
            self.name_server = f"{self._host(HOST)}:{free_ports()}"
            server = NameServerActor.start(bind=[(f"tcp://{self.name_server}", False)])
            stack.callback(server.stop)
            self.replicas = [self._replica(name, place) for place, name in enumerate(NAMES)]
            stack.push(self._close_replicas)
            for replica in self.replicas:
                replica.start()
            self.wait_served()
            self._create_topics()
            self.looker = stack.enter_context(Looker(self._place(), self.engine))
            self.work = stack.enter_context(
                Workload(
                    self.name_server,
                    self.histories,
                    seed=self.seed,
                    producers=self.producers,
                    groups=GROUPS,
                    pace_s=self.pace_s,
                    transport="zmq" if self.shape.kind else "auto",
                )
            )
            peeks = History.create(self.histories / "peeker.jsonl", "peeker")
            self.peeker = stack.enter_context(Peeker(self.replicas, peeks, self.seed))
            self.wait_healed("the start")
            self._stack = stack.pop_all()
        return self

    def _host(self, name: str) -> str:
        return self.network.address(name) if self.network else "127.0.0.1"

    def _make_engine(self, stack: ExitStack) -> None:
        self.engine_url = f"sqlite:{self.folder / 'engine'}"
        if self.shape.servers:
            machines = NAMES if self.shape.servers > 1 else (HOST,)
            place = self.folder / "zookeeper"
            self.servers = stack.enter_context(Ensemble(place, machines, self.network))
            self.engine_url = self.servers.url
        self.engine: Engine = stack.enter_context(open_engine(self.engine_url, 20.0))
        self._peers = ";".join(f"{name}-{self._host(name)}:{free_ports()}" for name in NAMES)
        self._secret = self.folder / "secret"
        self._secret.write_text(secrets.token_hex(32) + "\n")
        self._secret.chmod(0o600)

    def _replica(self, name: str, place: int) -> Replica:
        keys = {
            **SETTINGS,
            "bindAddress": self._host(name),
            "brokerName": GROUP,
            "namesrvAddr": self.name_server,
            "enableDLegerCommitLog": True,
            "dLegerGroup": GROUP,
            "dLegerPeers": self._peers,
            "dLegerSelfId": name,
            "groupEngine": self.engine_url,
            "groupSecretFile": str(self._secret),
            "groupSessionTimeout": int(SESSION_S * 1000),
            "flushDiskType": "SYNC_FLUSH" if self.sync else "ASYNC_FLUSH",
        }
        space = str(self.network.path(name)) if self.network else ""
        return Replica(name, self.folder, keys, self.shape.kind, space)

    def _place(self) -> GroupPlace:
        stores = {each.name: each.store for each in self.replicas}
        return GroupPlace(group=GROUP, engine=self.engine_url, stores=stores)

    def _create_topics(self) -> None:
        with Admin(self.name_server, timeout_s=HEAL_S) as admin:
            for topic in TOPICS:
                self.until(lambda topic=topic: self._created(admin, topic), f"topic {topic}")

    def _created(self, admin: Admin, topic: str) -> bool:
        try:
            admin.create_topic(topic, QUEUES)
        except CometError as error:
            if not error.retriable:
                raise
            return False
        return True

    def _close_replicas(self, kind: type[BaseException] | None, *_: object) -> None:
        for replica in getattr(self, "replicas", ()):
            replica.close(fails=kind is not None)
        self.replicas = []

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
        self.peeker.check()

    # --- the end ---

    def finish(self) -> Outcome:
        """Everything healed, drained, ended in order, and judged."""
        self.work.stop_producers()
        self.wait_in_sync("the last fault")
        self.work.finish(self._queue_ends)
        self.peeker.close()
        confirmed = self._wait_confirmed()
        with ThreadPoolExecutor(len(NAMES)) as pool:
            statuses = list(pool.map(lambda each: each.end(), self.replicas))
        verdict, faults = judge(self.histories, self.replicas, confirmed, GROUPS)
        ends = zip(self.replicas, statuses, strict=True)
        add_store_findings(
            verdict, [f"{each.name} ended with {status}" for each, status in ends if status]
        )
        gaps = gaps_ms(verdict.acknowledged_ns, [op.t_ns for op in faults])
        return Outcome(verdict, faults, gaps, self.folder, time.monotonic() - self._began)

    def _queue_ends(self) -> dict[tuple[str, int], int]:
        with Admin(self.name_server, timeout_s=HEAL_S) as admin:
            return {
                (topic, queue): admin.queue_range(topic, queue).stop
                for topic in TOPICS
                for queue in range(QUEUES)
            }

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
