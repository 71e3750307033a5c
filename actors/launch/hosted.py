"""The commitlog actor inside the process of a service, which appends by itself.

    service                                     supervisor
      Guest <------------ a socket pair ----------> Host
      HostedCommitLog       settings, Family message and doorbells; reports; the lifeline

The supervisor, a child of the service, orders the actor as it orders a child, and is told the same
things of it. But nobody ends the service: where a child would be killed or would end itself, its
writer goes out of service, every append raises, and the broker ends.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import msgspec
import pykka

from cometmq.actors.launch.process import actor_of
from cometmq.actors.launch.zygote import Broken, Closing, Ended, Ready, Report, write_report
from cometmq.actors.runtime.family import EXIT_UNSETTLED, Family, note_failure
from cometmq.actors.writer.commitlog import CommitLogActor
from cometmq.protocol.commands import EnsureTopic, Finish
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    FlushDiskTimeout,
    FlushSlaveTimeout,
    MessageIllegal,
    ServiceNotAvailable,
    SlaveNotAvailable,
    StoreError,
    StoreLocked,
)
from cometmq.protocol.names import check_properties, check_tag
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import Appender
from cometmq.shm.live.control import Counter, Doorbell

log = logging.getLogger(__name__)

TOPIC_TIMEOUT_S: Final = 10
_LENGTH: Final = struct.Struct("<I")
_DOORBELLS_MAX: Final = 64


class HostedCommitLog(CommitLogActor):
    """The single writer, in a service that appends by itself: the desk of its Appenders.

    They append natively, from any thread; what they cannot do alone, they have done here, in the
    thread that called them: to roll over, to refuse, to say why.
    """

    use_daemon_thread = True  # a service that forgets to close must be able to end

    def __init__(self, family: Family, **options: Any) -> None:
        super().__init__(family, **options)
        self.store = family.store
        self._pid = os.getpid()
        self._over: CometError | None = None  # why this writer is out of service, for ever
        self._flushed_seen = family.control.sleep_on(Counter.FLUSHED, Doorbell.APPENDERS)
        self._replicated_seen = family.control.sleep_on(Counter.REPLICATED, Doorbell.APPENDERS)

    # --- for the service's threads ---

    def appender(self, topic: str, queue_id: int) -> Appender:
        self._check_usable()
        if not self._cursors.knows(topic):
            with Channel(self._family.addresses["coordinator"], "the coordinator") as channel:
                channel.ask(EnsureTopic(topic), timeout_s=TOPIC_TIMEOUT_S)
        return Appender(
            self._log.appender,
            self._log.gate,
            self._cursors.writable(topic, queue_id),
            self,
            self._sleepers,
            self._flushed_seen if self._sync else None,
            self._synced if self._sync else None,
            self._flush_timeout_s,
            self._settings.max_in_flight_send_bytes,
            self._slaves is not None,
        )

    def append_all(self, queue: QueueCursor, bodies: list[bytes], properties: bytes) -> int:
        """The slow way, all or none; the first queue offset. Raises why nothing is stored."""
        self._check_usable()
        try:
            with self._log.gate:
                self._check_admitted(queue)
                first = self._log.append_all(queue, bodies, properties) if bodies else 0
                self._log.publish()
                self._log.wake()
        except ServiceNotAvailable:
            self._check_usable()  # or it is for ever
            raise
        except AssertionError as error:
            self.on_broken_invariant()
            raise StoreError(f"a broken invariant: {error}") from error
        return first

    def _check_admitted(self, queue: QueueCursor) -> None:
        self._check_usable()
        self._desk.check_lasting(self._desk.unflushed_bytes if self._sync else 0)
        self._cursors.writable(queue.topic, queue.queue_id)

    def _check_usable(self) -> None:
        """First of all, before any lock: in a fork it may be held by a thread that is not there."""
        if os.getpid() != self._pid:
            raise StoreLocked(
                f"{self.store} is written by process {self._pid}, and not by its forks"
            )
        if self._over is not None:
            raise self._over

    def not_bodies(self, error: Exception, given: object) -> CometError:
        """Why that is no body, or no list of bodies."""
        if isinstance(given, str):
            return ArgumentIllegal("a body is bytes-like, not str: encode it first")
        if isinstance(given, bytes | bytearray | memoryview):
            return ArgumentIllegal("append_many takes a list of bodies; append takes one")
        if isinstance(given, list):
            return ArgumentIllegal(f"a body in the list is no bytes: {error}")
        return ArgumentIllegal(f"a body is bytes-like, not {type(given).__name__}")

    def not_properties(
        self, error: Exception, tags: object, keys: object, properties: object
    ) -> CometError:
        """Why these cannot be a message's properties."""
        for name, value in (("tags", tags), ("keys", keys)):
            if value is not None and not isinstance(value, str):
                hint = "; its words stand apart by blanks" if name == "keys" else ""
                return ArgumentIllegal(f"{name} is a text, not {type(value).__name__}{hint}")
        if not isinstance(properties, dict | None):
            kind = type(properties).__name__
            return ArgumentIllegal(f"properties is a dict of texts, not {kind}")
        return (ArgumentIllegal if isinstance(error, TypeError) else MessageIllegal)(str(error))

    def checked(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        check_properties(properties)
        return properties

    def check_tag(self, tag: str) -> None:
        check_tag(tag)

    def wait_until_flushed(self, timeout_s: float | None) -> None:
        self._check_usable()
        timeout_s = self._flush_timeout_s if timeout_s is None else timeout_s
        if not self._sleepers.wait(self._flushed_seen, self._wrote.value, timeout_s):
            self.not_flushed(timeout_s)
        if self._slaves is not None:
            self.wait_for_slaves(timeout_s)

    def wait_for_slaves(self, timeout_s: float | None = None) -> None:
        """Until they have everything that was appended before."""
        assert self._slaves is not None
        why = self._slaves.why_missing()
        if why:
            raise SlaveNotAvailable(f"stored, but {why}")
        seconds = self._slave_timeout_s if timeout_s is None else timeout_s
        if not self._sleepers.wait(self._replicated_seen, self._wrote.value, seconds):
            why = "" if self._over is None else f": {self._over}"
            raise FlushSlaveTimeout(
                f"stored, but not acknowledged by a slave within {seconds:g} s{why}"
            )

    def not_flushed(self, timeout_s: float | None = None) -> NoReturn:
        self._check_usable_for_flush()
        seconds = self._flush_timeout_s if timeout_s is None else timeout_s
        raise FlushDiskTimeout(f"stored, but not flushed within {seconds:g} s")

    def _check_usable_for_flush(self) -> None:
        if self._over is not None:
            raise FlushDiskTimeout(f"stored, but not flushed: {self._over}")

    # --- the end ---

    def take_out_of_service(self, error: OSError) -> None:
        note_failure("the CommitLog could not be flushed", error, self._errno)
        self.take_out(StoreError(f"{self.store} could not be flushed: {error.strerror}"))
        self._stop_here()

    def take_out(self, error: CometError) -> None:
        """Out of service, from any thread: nothing is appended any more, and nobody waits."""
        if self._over is None:
            self._over = error
        self._family.gone.set()
        if self.started.is_set() and self.start_error is None:
            self._desk.end()
        self._sleepers.end()
        os.eventfd_write(self._family.doorbell_fd, 1)

    def on_broken_invariant(self) -> None:
        self.take_out(StoreError(f"{self.store}: a broken invariant, see the log"))
        self._stop_here()

    def _stop_here(self) -> None:
        """From any thread; another one may have done it."""
        with contextlib.suppress(pykka.ActorDeadError):
            self.stop()

    def let_go(self) -> None:
        """Once it has ended: what the end of a process would let go."""
        self.inbox.close()
        lock = getattr(self, "_lock", None)  # it may have failed to take it
        if lock is not None:
            lock.release()


class Guest:
    """The service's end. `theirs` becomes the standard input of the supervisor."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair()
        self.actor: HostedCommitLog | None = None
        self._closing = False
        self._doorbells: list[int] = []
        self._thread = threading.Thread(target=self._run, name="cometmq guest", daemon=True)

    def start(self, supervisor: int, settings: bytes) -> None:
        """Hand over the settings, and host the actor once that process orders it."""
        self.theirs.close()
        self._supervisor = os.pidfd_open(supervisor)
        self._socket.sendall(settings)
        self._thread.start()

    # --- its thread ---

    def _run(self) -> None:
        try:
            order = self._receive_order()
            if order is not None:  # else it could not start, and says why elsewhere
                self._host(order)
        finally:
            for descriptor in self._doorbells:
                os.close(descriptor)

    def _host(self, order: dict[str, Any]) -> None:
        """The actor's whole life."""
        try:
            family = Family.from_message(order)
            bind = [(family.addresses["commitlog"], True), (family.bind, False)]
            reference = HostedCommitLog.start(family, bind=bind)
        except Exception as error:
            self._report_broken(error)
            return
        # A service that uses pykka ends its own actors by pykka's registry.
        pykka.ActorRegistry.unregister(reference)
        actor = actor_of(reference)
        assert isinstance(actor, HostedCommitLog)
        self.actor = actor
        watch = threading.Thread(
            target=self._watch, args=(actor,), name="cometmq guest's watch", daemon=True
        )
        watch.start()
        self._wait_for_the_end(actor)
        actor.started.wait()
        with contextlib.suppress(pykka.ActorDeadError):
            reference.tell(Finish())
        watch.join()
        actor.let_go()

    def _receive_order(self) -> dict[str, Any] | None:
        """The Family message, with its doorbells; None if the socket ends before."""
        held = b""
        while len(held) < _LENGTH.size or len(held) < _LENGTH.size + _LENGTH.unpack_from(held)[0]:
            try:
                more, rights, _, _ = self._socket.recvmsg(
                    65_536, socket.CMSG_SPACE(_DOORBELLS_MAX * 4), socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                return None
            for level, kind, data in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._doorbells += array.array("i", data)
            if not more:
                return None
            held += more
        order: dict[str, Any] = msgspec.msgpack.decode(held[_LENGTH.size :])
        return order | {"doorbells": self._doorbells}

    def _watch(self, actor: HostedCommitLog) -> None:
        """Tell the supervisor what becomes of the actor."""
        actor.started.wait()
        if actor.start_error is not None:
            self._report_broken(actor.start_error)
        else:
            self._report(Ready("commitlog", os.getpid()))
        actor.ended.wait()
        if not actor.settled:
            actor.take_out(StoreError(f"{actor.store}: its writer has died, see the log"))
        if actor.start_error is None:
            self._report(Ended(os.getpid(), 0 if actor.settled else EXIT_UNSETTLED))

    def _report_broken(self, error: BaseException) -> None:
        log.debug("the writer could not start", exc_info=error)
        self._report(Broken("commitlog", os.getpid(), str(error), getattr(error, "code", 1)))

    def _report(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more
            write_report(self._socket.fileno(), report)

    def _wait_for_the_end(self, actor: HostedCommitLog) -> None:
        """Of the socket, or of the supervisor. Whatever comes without our asking is a failure."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._supervisor, select.POLLIN)
        poll.poll()
        if not actor.ended.is_set():
            if not self._closing:
                log.critical("the broker has ended: nothing more is appended")
            actor.take_out(StoreError(f"{actor.store}: the broker has ended, see its log"))

    # --- for the service ---

    def close(self) -> None:
        """Ask the supervisor to end everything in order; it then asks the actor."""
        self._closing = True
        self._report(Closing())

    def wait(self) -> None:
        """Once the supervisor has ended: until nothing is left here."""
        self._thread.join()
        os.close(self._supervisor)
        self._socket.close()


class Host:
    """The supervisor's end, on the service's side of its standard input."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.report_fd = self._socket.fileno()
        self.end_fd = os.pidfd_open(self.pid)  # a fork of the service may keep the socket open

    def start(self, message: dict[str, Any]) -> None:
        """Order the actor with that Family message; Ready or Broken come back."""
        body = msgspec.msgpack.encode(message)
        with contextlib.suppress(BrokenPipeError):  # the service has ended, which `end_fd` says
            self._socket.setblocking(True)  # it is read without
            socket.send_fds(self._socket, [_LENGTH.pack(len(body)) + body], message["doorbells"])
            self._socket.setblocking(False)

    def close(self) -> None:
        """The service sees the end of it, whoever else has it open."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
