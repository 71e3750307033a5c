"""A cluster on one machine, run in the foreground: the name server in this process, each replica's
broker as a child of it, and what happens to them told in lines.

A child ends in order when its lifeline does, so also when this process is killed. A replica that
dies is not started again: its death may be what somebody wants to see.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import psutil
import zmq

from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.actors.launch.binding import port_holder
from cometmq.actors.launch.embedded import EmbeddedFailed, EmbeddedReady
from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.errors import EngineError
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.children import module_command
from cometmq.client.routes import Routes
from cometmq.cluster.administration import form
from cometmq.cluster.changes import changes
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.looking import GroupStatus, Looker
from cometmq.cluster.place import GroupPlace
from cometmq.conf.engine import NO_ACCESS, EngineAccess
from cometmq.protocol.errors import ConfigError, NotConfirmed, NotReachable, StoreError

ROUTE_S: Final = 1.0  # for the name server to answer
LOOK_S: Final = 0.5  # what only the control files say is looked for that often
END_S: Final = 60.0
TAIL_BYTES: Final = 2_000
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]

_decode: Final = msgspec.json.Decoder(EmbeddedReady | EmbeddedFailed).decode


def check_new(url: str, group: str, access: EngineAccess = NO_ACCESS) -> None:
    """A new group of that name may be made with an engine; or raises ConfigError, EngineError."""
    with closing(open_engine(url, access=access)) as engine:
        if engine.get(group) is not None:
            raise ConfigError(
                f"{engine.where} has a group {group} already: choose another name (--group), or "
                "another engine"
            )


def ensure_formed(folder: ClusterFolder, engine: Engine) -> None:
    """Make the group's record where there never was one. Raises ConfigError, StoreError."""
    file = folder.file
    if not file.formed:
        form(
            engine,
            file.group,
            [(each.name, each.address) for each in folder.replicas],
            file.min_in_sync,
        )
        folder.keep_formed()
    elif engine.get(file.group) is None:
        raise StoreError(
            f"{file.engine} has lost the record of group {file.group}, so nobody knows which "
            f"replica has everything: bring the engine back, or keep {folder.path} as it is and "
            "make another cluster"
        )


class Child:
    """One replica's broker. Its settings go in as one line; the rest of that pipe is its lifeline.

    Raises ConfigError.
    """

    def __init__(self, folder: ClusterFolder, name: str) -> None:
        self.name = name
        self.errors = folder.path / name / "errors.log"
        settings = folder.settings_of(name)
        with self.errors.open("ab") as errors:
            self._said_from = errors.tell()
            self._process = subprocess.Popen(
                module_command("cometmq.actors.launch.embedded"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the children
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.is_refused = False  # it has said itself why it does not start
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdout = self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(settings.as_keys()) + b"\n")
            self._process.stdin.flush()

    def answer(self) -> EmbeddedReady | EmbeddedFailed | None:
        """The line that it says, once it is there; None: it has said none."""
        line = self.stdout.readline()
        answer: EmbeddedReady | EmbeddedFailed | None = _decode(line) if line else None
        self.is_refused = isinstance(answer, EmbeddedFailed)
        return answer

    def end(self) -> None:
        """Have it end in order."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Its whole family."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        """How it has ended."""
        status = self._process.wait()
        self.end()
        self.stdout.close()
        os.close(self.pidfd)
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"has ended with status {status}" if status else "has ended in order"

    def last_words(self) -> str:
        """The end of what it printed in this life."""
        try:
            with self.errors.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._said_from, size - TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


class ClusterRun:
    """From the start of all processes to their end; `run` returns after that.

    Args:
        say: takes a line for people.
        on_served: is called once, when messages are taken for the first time and clients are told
            by whom.

    To be used in the main thread. Raises ConfigError, StoreError, StoreLocked, EngineError.
    """

    def __init__(
        self,
        folder: ClusterFolder,
        engine: Engine,
        say: Say,
        on_served: Callable[[GroupStatus], None],
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._say = say
        self._on_served = on_served
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._routes = Routes(f"tcp://{folder.file.name_server}")
        self._status: GroupStatus | None = None
        self._has_served = False
        self._others: list[int] = []  # pidfds of processes that are no children, and are ending
        self._ended: list[str] = []  # whose starting again is not told yet
        self._trouble = ""  # that the group could not be looked at
        self._signals = 0

    def run(self) -> None:
        place = GroupPlace.of_folder(self._folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._folder.lock())
            stack.callback(self._selector.close)
            stack.callback(self._routes.close)
            stack.enter_context(self._noting_signals())
            stack.enter_context(self._name_server())
            looker = stack.enter_context(Looker(place, self._engine))
            watch = self._engine.watch(place.group)
            stack.callback(watch.close)
            stack.callback(self._wait_others)
            stack.callback(self._end_children)
            running = looker.supervisors()
            for replica in self._folder.replicas:
                if replica.name in running:
                    pid = running[replica.name].pid
                    self._say(f"{replica.name} (process {pid}) runs already")
                else:
                    self._start(replica.name)
            self._selector.register(watch.fileno(), selectors.EVENT_READ, watch.take)
            look_at = 0.0
            while not self._signals:
                if time.monotonic() >= look_at:
                    self._look(looker)
                    look_at = time.monotonic() + LOOK_S
                changed = self._wait(look_at)
                look_at = 0.0 if changed else look_at
            self._say("ending; once more Ctrl-C kills what has not ended")
            self._end_others(looker)

    # --- what happens ---

    def _wait(self, until: float) -> bool:
        """Take what comes; whether it is worth another look."""
        found = self._selector.select(max(0.0, until - time.monotonic()))
        for key, _ in found:
            key.data()
        return bool(found)

    def _look(self, looker: Looker) -> None:
        try:
            now = looker.look()
        except (EngineError, StoreError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"cannot look at the group: {error}")
            self._tell_how_to_start(None)
            return
        self._trouble = ""
        for line in changes(self._status, now) if self._status else ():
            self._say(line)
        self._status = now
        self._tell_how_to_start(now)
        if now.serves and not self._has_served and self._is_known():
            self._has_served = True
            self._on_served(now)

    def _is_known(self) -> bool:
        """Whether clients are told of a master: it says that itself to the name server."""
        try:
            return bool(self._routes.masters(ROUTE_S))
        except (NotConfirmed, NotReachable):
            return False

    def _tell_how_to_start(self, now: GroupStatus | None) -> None:
        """Of those that have ended; a replica that was removed has ended for good."""
        for name in self._ended:
            if now is None or now.replica(name) is not None:
                self._say(f"to start it again: {run_command(self._folder.path, name)}")
        self._ended.clear()

    @contextlib.contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Each is a byte to read: whatever this process waits for, it notices."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            before = {number: signal.getsignal(number) for number in ENDING}
            wakeup = signal.set_wakeup_fd(theirs.fileno())
            for number in ENDING:
                signal.signal(number, self._on_signal)
            self._selector.register(ours, selectors.EVENT_READ, lambda: ours.recv(64))
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    @contextlib.contextmanager
    def _name_server(self) -> Iterator[None]:
        address = self._folder.file.name_server
        try:
            server = NameServerActor.start(bind=[(f"tcp://{address}", False)])
        except zmq.ZMQError as error:
            why = str(error)
            if error.errno == zmq.EADDRINUSE:
                why = f"{port_holder(int(address.rpartition(':')[2]))} does"
            raise ConfigError(f"the name server cannot listen on {address}: {why}") from None
        try:
            yield
        finally:
            server.stop()

    # --- children ---

    def _start(self, name: str) -> None:
        try:
            child = Child(self._folder, name)
        except ConfigError as error:
            self._say(f"{name} does not start: {error}")
            self._ended.append(name)
            return
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, lambda: self._on_answer(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._on_end(child))

    def _on_answer(self, child: Child) -> None:
        self._selector.unregister(child.stdout)
        answer = child.answer()
        if isinstance(answer, EmbeddedFailed):
            self._say(f"{child.name} does not start: {answer.text}")

    def _on_end(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        if child.stdout in self._selector.get_map():
            self._on_answer(child)
        self._children.remove(child)
        self._say(f"{child.name} (process {child.pid}) {child.wait()}")
        if self._signals:
            return
        words = child.last_words()
        if words and not child.is_refused:
            self._say(f"{child.name}: {words.splitlines()[-1]} ({child.errors})")
        self._ended.append(child.name)

    def _end_others(self, looker: Looker) -> None:
        """Replicas that `cometmq cluster run` has started again: without the rest they are none."""
        own = {child.pid for child in self._children}
        try:
            others = looker.supervisors()
        except (StoreError, OSError) as error:
            self._say(f"cannot see what else runs here: {error}")
            return
        for name, process in others.items():
            if process.pid not in own:
                self._say(f"{name} (process {process.pid}), started elsewhere, is ended as well")
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    pidfd = os.pidfd_open(process.pid)
                    self._others.append(pidfd)
                    process.terminate()  # it looks whether it is still the same

    def _wait_others(self) -> None:
        """Until they have ended, whether or not who has started them has noticed."""
        deadline = time.monotonic() + END_S
        for pidfd in self._others:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            os.close(pidfd)

    def _end_children(self) -> None:
        """In order, all at once; whoever has not after a minute, or a second signal, is killed."""
        for child in self._children:
            child.end()
        deadline = time.monotonic() + END_S
        asked = max(self._signals, 1)
        while self._children:
            self._wait(deadline)
            if self._signals > asked or time.monotonic() > deadline:
                for child in self._children:
                    self._say(f"{child.name} is killed")
                    child.kill()
                asked, deadline = self._signals, time.monotonic() + END_S


def run_command(path: Path, name: str) -> str:
    """How a replica is started by hand."""
    return f"cometmq cluster run --store {shlex.quote(str(path))} {name}"
