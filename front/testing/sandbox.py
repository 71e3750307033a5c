"""The clients of one test, on a broker that it shares with others or has for itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

import psutil
import pytest

from cometmq.broker import Broker
from cometmq.client import Admin
from cometmq.protocol.errors import ArgumentIllegal, CometError
from cometmq.protocol.tags import ALL_TAGS

if TYPE_CHECKING:
    from cometmq.client import (
        AsyncConsumer,
        AsyncPopConsumer,
        AsyncProducer,
        Consumer,
        Message,
        PopConsumer,
        Producer,
    )
    from cometmq.client.options import ConsumerOptions, PopOptions, ProducerOptions

Client = TypeVar("Client", "Producer", "Consumer", "PopConsumer")
AsyncClient = TypeVar("AsyncClient", "AsyncProducer", "AsyncConsumer", "AsyncPopConsumer")
DEFAULTS: Final[Mapping[str, object]] = {"logLevel": "INFO"}  # of the plug-in's brokers
PORTS: Final = 20_000, 32_000
PORTS_COUNT: Final = 32  # more than a broker has processes
END_TIMEOUT_S: Final = 30.0
SHOWN_MAX: Final = 20  # messages in a failure
BODY_SHOWN: Final = 200
LINES_BEFORE: Final = 5  # of the log, for a test that has none of its own

_numbers: Final = count(1)
_formatter: Final = logging.Formatter("%(asctime)s %(levelname)s %(process)d %(message)s")


def open_broker(store: Path, settings: Mapping[str, object], port: int = 0) -> Broker:
    """Open a broker as the plug-in's fixtures have it."""
    return Broker(store, profile="test", port=port, settings={**DEFAULTS, **settings})


class Sandbox:
    """What the fixture `cometmq` gives: topics, groups and clients that belong to one test.

    Names are unique, so tests on one broker do not meet. All clients are closed at the end of the
    test; a test may close them earlier.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._names: dict[tuple[str, str], str] = {}
        self._open = contextlib.ExitStack()
        self._admin: Admin | None = None
        self._watched: dict[str, Watched] = {}

    @property
    def broker(self) -> Broker:
        """The broker itself."""
        return self._broker

    @property
    def name_server(self) -> str:
        """The address that the tested service is given."""
        return self._broker.name_server

    @property
    def admin(self) -> Admin:
        """An Admin of this broker."""
        if self._admin is None:
            self._admin = Admin(self.name_server)
            self._open.callback(self._admin.close)
        return self._admin

    @property
    def recent_log(self) -> list[logging.LogRecord]:
        """The last records of the broker's log; see `Broker.recent_log`."""
        return self._broker.recent_log

    def topic(self, name: str = "topic", queues: int = 1) -> str:
        """Create a topic for this test; its name is unique and begins with `name`.

        The same name gives the same topic for the rest of the test.

        Args:
            queues: the default of one keeps all messages in order.

        Raises NameIllegal.
        """
        topic = self._unique("topic", name)
        self.admin.create_topic(topic, queues)
        return topic

    def group(self, name: str = "group", settings: Mapping[str, Any] | None = None) -> str:
        """Create a group for this test; its name is unique and begins with `name`.

        The same name gives the same group for the rest of the test.

        Args:
            settings: as of `Admin.create_group`.

        Raises NameIllegal, GroupExists if the test has created it with other settings.
        """
        group = self._unique("group", name)
        self.admin.create_group(group, settings)
        return group

    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """A Producer; options as there."""
        return self._closing(self._broker.producer(**options))

    def consumer(
        self,
        group: str | None,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer:
        """A Consumer; options as there, but that a new group begins with the oldest message."""
        options.setdefault("start", "earliest")
        return self._closing(self._broker.consumer(group, topic, tags, **options))

    def pop_consumer(
        self, group: str, topic: str, tags: str = ALL_TAGS, **options: Unpack[PopOptions]
    ) -> PopConsumer:
        """A PopConsumer; options as there, but that a new group begins with the oldest message."""
        options.setdefault("start", "earliest")
        return self._closing(self._broker.pop_consumer(group, topic, tags, **options))

    def async_producer(self, **options: Unpack[ProducerOptions]) -> AsyncProducer:
        """An AsyncProducer; options as there."""
        return self._closing_async(self._broker.async_producer(**options))

    def async_consumer(
        self,
        group: str | None,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        **options: Unpack[ConsumerOptions],
    ) -> AsyncConsumer:
        """The asyncio twin of `consumer`."""
        options.setdefault("start", "earliest")
        return self._closing_async(self._broker.async_consumer(group, topic, tags, **options))

    def async_pop_consumer(
        self, group: str, topic: str, tags: str = ALL_TAGS, **options: Unpack[PopOptions]
    ) -> AsyncPopConsumer:
        """The asyncio twin of `pop_consumer`."""
        options.setdefault("start", "earliest")
        return self._closing_async(self._broker.async_pop_consumer(group, topic, tags, **options))

    def expect(self, topic: str, bodies: Iterable[bytes], timeout_s: float = 10.0) -> list[Message]:
        """Wait for messages with these bodies, and return them in the order of `bodies`.

        Any order in the topic will do. Each message counts once: what one call has returned the
        next one does not see, and a message that no call expected stays for `expect_none`.

        Fails the test after `timeout_s` seconds with the messages that are there instead.
        """
        __tracebackhide__ = True
        wanted = _bodies(bodies)
        watched = self._watch(topic)
        deadline = time.monotonic() + timeout_s
        while (found := watched.take(wanted)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                missing, others = watched.compare(wanted)
                pytest.fail(
                    f"topic {topic!r}: of {len(wanted)} expected messages {len(missing)} did not "
                    f"arrive within {timeout_s:g} s\nmissing:\n{_shown(missing)}\n"
                    f"there instead:\n{_shown(others)}"
                )
            watched.receive(left)
        return found

    def expect_none(self, topic: str, within_s: float = 0.2) -> None:
        """Fail the test if the topic has, or gets within this time, a message that no `expect` has
        returned."""
        __tracebackhide__ = True
        watched = self._watch(topic)
        if not watched.messages:
            watched.receive(within_s)
        if watched.messages:
            pytest.fail(f"topic {topic!r}: unexpected messages:\n{_shown(watched.messages)}")

    def close(self) -> None:
        """Close all clients. The fixture does it."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _unique(self, kind: str, name: str) -> str:
        return self._names.setdefault((kind, name), f"{name}-{next(_numbers)}")

    def _closing(self, client: Client) -> Client:
        self._open.callback(self._close_one, client.close)
        return client

    def _closing_async(self, client: AsyncClient) -> AsyncClient:
        self._open.callback(self._close_one, partial(_run_coroutine, client.close))
        return client

    def _close_one(self, close: Callable[[], None]) -> None:
        close()

    def _watch(self, topic: str) -> Watched:
        if topic not in self._watched:
            self._watched[topic] = Watched(self.consumer(None, topic))
        return self._watched[topic]


class OwnBroker(Sandbox):
    """What the fixture `cometmq_own_broker` gives: a broker of the test's own, and its clients.

    Everything of `Sandbox`, and faults: `kill`, `restart`, `pause`, `resume`. Clients survive a
    restart, since the name server keeps its address.

    Args:
        store: the store directory.
        settings: settings of the broker, by RocketMQ's keys.
    """

    def __init__(self, store: Path, settings: Mapping[str, object]) -> None:
        self._store = store
        self._settings = settings
        self._records: list[logging.LogRecord] = []  # of brokers before a restart
        self._paused: list[psutil.Process] = []
        self._is_running = True
        self._ports = ReservedPorts()
        try:
            super().__init__(open_broker(store, settings, self._ports.first))
        except BaseException:
            self._ports.close()
            raise

    @property
    def recent_log(self) -> list[logging.LogRecord]:
        """The log of all its brokers, one after the other; see `Broker.recent_log`."""
        return [*self._records, *self._broker.recent_log]

    def kill(self) -> None:
        """End all processes of the broker at once, with SIGKILL, as a crash of the machine would.

        Acknowledged messages are in the store, which `restart` opens again.
        """
        processes = self._processes()
        self._signal(processes, signal.SIGSTOP)  # so that none notices the end of another
        self._signal(processes, signal.SIGKILL)
        for process in processes:
            _wait_ended(process.pid)
        self._paused = []
        self._end()

    def restart(self) -> None:
        """Open the store again, with the same address; a broker that still runs is closed first."""
        self.resume()
        self._end()
        self._records = self.recent_log
        self._broker = open_broker(self._store, self._settings, self._ports.first)
        self._is_running = True

    def pause(self) -> None:
        """Stop all processes of the broker with SIGSTOP: connections stay, answers do not come."""
        self._paused = self._processes()
        self._signal(self._paused, signal.SIGSTOP)
        for process in self._paused:
            _wait_stopped(process.pid)

    def resume(self) -> None:
        """Continue a paused broker. Does nothing if it is not paused."""
        self._signal(self._paused[::-1], signal.SIGCONT)  # the supervisor last
        self._paused = []

    def close(self) -> None:
        """Close all clients, then the broker. The fixture does it."""
        self.resume()
        try:
            super().close()
        finally:
            self._end()
            self._ports.close()

    def _end(self) -> None:
        self._is_running = False
        self._broker.close()

    def _close_one(self, close: Callable[[], None]) -> None:
        """A client cannot send what is left to a broker that the test has killed."""
        with contextlib.nullcontext() if self._is_running else contextlib.suppress(CometError):
            close()

    def _processes(self) -> list[psutil.Process]:
        """The supervisor and its descendants; none after `kill`."""
        if not self._is_running:
            return []
        supervisor = psutil.Process(self._broker.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    @staticmethod
    def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class ReservedPorts:
    """Free ports in a row, for a broker that is to have the same ones after a restart.

    They lie below those that the system gives to clients. A socket's name reserves them among all
    test runs of the machine.
    """

    def __init__(self) -> None:
        while True:
            self.first = random.randrange(*PORTS, PORTS_COUNT)
            self._name = socket.socket(socket.AF_UNIX)
            try:
                self._name.bind(f"\0cometmq-testing-ports-{self.first}")
                for port in range(self.first, self.first + PORTS_COUNT):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", port))
            except OSError:
                self._name.close()
            else:
                return

    def close(self) -> None:
        """Others may have them."""
        self._name.close()


class Watched:
    """Messages of one topic that no `expect` has returned yet."""

    def __init__(self, consumer: Consumer) -> None:
        self.messages: list[Message] = []
        self._consumer = consumer

    def receive(self, timeout_s: float) -> None:
        """Wait for further messages."""
        self.messages += self._consumer.poll(timeout_s=timeout_s)

    def take(self, wanted: Sequence[bytes]) -> list[Message] | None:
        """Remove and return a message for each body; remove nothing if one is missing."""
        by_body: dict[bytes, list[Message]] = {}
        for message in reversed(self.messages):
            by_body.setdefault(message.body, []).append(message)
        found = []
        for body in wanted:
            if not by_body.get(body):
                return None
            found.append(by_body[body].pop())
        taken = set(map(id, found))
        self.messages = [each for each in self.messages if id(each) not in taken]
        return found

    def compare(self, wanted: Iterable[bytes]) -> tuple[list[bytes], list[Message]]:
        """The bodies without a message, and the messages that no body expects."""
        missing, others = list(wanted), []
        for message in self.messages:
            if message.body in missing:
                missing.remove(message.body)
            else:
                others.append(message)
        return missing, others


def log_text(records: Iterable[logging.LogRecord], began: float) -> str:
    """The lines of a broker's log since a Unix time, and some before that."""
    before: list[str] = []
    since: list[str] = []
    for record in records:
        (before if record.created < began else since).append(_formatter.format(record))
    said = [] if since else ["(no line during this test; the last lines before it:)"]
    return "\n".join([*said, *([] if since else before[-LINES_BEFORE:]), *since])


def _bodies(bodies: Iterable[bytes]) -> list[bytes]:
    found = [] if isinstance(bodies, bytes | str) else list(bodies)
    if not found or not all(isinstance(each, bytes) for each in found):
        raise ArgumentIllegal(f'bodies = {bodies!r}: expected a list of bytes, such as [b"paid"]')
    return found


def _shown(messages: Sequence[bytes | Message]) -> str:
    lines = []
    for each in messages[:SHOWN_MAX]:
        body = each if isinstance(each, bytes) else each.body
        cut = f" ... ({len(body)} bytes)" if len(body) > BODY_SHOWN else ""
        place = "" if isinstance(each, bytes) else f"  # queue {each.queue_id} @{each.queue_offset}"
        lines.append(f"  {body[:BODY_SHOWN]!r}{cut}{place}")
    if len(messages) > SHOWN_MAX:
        lines.append(f"  ... and {len(messages) - SHOWN_MAX} more")
    return "\n".join(lines) or "  nothing"


def _wait_ended(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(END_TIMEOUT_S * 1000)
        finally:
            os.close(descriptor)


def _wait_stopped(pid: int) -> None:
    """Wait until no thread of a process runs: the signal alone does not interrupt them at once."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while not all(map(_is_stopped, Path(f"/proc/{pid}/task").glob("*/stat"))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop within {END_TIMEOUT_S:g} s")
        time.sleep(0.001)


def _is_stopped(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True


def _run_coroutine(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in an event loop of its own; in another thread, since this one may have a loop."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(call())).result()
