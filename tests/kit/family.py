"""A whole broker in processes of its own, and what tests do to it. No tests here.

    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("orders", 4)
        sent = broker.send("orders", 0, [b"one", b"two"])
        broker.kill("commitlog")
        broker.assert_stored(sent)

It is started as `front/broker.py` starts it, with small segments, so that a test rolls over often.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import forked
import msgspec
import psutil
from forked import MARK, RUN
from patience import patient
from waiting import has_ended, still_there, until

from cometmq.actors.launch.addresses import address_of
from cometmq.actors.launch.embedded import EmbeddedFailed, EmbeddedReady
from cometmq.protocol.commands import (
    BrokerEndpoints,
    BrokerList,
    Command,
    CreateTopic,
    Finish,
    GetStatistics,
    ListBrokers,
    Ping,
    Pong,
    PullMessages,
    PullResult,
    PullStatus,
    Section,
    SendMessages,
    SendResult,
    Statistics,
    TopicInfo,
)
from cometmq.protocol.errors import CometError, NotConfirmed, from_code
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchEncoder, Message, decode
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter

SMALL: Mapping[str, object] = {
    "port": 0,
    "bindAddress": "127.0.0.1",
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 2_000,
    "maxMessageSize": 256 << 10,
    "maxHashSlotNum": 10_000,
    "maxIndexNum": 40_000,
    "mlockEnable": False,
    "cleanResourceInterval": 600_000,  # a test asks for it, or sets it
    "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",  # likewise, whatever the time is
    "diskMaxUsedSpaceRatio": 95,
}

PACE_S = 0.003  # of a load, between two batches
START_TIMEOUT_S = patient(90)
RECOVER_TIMEOUT_S = patient(60)
CHILDREN = ("namesrv", "commitlog", "allocator", "dispatcher", "flush", "cleaner", "coordinator")
CHILDREN += ("scheduler", "reader-0")

_decode_answer = msgspec.json.Decoder(EmbeddedReady | EmbeddedFailed).decode


class EndedEarly(Exception):
    """The broker ended without a word before it was ready."""


@dataclass(frozen=True)
class Sent:
    """One message that the broker has acknowledged."""

    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    physical_offset: int = -1  # of the first message of its batch


class RunningBroker:
    """A broker on `store`. Serves from the constructor on.

    Args:
        settings: over those of SMALL, by RocketMQ's keys.
        wait: False returns before it serves; call `wait_ready`.
        log_path: where its log goes if not beside the store.
        environ: further variables for its processes.
        module: what runs the supervisor; see fault/launcher.py.
        program: started as a program of its own, as users' brokers are, and not forked from a
            process that has all imported; see forked.py.

    Raises what the broker says that is wrong, as front/broker.py does, or EndedEarly.
    """

    def __init__(
        self,
        store: Path,
        settings: Mapping[str, object] | None = None,
        *,
        wait: bool = True,
        log_path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        module: str = "cometmq.actors.launch.embedded",
        program: bool = False,
    ) -> None:
        self.store = store
        self.settings: dict[str, Any] = {**SMALL, **(settings or {})}
        keys = self.settings | {"storePathRootDir": str(store)}
        self.log_path = log_path or store.parent / f"{store.name}.log"
        self._channels: list[Channel] = []
        self._closed = False
        began = time.monotonic()
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process: subprocess.Popen[bytes] | forked.ForkedProgram
            its = {**os.environ, **(environ or {}), MARK: f"{RUN}/broker"}
            if program:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env=its,
                )
            else:
                self._process = forked.fork(module, log.fileno(), its)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and `wait_ready` says so
            self._process.stdin.write(msgspec.json.encode(keys) + b"\n")
            self._process.stdin.flush()
        self.pid = self._process.pid
        if wait:
            self.wait_ready()
        self.start_s = time.monotonic() - began

    def wait_ready(self) -> EmbeddedReady:
        """Until it serves. Raises why it does not."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        if not line:
            self.kill_all()
            raise EndedEarly(self.log)
        answer = _decode_answer(line)
        if isinstance(answer, EmbeddedFailed):
            self.wait_ended()
            raise from_code(answer.code, answer.text)
        self.ready = answer
        return answer

    # --- asking ---

    def channel(self, endpoint: str) -> Channel:
        """A line that is closed with the broker."""
        line = Channel(endpoint)
        self._channels.append(line)
        return line

    def address(self, role: str) -> str:
        """Where an actor takes the family's commands."""
        return address_of(self.ready.token, role)

    def ask(self, role: str, command: Command, timeout_s: float = patient(30)) -> Command:
        """Over the family's own line, so that internal commands are taken too."""
        with Channel(self.address(role), role) as line:
            return line.ask(command, timeout_s=timeout_s)[0]

    def statistics(self, role: str = "broker", timeout_s: float = patient(30)) -> dict[str, Any]:
        answer = self.ask(role, GetStatistics(), timeout_s)
        assert isinstance(answer, Statistics)
        return answer.values

    @cached_property
    def endpoints(self) -> BrokerEndpoints:
        """As the name server gives them to clients. Registering may come a moment after ready."""
        deadline = time.monotonic() + RECOVER_TIMEOUT_S
        with Channel(self.ready.name_server) as line:
            while time.monotonic() < deadline:
                answer, _ = line.ask(ListBrokers(), timeout_s=patient(30))
                assert isinstance(answer, BrokerList)
                if answer.brokers:
                    return answer.brokers[0]
        raise AssertionError(f"it has not registered:\n{self.log}")

    @cached_property
    def commitlog(self) -> Channel:
        return self.channel(self.endpoints.commitlog)

    @cached_property
    def reader(self) -> Channel:
        return self.channel(self.endpoints.readers[0])

    @cached_property
    def coordinator(self) -> Channel:
        return self.channel(self.endpoints.coordinator)

    @contextlib.contextmanager
    def control(self) -> Iterator[ControlFile]:
        """The control file, mapped read-only."""
        yield ControlFile.open(self.store / CONTROL_FILE, writable=False)

    def counter(self, counter: Counter) -> int:
        with self.control() as control:
            return control.read(counter).value

    @property
    def log(self) -> str:
        """What it has written to its log since it was started."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def until_logged(self, text: str) -> None:
        """Wait for a log line with that text. A process may answer before its log line arrives."""
        until(lambda: text in self.log, says=lambda: f"{text!r} is not in:\n{self.log}")

    # --- messages ---

    def create_topic(self, topic: str, queues: int = 4) -> None:
        self.coordinator.ask(CreateTopic(TopicInfo(topic, queues, queues)), timeout_s=patient(30))

    def send(
        self,
        topic: str,
        queue_id: int,
        bodies: Sequence[bytes],
        *,
        timeout_s: float = patient(30),
        **kinds: Any,
    ) -> list[Sent]:
        """One attempt for one batch. Raises what was answered; `kinds`: tags, keys, properties."""
        return send_batch(self.commitlog, topic, queue_id, bodies, timeout_s=timeout_s, **kinds)

    def read_queue(self, topic: str, queue_id: int, at_least: int = 0) -> list[Message]:
        """All messages of a queue; waits until there are `at_least` so many."""
        return read_queue(self.reader, topic, queue_id, at_least)

    def assert_stored(self, sent: Iterable[Sent]) -> dict[tuple[str, int], list[Message]]:
        """Every acknowledged message is where it was said to be, and no queue has a hole.

        Returns the queues that were read.
        """
        wanted: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
        for one in sent:
            before = wanted[one.topic, one.queue_id].setdefault(one.queue_offset, one.body)
            assert before == one.body, f"one place was acknowledged for two messages: {one}"
        found = {}
        for (topic, queue_id), bodies in wanted.items():
            messages = self.read_queue(topic, queue_id, max(bodies) + 1)
            offsets = [message.queue_offset for message in messages]
            assert offsets == list(range(len(messages))), (topic, queue_id)
            for queue_offset, body in bodies.items():
                stored = messages[queue_offset].body
                assert stored == body, (topic, queue_id, queue_offset, stored[:80], body[:80])
            found[topic, queue_id] = messages
        return found

    # --- faults ---

    def pids(self) -> dict[str, int]:
        """The children by role."""
        values = self.statistics()
        return {key[4:]: int(pid) for key, pid in values.items() if key.startswith("pid.")}

    def processes(self) -> list[psutil.Process]:
        """All that live: supervisor, zygote, children."""
        return of_session(self.pid)

    def zygote_pid(self) -> int:
        (zygote,) = psutil.Process(self.pid).children()
        return zygote.pid

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """End one child and wait until the one that takes its place serves; its pid."""
        old = self.pids()[role]
        self.end(old, number)
        return self.wait_serves(role, not_pid=old)

    def finish(self, role: str) -> int:
        """Have one child end in order, and wait until another serves in its place; its pid."""
        old = self.pids()[role]
        process = psutil.Process(old)
        with contextlib.suppress(NotConfirmed):  # it may be gone before its answer is
            self.ask(role, Finish())
        process.wait(RECOVER_TIMEOUT_S)
        return self.wait_serves(role, not_pid=old)

    def end(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process and see it gone."""
        process = psutil.Process(pid)
        process.send_signal(number)
        assert not still_there([pid], RECOVER_TIMEOUT_S), process

    def wait_serves(self, role: str, *, not_pid: int) -> int:
        """Until a process other than that one answers for the role; its pid.

        And until the supervisor knows it: whoever has forked it tells so while it starts already.
        """
        deadline = time.monotonic() + RECOVER_TIMEOUT_S
        while True:
            assert time.monotonic() < deadline, f"{role} does not come back:\n{self.log}"
            with contextlib.suppress(NotConfirmed):
                answer = self.ask(role, Ping(), timeout_s=max(0.1, deadline - time.monotonic()))
                assert isinstance(answer, Pong)
                if answer.pid != not_pid and self.pids()[role] == answer.pid:
                    return answer.pid
            time.sleep(0.005)  # nothing tells when

    def kill_all(self) -> None:
        """kill -9 of everything, the supervisor last but one moment later."""
        victims = self.processes()
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()  # so that nobody sees another one's end
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._closed = True
        self._let_go()
        self.wait_gone()

    @property
    def has_ended(self) -> bool:
        """Whether the supervisor has."""
        return self._process.poll() is not None

    def kill_supervisor(self) -> None:
        """Only that one; see `wait_ended` for the rest."""
        self._process.kill()
        self._process.wait(RECOVER_TIMEOUT_S)

    def wait_ended(self) -> int:
        """Until no process of it is left; the supervisor's exit status."""
        self._closed = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            status = self._process.wait(RECOVER_TIMEOUT_S)
            self.wait_gone()
        except subprocess.TimeoutExpired as error:
            alive = [f"{p.pid} {p.name()} {p.status()}" for p in self.processes()]
            raise AssertionError(f"it does not end: {alive}\n{self.log[-4000:]}") from error
        finally:
            self._let_go()
        return status

    def wait_gone(self, timeout_s: float = RECOVER_TIMEOUT_S) -> None:
        """Until every process of it is gone."""
        deadline = time.monotonic() + timeout_s
        alive = [
            process.pid for process in self.processes() if not has_ended(process.pid, deadline)
        ]
        self._process.wait(timeout_s)  # psutil would take the exit status away
        assert not alive, f"still there: {alive}"

    # --- end ---

    def close(self) -> int:
        """The orderly end, by closing its lifeline; the exit status."""
        return self.wait_ended()

    def _let_go(self) -> None:
        for line in self._channels:
            line.close()
        self._channels.clear()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> RunningBroker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._closed:
            return
        if kind is not None:
            self.kill_all()
            sys.stderr.write(self.log)
        else:
            try:
                self.close()
            except BaseException:
                self.kill_all()
                raise


def left_behind(mark: str = RUN) -> list[psutil.Process]:
    """Processes of this test run's brokers, or those with that mark, that still live."""
    found = []
    for pid in psutil.pids():  # process_iter would keep those of before, whose numbers others have
        with contextlib.suppress(psutil.Error, OSError):
            process, its = psutil.Process(pid), mark_of(pid)
            if its != mark and its.partition("/")[0] != mark:
                continue
            if not has_ended(pid, 0) and not forked.is_nursery(pid):
                found.append(process)
    return found


def mark_of(pid: int) -> str:
    """By a thread that has its environment still: of a process that was killed the first one may
    have ended before the others."""
    name = f"{MARK}=".encode()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for each in (thread / "environ").read_bytes().split(b"\0"):
                if each.startswith(name):
                    return os.fsdecode(each.removeprefix(name))
    return ""


def of_session(session: int) -> list[psutil.Process]:
    """Processes of a session that still live: the first thread of one that was killed is a zombie
    while another still holds its files. The session's number is no other's until the last has
    ended."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(pid) == session and not has_ended(pid, 0):
                found.append(psutil.Process(pid))
    return found


# --- sending and reading, raw ---------------------------------------------------------------------


def encode_batch(bodies: Iterable[bytes], **kinds: Any) -> bytes:
    encoder = BatchEncoder(size_max=8 << 20)
    for body in bodies:
        encoder.add(body, **kinds)
    return encoder.take()


def send_batch(
    line: Channel,
    topic: str,
    queue_id: int,
    bodies: Sequence[bytes],
    *,
    timeout_s: float = patient(30),
    **kinds: Any,
) -> list[Sent]:
    """One attempt. Raises what the broker answered, or NotConfirmed."""
    command = SendMessages([Section(topic, queue_id, len(bodies))], 0)
    answer, _ = line.ask(command, [encode_batch(bodies, **kinds)], timeout_s=timeout_s)
    assert isinstance(answer, SendResult)
    (result,) = answer.results
    if result.code:
        raise from_code(result.code, result.text)
    return [
        Sent(topic, queue_id, result.queue_offset + index, body, result.physical_offset)
        for index, body in enumerate(bodies)
    ]


def pull(
    line: Channel, command: PullMessages, timeout_s: float = patient(70)
) -> tuple[PullResult, list[Message]]:
    answer, payload = line.ask(command, timeout_s=timeout_s)
    assert isinstance(answer, PullResult)
    messages = decode(payload[0].buffer) if payload else []
    assert len(messages) == answer.count
    return answer, messages


def read_queue(line: Channel, topic: str, queue_id: int, at_least: int = 0) -> list[Message]:
    """All messages of a queue; waits until there are `at_least` so many, for 20 s."""
    found: list[Message] = []
    next_offset = 0
    deadline = time.monotonic() + RECOVER_TIMEOUT_S
    while True:
        suspend_ms = 1_000 if next_offset < at_least else 0
        command = PullMessages(topic, queue_id, next_offset, 10_000, 1 << 20, suspend_ms)
        try:
            answer, messages = pull(line, command)
        except CometError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise
            continue
        found += messages
        next_offset = answer.next_queue_offset
        if answer.status != PullStatus.FOUND:
            if next_offset >= at_least:
                return found
            assert time.monotonic() < deadline, f"{topic}/{queue_id} ends at {next_offset}"


# --- load -----------------------------------------------------------------------------------------


@dataclass
class Load:
    """Threads that send batch after batch to the broker, and keep what was acknowledged.

    Each has queues of its own and sends a batch again until it is acknowledged, so a batch can be
    stored more than once, but never after a later one. `check` says so.
    """

    broker: RunningBroker
    topic: str
    queues: int = 4
    threads: int = 2
    batch_count: int = 4  # messages of a batch
    body_bytes_max: int = 12_000
    seed: int = 0
    acknowledged: list[Sent] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._grown = threading.Condition()
        self._failed: list[BaseException] = []
        endpoint = self.broker.endpoints.commitlog
        self._threads = [
            threading.Thread(target=self._run, args=(endpoint, number), name=f"load {number}")
            for number in range(self.threads)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(patient(60))
        if kind is None and self._failed:
            raise self._failed[0]

    def wait_for_more(self, count: int, timeout_s: float = patient(120)) -> None:
        """Until so many more messages have been acknowledged."""
        wanted = len(self.acknowledged) + count
        with self._grown:
            done = self._grown.wait_for(
                lambda: len(self.acknowledged) >= wanted or bool(self._failed), timeout_s
            )
        if self._failed:
            raise self._failed[0]
        assert done, f"only {len(self.acknowledged)} of {wanted}:\n{self.broker.log[-4000:]}"

    def check(self) -> None:
        """All of it is there, in order; a batch is stored whole or not at all.

        But for the last of a queue: where the whole broker was killed in the middle of it, its
        first messages may be there. It was never acknowledged.
        """
        stored = self.broker.assert_stored(self.acknowledged)
        ends = {
            (sent.topic, sent.queue_id): sent.queue_offset
            for sent in sorted(self.acknowledged, key=lambda sent: sent.queue_offset)
        }
        for key, messages in stored.items():
            at, before = 0, -1
            while at < len(messages):
                number = int(messages[at].body.split(b" ")[0])
                batch = [
                    message.body.split(b" ") for message in messages[at : at + self.batch_count]
                ]
                numbers = [(int(body[0]), int(body[1])) for body in batch]
                wanted = [(number, index) for index in range(self.batch_count)]
                if numbers == wanted[: len(numbers)] and messages[at].queue_offset > ends.get(
                    key, -1
                ):
                    wanted = numbers
                assert numbers == wanted, (key, at, numbers)
                assert number in (before, before + 1), (key, at, before, number)
                before = number
                at += self.batch_count

    def _run(self, endpoint: str, number: int) -> None:
        try:
            self._send_until_over(endpoint, number)
        except BaseException as error:
            self._failed.append(error)
            with self._grown:
                self._grown.notify_all()

    def _send_until_over(self, endpoint: str, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        padding = chance.randbytes(self.body_bytes_max)
        mine = range(number, self.queues, self.threads)
        line = Channel(endpoint)
        try:
            for batch, queue_id in (
                (batch, queue) for batch in itertools.count() for queue in mine
            ):
                bodies = [
                    b"%d %d " % (batch, index) + padding[: chance.randrange(self.body_bytes_max)]
                    for index in range(self.batch_count)
                ]
                while not self._over.is_set():
                    try:
                        sent = send_batch(line, self.topic, queue_id, bodies, timeout_s=3)
                    except CometError as error:
                        if not error.retriable:
                            raise
                        self.refusals.append(str(error))
                        line.close()  # nothing that was queued in it is to come later
                        line = Channel(endpoint)
                        self._over.wait(0.005)
                        continue
                    with self._grown:
                        self.acknowledged += sent
                        self._grown.notify_all()
                    self._over.wait(PACE_S)
                    break
                else:
                    return
        finally:
            line.close()
