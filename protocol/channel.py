"""One line from a client, or from one actor to another: a DEALER that asks and is answered.

Threads may share a channel. As long as one thread at a time uses it, that thread itself sends,
waits and receives, so that a single request costs no hand-over between threads. When a second
thread arrives, or somebody wants answers without waiting for them, a pump thread takes over the
receiving and stays.

When the line breaks, every unanswered request fails with NotConfirmed and the socket is replaced,
so that nothing which was queued in it is sent later, behind the back of whoever retries.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import zmq
import zmq.utils.monitor

from cometmq.protocol import frames
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable

log = logging.getLogger(__name__)

Payload = Sequence[bytes | bytearray | memoryview]
ZERO_COPY_BYTES: Final = 65_536  # below this a copy is cheaper than pyzmq's bookkeeping
EVENTS: Final = int(zmq.EVENTS)  # plain numbers: pyzmq's enumerations take their time
POLLIN: Final = int(zmq.POLLIN)
SLICE_S: Final = 0.05  # how long a caller sleeps in the socket before it looks up
RECONNECT_MS: Final = 20
RECONNECT_MS_MAX: Final = 500


class Pending:
    """A request that has not been answered yet. Its fields are set before `done` is."""

    __slots__ = (
        "_event",
        "_on_done",
        "answer",
        "channel",
        "done",
        "error",
        "payload",
        "request_id",
    )

    def __init__(
        self, channel: Channel, request_id: int, on_done: Callable[[Pending], None] | None
    ) -> None:
        self.channel = channel
        self.request_id = request_id
        self.answer: Command | None = None
        self.payload: list[zmq.Frame] = []
        self.error: CometError | None = None
        self.done = False
        self._event: threading.Event | None = None
        self._on_done = on_done

    def event(self) -> threading.Event:
        event = self._event
        if event is None:
            event = self._event = threading.Event()
        if self.done:  # settled in between
            event.set()
        return event

    def settle(
        self, answer: Command | None, payload: list[zmq.Frame], error: CometError | None
    ) -> None:
        self.answer, self.payload, self.error = answer, payload, error
        self.done = True
        if self._event is not None:
            self._event.set()
        if self._on_done is not None:
            self._on_done(self)

    def result(self) -> tuple[Command, list[zmq.Frame]]:
        """The answer and its payload; raises the error that was answered."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return frames.raise_if_failed(self.answer), self.payload


Settled = tuple[Pending, Command | None, list[zmq.Frame], CometError | None]


class Channel:
    """A DEALER to one endpoint.

    Args:
        endpoint: ZeroMQ address of the process, such as "tcp://127.0.0.1:9877".
        name: what error texts call the other side.
    """

    def __init__(self, endpoint: str, name: str = "") -> None:
        self.endpoint = endpoint
        self.name = name or endpoint
        self._lock = threading.Lock()  # guards the sockets
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pump: threading.Thread | None = None
        self._wants_pump = False
        self._closed = False
        self._pid = os.getpid()
        self._slice_ms = -1
        self._open()

    # --- asking ---

    def request(
        self,
        command: Command,
        payload: Payload = (),
        on_done: Callable[[Pending], None] | None = None,
        *,
        pump: bool = True,
    ) -> Pending:
        """Send; the answer arrives in the returned Pending. `on_done` wants the pump to run.

        `on_done` is called in whatever thread receives the answer and must not block. Without
        `pump` that is the thread that calls `wait_any`.
        """
        pending = Pending(self, next(self._ids), on_done)
        if on_done is not None and pump:
            self.start_pump()
        if self._pump is None:
            self._notice_loss()
        self._pending[pending.request_id] = pending
        self._send(pending.request_id, command, payload)
        return pending

    def wait(self, pending: Pending, timeout_s: float, *, keep: bool = False) -> bool:
        """Whether the answer came within the time.

        A pending that timed out is forgotten, unless `keep` says that it will be waited for again.
        """
        deadline = time.monotonic() + timeout_s
        while not pending.done and not self._wants_pump:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._receive_here(pending, left_s)
        if not pending.done and self._wants_pump:
            pending.event().wait(max(0.0, deadline - time.monotonic()))
        if not pending.done and not keep:
            self._pending.pop(pending.request_id, None)
        return pending.done

    def ask(
        self, command: Command, payload: Payload = (), *, timeout_s: float = 3.0
    ) -> tuple[Command, list[zmq.Frame]]:
        """Send and wait. Raises the answered error, or NotConfirmed when no answer comes."""
        pending = self.request(command, payload)
        if not self.wait(pending, timeout_s):
            raise NotConfirmed(
                f"no answer to {type(command).__name__} from {self.name} within {timeout_s:g} s"
            )
        return pending.result()

    def tell(self, command: Command, payload: Payload = ()) -> None:
        """Send; an answer, if one comes, is dropped."""
        self._send(next(self._ids), command, payload)

    # --- life ---

    def start_pump(self) -> None:
        """From now on a thread of the channel's own receives."""
        if self._pump is not None or self._closed:
            return
        self._wants_pump = True
        self._ring()  # whoever is polling lets go of the lock
        with self._lock:
            if self._pump is None and not self._closed:
                self._pump = threading.Thread(
                    target=self._run_pump, name=f"cometmq {self.name}", daemon=True
                )
                self._pump.start()

    def close(self) -> None:
        """Unanswered requests fail with NotConfirmed. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ring()
        if self._pump is not None and self._pump is not threading.current_thread():
            self._pump.join()
        with self._lock:
            self._shut()
            os.close(self._wake)
        self._fail_all(f"the channel to {self.name} was closed")

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the sockets; under the lock ---

    def _open(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = 0  # what waits is bounded by whoever asks, not by dropping
        socket.rcvhwm = 0
        socket.maxmsgsize = frames.FRAME_MAX
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = RECONNECT_MS_MAX
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        _readable(self._monitor)  # until it is first looked at, its descriptor tells nothing
        self._slice_ms = -1
        socket.connect(self.endpoint)
        self._socket = socket
        self._descriptors = (socket.fileno(), self._monitor.fileno(), self._wake)
        self._poll_list: list[tuple[Any, int]] = [
            (socket, zmq.POLLIN),
            (self._monitor, zmq.POLLIN),
            (self._wake, zmq.POLLIN),
        ]

    def _shut(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _reopen(self) -> None:
        self._shut()
        self._open()

    # --- sending and receiving ---

    def _send(self, request_id: int, command: Command, payload: Payload) -> None:
        if self._closed:
            self._pending.pop(request_id, None)
            raise NotReachable(f"the channel to {self.name} is closed")
        assert self._pid == os.getpid(), "a channel does not survive a fork"
        head = frames.pack(request_id, command)
        if not self._lock.acquire(blocking=False):
            self.start_pump()  # somebody else is waiting in it
            self._lock.acquire()
        try:
            if payload:
                self._socket.send(head, zmq.SNDMORE)
                last = len(payload) - 1
                for index, frame in enumerate(payload):
                    flags = zmq.SNDMORE if index < last else 0
                    self._socket.send(frame, flags, copy=len(frame) < ZERO_COPY_BYTES)
            else:
                self._socket.send(head)
            # Sending may swallow the edge that says "something to read": pass it on.
            if self._pump is not None and _readable(self._socket):
                self._ring()
        finally:
            self._lock.release()

    def _receive_here(self, wanted: Pending, timeout_s: float) -> None:
        """Sleep in the socket itself, which is the shortest way from the answer to the asker.

        In slices: another thread that comes, and a line that breaks, are noticed in between.
        """
        settled, lost = None, False
        with self._lock:
            if self._closed or wanted.done or self._wants_pump:
                return
            slice_ms = max(1, int(min(timeout_s, SLICE_S) * 1000))
            if slice_ms != self._slice_ms:
                self._socket.rcvtimeo = self._slice_ms = slice_ms
            try:
                settled = self._match(self._socket.recv_multipart(copy=False))
            except zmq.Again:
                lost = self._was_disconnected()
                if lost:
                    self._reopen()
        if settled is not None:
            settled[0].settle(*settled[1:])
        if lost:
            self._fail_all(f"the connection to {self.name} was lost before it answered")

    def _pump_once(self) -> None:
        """Settle whatever has been answered, without waiting."""
        settled: list[Settled] = []
        lost = False
        with self._lock:
            if self._closed:
                return
            events = zmq.zmq_poll(self._poll_list, 0)
            for source, _ in events:
                if source is self._socket:
                    self._receive_all(settled)
                elif source is self._monitor:
                    lost = self._was_disconnected()
                else:
                    os.eventfd_read(self._wake)
                    self._receive_all(settled)
            if lost:
                self._reopen()
        for pending, answer, payload, error in settled:
            pending.settle(answer, payload, error)
        if lost:
            self._fail_all(f"the connection to {self.name} was lost before it answered")

    def _receive_all(self, settled: list[Settled]) -> None:
        while True:
            try:
                found = self._match(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return
            if found is not None:
                settled.append(found)

    def _match(self, parts: list[zmq.Frame]) -> Settled | None:
        """What an answer settles; None if it timed out meanwhile, or was told and not asked."""
        head = parts[0].buffer
        pending = self._pending.pop(frames.request_id_of(head), None)
        if pending is None:
            return None
        try:
            return pending, frames.unpack(head)[1], parts[1:], None
        except CometError as error:
            return pending, None, [], error

    def _notice_loss(self) -> None:
        """See a break of the line that nobody was waiting in, before something is sent on it.

        Else the next request would be taken for lost although the new line carries it.
        """
        if not self._lock.acquire(blocking=False):
            return  # somebody is waiting in it
        try:
            if self._closed or not self._was_disconnected():
                return
            self._reopen()
        finally:
            self._lock.release()
        self._fail_all(f"the connection to {self.name} was lost before it answered")

    def _was_disconnected(self) -> bool:
        lost = False
        while _readable(self._monitor):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)
            lost = lost or event["event"] == zmq.EVENT_DISCONNECTED
        return lost

    def _fail_all(self, text: str) -> None:
        for request_id in list(self._pending):
            pending = self._pending.pop(request_id, None)
            if pending is not None:
                pending.settle(None, [], NotConfirmed(text))

    def _run_pump(self) -> None:
        while not self._closed:
            self._wait_readable()
            if not self._closed:
                self._pump_once()

    def _wait_readable(self) -> None:
        """Sleep without the lock, so that others may send meanwhile."""
        # The descriptors stay valid: only this thread replaces the sockets from now on.
        waiting = self.descriptors()
        if waiting:
            zmq.zmq_poll([(fd, zmq.POLLIN) for fd in waiting], -1)

    def descriptors(self) -> tuple[int, ...]:
        """What to sleep on until something comes; empty when there is something to read already.

        They are good until the next call that receives, and only while nobody else receives.
        """
        with self._lock:
            if self._closed or _readable(self._socket):
                return ()
            return self._descriptors

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)


def wait_any(channels: Iterable[Channel], timeout_s: float, wake_fd: int) -> None:
    """Receive, in the calling thread, what comes first on any of the channels.

    Returns when something came, when `wake_fd` can be read (which is left to the caller), or after
    the time. No channel may have a pump: one thread makes all its requests and calls this.
    """
    watched: dict[int, Channel] = {}
    ready: set[Channel] = set()
    for channel in channels:
        descriptors = channel.descriptors()
        if descriptors:
            watched.update(dict.fromkeys(descriptors, channel))
        else:
            ready.add(channel)
    if not ready:
        waiting = [(fd, POLLIN) for fd in (wake_fd, *watched)]
        readable = zmq.zmq_poll(waiting, _poll_ms(timeout_s))
        ready.update(watched[fd] for fd, _ in readable if fd != wake_fd)
    for channel in ready:
        channel._pump_once()


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(EVENTS)) & POLLIN)


def _poll_ms(timeout_s: float) -> int:
    return max(1, int(timeout_s * 1000)) if timeout_s > 0 else 0


class RemoteRef:
    """An actor in another process, addressed as a pykka ActorRef is."""

    def __init__(self, endpoint: str, name: str = "") -> None:
        self._channel = Channel(endpoint, name)

    def tell(self, command: Command, payload: Payload = ()) -> None:
        self._channel.tell(command, payload)

    def ask(self, command: Command, payload: Payload = (), *, timeout: float = 3.0) -> Command:
        """The answer; raises the error that was answered, or NotConfirmed."""
        return self._channel.ask(command, payload, timeout_s=timeout)[0]

    def stop(self) -> None:
        """Let go of the line; the actor itself goes on."""
        self._channel.close()
