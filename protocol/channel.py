"""One line from a client, or from one actor to another: a DEALER that asks and is answered.

Threads may share a channel. As long as one thread at a time uses it, that thread itself sends,
waits and receives, so that a single request costs no hand-over between threads. When a second
thread arrives, or somebody wants answers without waiting for them, a pump thread takes over the
receiving and stays.

When the connection breaks, every unanswered request fails with NotConfirmed and the socket is
replaced, so that nothing which was queued in it is sent later, behind the back of whoever retries.

On the machine of the other side a channel may ask for a line (line.py), and then sends by it what
fits into a packet. The DEALER stays for the rest, and for everything once the line has ended.
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
from cometmq.protocol.commands import Command, LineAddress
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    NotConfirmed,
    NotLocal,
    NotReachable,
)
from cometmq.protocol.frames import Frame
from cometmq.protocol.line import Line

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
        "line",
        "payload",
        "request_id",
    )

    def __init__(
        self, channel: Channel, request_id: int, on_done: Callable[[Pending], None] | None
    ) -> None:
        self.channel = channel
        self.request_id = request_id
        self.answer: Command | None = None
        self.payload: Sequence[Frame] = ()
        self.error: CometError | None = None
        self.line: Line | None = None  # that the answer will come by
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
        self, answer: Command | None, payload: Sequence[Frame], error: CometError | None
    ) -> None:
        self.answer, self.payload, self.error = answer, payload, error
        self.done = True
        if self._event is not None:
            self._event.set()
        if self._on_done is not None:
            self._on_done(self)

    def result(self) -> tuple[Command, Sequence[Frame]]:
        """The answer and its payload; raises the error that was answered."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return frames.raise_if_failed(self.answer), self.payload


Settled = tuple[Pending, Command | None, Sequence[Frame], CometError | None]


class Channel:
    """A DEALER to one endpoint.

    Args:
        endpoint: ZeroMQ address of the process, such as "tcp://127.0.0.1:9877".
        name: what error texts call the other side.
        line_request: the command that asks for a line; None: there is to be none.
    """

    def __init__(
        self, endpoint: str, name: str = "", *, line_request: Command | None = None
    ) -> None:
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
        self._line: Line | None = None
        self._line_lock = threading.Lock()  # guards that there is one
        self._line_request = line_request
        self._line_asked = False
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
        head = frames.pack(pending.request_id, command)
        if self._line is not None and self._request_by_line(self._line, pending, head, payload):
            return pending
        if self._line is None and self._line_request is not None and not self._line_asked:
            self._line_asked = True
            self.request(self._line_request, on_done=self._take_line, pump=False)
        if self._pump is None:
            self._notice_loss()
        self._pending[pending.request_id] = pending
        self._send(pending.request_id, head, payload)
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
    ) -> tuple[Command, Sequence[Frame]]:
        """Send and wait. Raises the answered error, or NotConfirmed when no answer comes."""
        pending = self.request(command, payload)
        if not self.wait(pending, timeout_s):
            raise NotConfirmed(
                f"no answer to {type(command).__name__} from {self.name} within {timeout_s:g} s"
            )
        return pending.result()

    def tell(self, command: Command, payload: Payload = ()) -> None:
        """Send; an answer, if one comes, is dropped."""
        request_id = next(self._ids)
        self._send(request_id, frames.pack(request_id, command), payload)

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
        with self._line_lock:
            line, self._line = self._line, None
        if line is not None:
            line.shut()
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
        self._line_asked = False
        self._shut()
        self._open()

    # --- sending and receiving ---

    def _send(self, request_id: int, head: bytes, payload: Payload) -> None:
        if self._closed:
            self._pending.pop(request_id, None)
            raise NotReachable(f"the channel to {self.name} is closed")
        assert self._pid == os.getpid(), "a channel does not survive a fork"
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

        In slices: another thread that comes, and a connection that breaks, are noticed in between.
        """
        settled: list[Settled] = []
        lost, line = False, wanted.line
        with self._lock:
            if self._closed or wanted.done or self._wants_pump:
                return
            try:
                if line is not None:
                    self._receive_by_line(line, min(timeout_s, SLICE_S), settled)
                    line = None
                else:
                    lost = self._receive_by_dealer(timeout_s, settled)
            except EOFError:
                pass  # the line's
        for pending, answer, payload, error in settled:
            pending.settle(answer, payload, error)
        if line is not None:
            self._lose_line(line)
        if lost:
            self._fail_all(self._lost_text)

    def _receive_by_dealer(self, timeout_s: float, settled: list[Settled]) -> bool:
        """Sleep until a message comes, for a slice at most; whether the connection was lost."""
        slice_ms = max(1, int(min(timeout_s, SLICE_S) * 1000))
        if slice_ms != self._slice_ms:
            self._socket.rcvtimeo = self._slice_ms = slice_ms
        try:
            head, *payload = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            lost = self._was_disconnected()
            if lost:
                self._reopen()
            return lost
        found = self._match(head.buffer, payload)
        if found is not None:
            settled.append(found)
        return False

    def _pump_once(self) -> None:
        """Settle whatever has been answered, without waiting."""
        settled: list[Settled] = []
        lost, ended = False, None
        with self._lock:
            if self._closed:
                return
            line = self._line
            polled = [*self._poll_list, (line.fd, POLLIN)] if line else self._poll_list
            for source, _ in zmq.zmq_poll(polled, 0):
                if line is not None and source == line.fd:
                    ended = self._receive_all_by_line(line, settled)
                elif source is self._socket:
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
        if ended is not None:
            self._lose_line(ended)
        if lost:
            self._fail_all(self._lost_text)

    def _receive_all_by_line(self, line: Line, settled: list[Settled]) -> Line | None:
        """The line, if it has ended."""
        try:
            while self._receive_by_line(line, 0, settled):
                pass
        except EOFError:
            return line
        return None

    def _receive_all(self, settled: list[Settled]) -> None:
        while True:
            try:
                head, *payload = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            found = self._match(head.buffer, payload)
            if found is not None:
                settled.append(found)

    def _match(self, head: memoryview, payload: Sequence[Frame]) -> Settled | None:
        """What an answer settles; None if it timed out meanwhile, or was told and not asked."""
        pending = self._pending.pop(frames.request_id_of(head), None)
        if pending is None:
            return None
        try:
            return pending, frames.unpack(head)[1], payload, None
        except CometError as error:
            return pending, None, [], error

    def _notice_loss(self) -> None:
        """See a break of the connection that nobody was waiting in, before something is sent on it.

        Else the next request would be taken for lost although the new connection carries it.
        """
        if not self._lock.acquire(blocking=False):
            return  # somebody is waiting in it
        try:
            if self._closed or not self._was_disconnected():
                return
            self._reopen()
        finally:
            self._lock.release()
        self._fail_all(self._lost_text)

    def _was_disconnected(self) -> bool:
        lost = False
        while _readable(self._monitor):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)
            lost = lost or event["event"] == zmq.EVENT_DISCONNECTED
        return lost

    @property
    def _lost_text(self) -> str:
        return f"the connection to {self.name} was lost before it answered"

    def _fail_all(self, text: str) -> None:
        """What cannot be answered any more: nothing by ZeroMQ, nor by a line that is gone."""
        for pending in list(self._pending.values()):
            if pending.line is not None and pending.line is self._line:
                continue
            if self._pending.pop(pending.request_id, None) is not None:
                pending.settle(None, (), NotConfirmed(text))

    # --- the line ---

    def open_line(self, timeout_s: float) -> None:
        """Have a line from the start. Raises NotLocal, or what `ask` raises."""
        assert self._line_request is not None
        self._line_asked = True
        answer, _ = self.ask(self._line_request, timeout_s=timeout_s)
        if not isinstance(answer, LineAddress):
            raise NotLocal(f"{self.name} answered {type(answer).__name__}")
        self._use_line(Line(answer.name, answer.uid))

    def _take_line(self, pending: Pending) -> None:
        """The other side has said whether there is one; in the thread that received that."""
        try:
            answer, _ = pending.result()
            if not isinstance(answer, LineAddress):
                raise NotLocal(f"answered by {type(answer).__name__}")
            line = Line(answer.name, answer.uid)
        except NotConfirmed:
            return  # with the next connection it is asked again
        except CometError as error:
            log.debug("no line to %s: %s", self.name, error)
            self._line_request = None
            return
        self._use_line(line)

    def _use_line(self, line: Line) -> None:
        """Unless another thread was first: what was sent by a line is answered there."""
        with self._line_lock:
            if self._line is not None or self._closed:
                return
            self._line = line
            self._ring()  # the pump does not listen to it yet

    def _request_by_line(self, line: Line, pending: Pending, head: bytes, payload: Payload) -> bool:
        """False if it has to go by ZeroMQ: too large, or the other side does not keep up, or is
        gone and cannot have read it."""
        packet = frames.join(head, payload)
        if packet is None or self._closed:
            return False
        assert self._pid == os.getpid(), "a channel does not survive a fork"
        pending.line = line
        self._pending[pending.request_id] = pending
        if self._pump is None and self._lock.locked():
            self.start_pump()  # somebody else is waiting in it
        sent = lost = False
        try:
            sent = line.send(packet)
        except OSError:
            lost = True
        if sent:
            return True
        is_ours = self._pending.pop(pending.request_id, None) is not None
        if lost:
            self._lose_line(line)
        pending.line = None
        return not is_ours  # else another thread has found the end of the line, and failed it

    def _lose_line(self, line: Line) -> None:
        with self._line_lock:
            if self._line is line:
                self._line = None
                self._line_asked = False
                if not line.answered:
                    self._line_request = None  # somebody does not want us there
        for pending in list(self._pending.values()):
            if pending.line is line and self._pending.pop(pending.request_id, None) is not None:
                pending.settle(None, (), NotConfirmed(self._lost_text))

    def _receive_by_line(self, line: Line, timeout_s: float, settled: list[Settled]) -> bool:
        """Whether a packet came in time. Raises EOFError when the line has ended."""
        try:
            packet = line.receive(timeout_s)
            if packet is None:
                return False
            head, *payload = frames.split(packet)
        except (OSError, BadRequest) as error:
            log.warning("the line to %s: %s", self.name, error)
            raise EOFError from None
        found = self._match(head, [frames.Part(memoryview(bytes(each))) for each in payload])
        if found is not None:
            settled.append(found)
        return True

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
            line = self._line
            return (*self._descriptors, line.fd) if line else self._descriptors

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
