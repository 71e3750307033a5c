"""A coordinator, the processes around it, and what runs it in a child. No tests here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pykka
from patience import patient

from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.runtime.gate import Gate
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import (
    AppendRecords,
    BrokerEndpoints,
    Command,
    EndpointsChanged,
    QueueKey,
    RecordsAppended,
    TopicInfo,
    TopicList,
    TopicsChanged,
)
from cometmq.protocol.errors import CometError, Refused
from cometmq.protocol.ledger import LEDGER_TOPIC
from cometmq.protocol.topics import TopicMirror
from cometmq.protocol.wire.remote import RemoteRef
from cometmq.shm.kernel.layout import INNER_RECORD

ANYWHERE = "tcp://127.0.0.1:*"
INSIDE = [(ANYWHERE, True)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    default_topic_queue_nums: int = 8
    flush_consumer_offset_interval_ms: int = 5_000
    consumer_session_timeout_ms: int = 30_000
    max_topics: int = 200_000
    max_groups: int = 200_000
    enable_property_filter: bool = True
    broker_cluster_name: str = "DefaultCluster"
    max_message_size: int = 4_194_304
    store_reply_message_enable: bool = False
    slave_wait_s: float = 0.0


class FakeLedger:
    """What a FakeCommitlog was given to append, in a file that outlives who reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.begin = 0
        self.end = len(self._bodies())

    @staticmethod
    def path_of(commitlog: str) -> Path:
        return Path(tempfile.gettempdir()) / f"ledger-{os.getuid()}-{commitlog.rpartition(':')[2]}"

    def _bodies(self) -> list[bytes]:
        bodies, rest = [], self._path.read_bytes() if self._path.exists() else b""
        while rest:
            (size,) = struct.unpack_from(">I", rest)
            bodies.append(rest[4 : 4 + size])
            rest = rest[4 + size :]
        return bodies

    def entries(self, position: int) -> Iterator[tuple[int, bytes]]:
        yield from list(enumerate(self._bodies()))[position : self.end]

    def close(self) -> None:
        pass


class FakeCommitlog(ServiceActor):
    """Confirms topics, or refuses to; appends records of the ledger, or refuses to."""

    role = "commitlog"

    def __init__(self, *, refuse: bool = False, bind: Sequence[tuple[str, bool]] = INSIDE) -> None:
        super().__init__(bind=bind)
        self.told: list[list[TopicInfo]] = []  # after each page, all topics
        self.pages: list[TopicList] = []
        self._mirror = TopicMirror()
        self._refuse = refuse
        self.refusal: CometError | None = None  # of records
        self.silent = False  # records are lost, and nobody is told
        self.appended = 0
        self.covers: list[int] = []  # that they were to have
        self._path = FakeLedger.path_of(self.addresses[0])
        self._path.unlink(missing_ok=True)

    def on_append_records(self, command: AppendRecords, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.silent:
            return
        assert command.queues == [QueueKey(LEDGER_TOPIC, 0)]
        assert command.count == 1
        body = bytes(request.payload[0].buffer[INNER_RECORD.size :])
        with self._path.open("ab") as file:
            file.write(struct.pack(">I", len(body)) + body)
        place = struct.pack("qq", self.appended, 0)
        self.appended += 1
        self.covers.append(command.cover)
        request.reply(RecordsAppended(0, 0), [place])

    def on_stop(self) -> None:
        super().on_stop()
        self._path.unlink(missing_ok=True)

    def forget(self) -> None:
        """As one that was started again, and has not asked yet."""
        self._mirror = TopicMirror()

    def on_topics_changed(self, command: TopicsChanged, _request: object) -> Command:
        if self._refuse:
            raise Refused("not today")
        self.pages.append(command.topics)
        self._mirror.take(command.topics)
        self.told.append(list(self._mirror.topics.values()))
        return self._mirror.known


def ledger_of(commitlog: str) -> Callable[[], Any]:
    return lambda: FakeLedger(FakeLedger.path_of(commitlog))


def address_of(actor: pykka.ActorRef[Any]) -> str:
    return str(actor.proxy().addresses.get()[0])


@contextmanager
def running(actor: pykka.ActorRef[Any]) -> Iterator[RemoteRef]:
    """The actor through its socket; stopped afterwards."""
    line = RemoteRef(address_of(actor))
    try:
        yield line
    finally:
        line.stop()
        actor.stop(timeout=patient(10))


def endpoints_at(coordinator: str, broker: str = "b") -> BrokerEndpoints:
    return BrokerEndpoints(
        cluster="c",
        broker=broker,
        broker_id=0,
        commitlog="tcp://127.0.0.1:1",
        readers=["tcp://127.0.0.1:2"],
        coordinator=coordinator,
    )


@contextmanager
def coordinator(
    store_dir: Path,
    settings: Settings | None = None,
    *,
    refuse: bool = False,
    name_servers: Sequence[str] = (),
    confirm_timeout_s: float = 5,
    gate: Gate | None = None,
) -> Iterator[RemoteRef]:
    """A coordinator with a commitlog process beside it, told where it listens."""
    with ExitStack() as stack:
        commitlog = FakeCommitlog.start(refuse=refuse)
        stack.enter_context(running(commitlog))
        actor = CoordinatorActor.start(
            settings or Settings(),
            store_dir,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=name_servers,
            confirm_timeout_s=confirm_timeout_s,
            bind=INSIDE,
            gate=gate,
        )
        line = stack.enter_context(running(actor))
        line.ask(EndpointsChanged(endpoints_at(address_of(actor))))
        yield line


def coordinate(
    store_dir: Path, commitlog: str, ready: Connection, settings: Settings | None = None
) -> None:
    """Run a coordinator in this process until it is killed."""
    actor = CoordinatorActor.start(
        settings or Settings(),
        store_dir,
        commitlog_endpoint=commitlog,
        ledger_log=ledger_of(commitlog),
        name_server_endpoints=[],
        bind=INSIDE,
    )
    ready.send(address_of(actor))
    actor.actor_stopped.wait()


class Child:
    """A coordinator in a process of its own."""

    def __init__(self, store_dir: Path, commitlog: str, settings: Settings | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, ready = context.Pipe(duplex=False)
        self._process = context.Process(
            target=coordinate, args=(store_dir, commitlog, ready, settings), daemon=True
        )
        self._process.start()
        ready.close()
        assert self._ready.poll(30), "the coordinator did not start"
        self.address: str = self._ready.recv()
        self.line = RemoteRef(self.address)
        self.line.ask(EndpointsChanged(endpoints_at(self.address)))

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._ready.close()
        self.line.stop()
