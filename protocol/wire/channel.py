"""A channel: requests from a client to one process, or from one actor to another, and answers.

It is a DEALER socket that asks and is answered. Threads may share it. As long as one thread at a
time uses it, that thread itself sends, waits and receives, so that a single request costs no
hand-over between threads. When a second thread arrives, or somebody wants answers without waiting
for them, a pump thread takes over the receiving and stays.

- While nobody is connected, requests wait in the *outbox*, and not in ZeroMQ (`outbox.py`): one
  that is given up before there was a connection is never sent, and fails with NotReachable.
- When a connection breaks, every request that it had and that is unanswered fails with
  NotConfirmed, and the socket is replaced (`dealer.py`), so that nothing is sent later behind the
  back of whoever retries.
- On the machine of the other side a channel may ask for a *local connection*, and then sends its
  requests by it (`shortcut.py`). The DEALER stays for when that ends.
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

from cometmq.protocol import frames
from cometmq.protocol.client_timeout import default_timeout_s
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import (
    ClientClosed,
    ClosedUnconfirmed,
    CometError,
    NotConfirmed,
    NotLocal,
    NotReachable,
)
from cometmq.protocol.frames import Frame
from cometmq.protocol.wire.dealer import POLLIN, Dealer, Payload
from cometmq.protocol.wire.descriptors import need_for_channel
from cometmq.protocol.wire.line import Line
from cometmq.protocol.wire.outbox import Outbox
from cometmq.protocol.wire.pending import (
    Limit,
    Pending,
    PendingRequests,
    Settled,
    settle_all,
)
from cometmq.protocol.wire.polling import poll_ms, polled, wait_readable
from cometmq.protocol.wire.shortcut import Shortcut, lost_text
from cometmq.protocol.wire.steady import Steady

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 0.05  # how long a request waits at once for a connection that is being made
SLICE_S: Final = 0.05  # how long a caller sleeps in the socket before it looks up
CLOSE_S: Final = 5.0  # how long the pump may take to end
LENT_S: Final = 0.1  # what an event loop has not read by then the pump reads


class Channel:
    """A DEALER to one endpoint.

    Who receives, always under the lock: the pump, once there is one (or once `start_pump` wants
    it); else the thread that waits for an answer; or the thread in `wait_any`, if its owner asks
    without a pump. Beside the pump an event loop may read the line (`lend_line`). Requests are
    settled after the lock is released.

    Args:
        endpoint: ZeroMQ address of the process, such as "tcp://127.0.0.1:9877".
        name: what error texts call the other side.
        line_request: the command that asks for a line; None: there is to be none.

    Raises NotReachable for an address that ZeroMQ does not know what to do with, TooFewDescriptors.
    """

    def __init__(
        self, endpoint: str, name: str = "", *, line_request: Command | None = None
    ) -> None:
        self.endpoint = endpoint
        self.name = name or endpoint
        self._lock = threading.Lock()  # guards the sockets
        self._ids = itertools.count(1)
        self._requests = PendingRequests()
        need_for_channel(self.name)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pump: Steady | None = None
        self._wants_pump = False
        self._lent: Line | None = None  # an event loop reads it
        self._is_idle = False  # the pump looks after nothing that was lent
        self._closed = self._by_client = False
        self._pid = os.getpid()
        self._shortcut = Shortcut(self.name, line_request, self._requests, self._ring)
        self._dealer = Dealer(endpoint)
        self._outbox = Outbox(self._dealer, self._requests)

    # --- asking ---

    def request(
        self,
        command: Command,
        payload: Payload = (),
        on_done: Callable[[Pending], None] | None = None,
        *,
        pump: bool = True,
        timeout_s: float | None = None,
        connect_s: float | None = None,
    ) -> Pending:
        """Send; the answer arrives in the returned Pending. `on_done` wants the pump to run.

        With `timeout_s` the pump or `wait_any` settles it by then in any case: without an answer,
        with the errors of `ask`. Every request that the other side holds for a while needs it:
        nothing else notices a lost answer if the connection is not lost.

        `on_done` is called in whatever thread receives the answer and must not block. Without
        `pump` that is the thread that calls `wait_any`.
        """
        limit = Limit.of(command, timeout_s, connect_s)
        pending = Pending(self, next(self._ids), on_done, limit)
        if on_done is not None and pump:
            self.start_pump()
        head = frames.pack(pending.request_id, command)
        line = self._shortcut.line
        if line is not None:
            if self._send_by_line(line, pending, head, payload):
                if self._requests.watch(pending) or self._is_idle or line.unsent_fd is not None:
                    self._ring()
                return pending
        else:
            asks_for_line = self._shortcut.to_ask()
            if asks_for_line is not None:
                self.request(asks_for_line, on_done=self._shortcut.take, pump=False)
        if self._pump is None:
            self._notice_loss()
        self._requests.add(pending)
        self._send(pending.request_id, head, payload, pending)
        if self._requests.watch(pending):
            self._ring()
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
            self.forget(pending)
        return pending.done

    def forget(self, pending: Pending) -> bool:
        """The answer is not wanted any more. True: it was never handed to a connection, nor will
        be; False: the other side may have it."""
        self._requests.take(pending.request_id)
        if self._outbox.drop(pending.request_id):
            pending.never_sent = True
        return pending.never_sent

    def ask(
        self,
        command: Command,
        payload: Payload = (),
        *,
        timeout_s: float | None = None,
        connect_s: float | None = None,
    ) -> tuple[Command, Sequence[Frame]]:
        """Send and wait. Raises the answered error, NotConfirmed when no answer comes, or
        NotReachable when nobody was there to send it to.

        Args:
            timeout_s: time limit of the answer; None: see `default_timeout_s`.
            connect_s: how much of the time may pass until somebody is there; None: all of it.
        """
        if timeout_s is None:
            timeout_s = default_timeout_s()
        pending = self.request(command, payload)
        if connect_s is not None and connect_s < timeout_s:
            if self.wait(pending, connect_s, keep=True):
                return pending.result()
            if pending.request_id in self._outbox:
                raise self.give_up(pending, type(command).__name__, connect_s)
            timeout_s -= connect_s
        if not self.wait(pending, timeout_s):
            raise self.give_up(pending, type(command).__name__, timeout_s)
        return pending.result()

    def give_up(self, pending: Pending, what: str, timeout_s: float) -> CometError:
        """Forget it; the error that says what may have become of it."""
        if self.forget(pending):
            return NotReachable(
                f"no connection to {self.name} within {timeout_s:g} s; {what} was not sent"
            )
        return NotConfirmed(f"no answer to {what} from {self.name} within {timeout_s:g} s")

    def tell(self, command: Command, payload: Payload = ()) -> None:
        """Send; an answer, if one comes, is dropped. So is this, without a connection for 3 s."""
        request_id = next(self._ids)
        if not self._send(request_id, frames.pack(request_id, command), payload, None):
            self.start_pump()  # nobody else will send it

    # --- life ---

    def start_pump(self) -> None:
        """From now on a thread of the channel's own receives."""
        if self._pump is not None or self._closed:
            return
        self._wants_pump = True
        self._ring()  # whoever is polling lets go of the lock
        with self._lock:
            if self._pump is None and not self._closed:
                pump = Steady(f"cometmq {self.name}", self._run_pump)
                pump.start()
                self._pump = pump

    def open_line(self, timeout_s: float) -> None:
        """Have a line from the start. Raises NotLocal, or what `ask` raises."""
        self._shortcut.to_ask()  # nobody else needs to
        command = self._shortcut.command
        if command is None:
            raise NotLocal(f"{self.name} has no line for this process")
        self._shortcut.use(self.ask(command, timeout_s=timeout_s)[0])

    def close(self, *, by_client: bool = False) -> None:
        """Unanswered requests fail: with NotConfirmed, or NotReachable if they were not sent.

        May be called twice.

        Args:
            by_client: the client is closed: they fail with ClosedUnconfirmed or ClientClosed.
        """
        if self._closed:
            return
        self._by_client = by_client
        self._closed = True
        self._ring()
        self._shortcut.close()
        if self._pump is None or self._pump.join(CLOSE_S):
            with self._lock:
                self._dealer.close()
                os.close(self._wake)
        else:  # it still holds them
            log.error("the thread that receives from %s does not end", self.name)
        for pending in self._requests.take_all(lambda _: True):
            was_kept = self._outbox.drop(pending.request_id)
            pending.settle(None, (), self._closed_error(was_sent=not was_kept))

    def _closed_error(self, *, was_sent: bool) -> CometError:
        if was_sent:
            unanswered = ClosedUnconfirmed if self._by_client else NotConfirmed
            return unanswered(
                f"closed before {self.name} answered; it may have carried out the request"
            )
        unsent = ClientClosed if self._by_client else NotReachable
        return unsent(f"closed before the request was sent to {self.name}")

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- sending ---

    def _send(
        self, request_id: int, head: bytes, payload: Payload, pending: Pending | None
    ) -> bool:
        """Hand it to the connection; False: it is kept until there is one."""
        if self._closed:
            self._requests.take(request_id)
            raise self._closed_error(was_sent=False)
        assert self._pid == os.getpid(), "a channel does not survive a fork"
        if not self._lock.acquire(blocking=False):
            self.start_pump()  # somebody else is waiting in it
            self._lock.acquire()
        try:
            is_first = not self._outbox
            sent = self._outbox.send(request_id, head, payload, pending)
            if not sent:
                if self._pump is not None:
                    self._ring()  # it sees to the connection
                elif is_first and pending is not None and self._dealer.is_connecting:
                    self._dealer.wait_connected(HANDSHAKE_S)  # nobody else may look after it
                self._outbox.send_waiting()
                sent = request_id not in self._outbox
            # Sending may swallow the edge that says "something to read": pass it on.
            if self._pump is not None and self._dealer.is_readable:
                self._ring()
        finally:
            self._lock.release()
        return sent

    def _send_by_line(self, line: Line, pending: Pending, head: bytes, payload: Payload) -> bool:
        """False if it has to go by ZeroMQ."""
        if self._closed:
            return False
        assert self._pid == os.getpid(), "a channel does not survive a fork"
        if self._pump is None and self._lock.locked():
            self.start_pump()  # somebody else is waiting in it
        return self._shortcut.send(line, pending, head, payload)

    # --- receiving, in the thread that waits ---

    def _receive_here(self, wanted: Pending, timeout_s: float) -> None:
        """Sleep in the socket itself, which is the shortest way from the answer to the asker.

        In slices: another thread that comes, and a connection that breaks, are noticed in between.
        """
        settled: list[Settled] = []
        line = wanted.line
        with self._lock:
            if self._closed or wanted.done or self._wants_pump:
                return
            try:
                if line is not None:
                    self._receive_by_line(line, min(timeout_s, SLICE_S), settled)
                    line = None
                else:
                    self._receive_by_dealer(min(timeout_s, SLICE_S), settled)
            except EOFError:
                pass  # the line's
        settle_all(settled)
        if line is not None:
            self._shortcut.lose(line)

    def _receive_by_line(self, line: Line, timeout_s: float, settled: list[Settled]) -> None:
        """Sleep until something comes; meanwhile requests leave that it did not take at once."""
        unsent_fd = line.unsent_fd
        if unsent_fd is not None:
            wait_readable(polled((line.fd, unsent_fd)), timeout_s)
            line.flush()
            timeout_s = 0
        self._shortcut.receive(line, timeout_s, settled)

    def _receive_by_dealer(self, timeout_s: float, settled: list[Settled]) -> None:
        """Sleep until a message, or a connection that is waited for, comes."""
        if self._outbox:
            self._dealer.wait_connected(timeout_s)
            self._reopen_if_lost(settled)
            self._outbox.send_waiting()
            self._receive_all(settled)
            return
        message = self._dealer.receive(timeout_s)
        if message is None:
            self._reopen_if_lost(settled)
        else:
            self._requests.match(message[0].buffer, message[1:], settled)

    # --- receiving, in the pump or in `wait_any` ---

    def _run_pump(self) -> bool:
        # The descriptors stay valid: only this thread replaces the sockets from now on.
        line = self._shortcut.line
        waiting = self.descriptors()
        if waiting and line is not None and line is self._lent:
            timeout_s = self.look_in_s
            self._is_idle = True  # first: a request that comes from now on rings
            if self._requests:  # the loop may be held up, or over
                self._is_idle = False
                timeout_s = LENT_S if timeout_s is None else min(timeout_s, LENT_S)
            wait_readable(polled(fd for fd in waiting if fd != line.fd), timeout_s)
            self._is_idle = False
        elif waiting:
            poll = polled(waiting)
            readable = wait_readable(poll, self.look_in_s)
            while line is not None and readable == [line.fd] and line is self._shortcut.line:
                if self._outbox or self._requests.has_overdue:
                    break  # it has to be looked after
                self._pump_once(line)
                readable = wait_readable(poll, self.look_in_s)
        if not self._closed:
            self._pump_once()
        return not self._closed

    def _pump_once(self, line_alone: Line | None = None) -> None:
        """Settle whatever has been answered, without waiting.

        Args:
            line_alone: nothing else has moved since everything was looked at.
        """
        settled: list[Settled] = []
        ended = None
        with self._lock:
            if self._closed:
                return
            if line_alone is not None:
                ended = self._shortcut.receive_all(line_alone, settled)
            else:
                line = self._shortcut.line
                polled: list[tuple[Any, int]] = [*self._dealer.poll_list, (self._wake, POLLIN)]
                if line is not None:
                    line.flush()
                    polled.append((line.fd, POLLIN))
                readable = [source for source, _ in zmq.zmq_poll(polled, 0)]
                if line is not None and line.fd in readable:
                    ended = self._shortcut.receive_all(line, settled)
                if self._wake in readable:
                    os.eventfd_read(self._wake)
                if self._dealer.socket in readable:
                    self._receive_all(settled)
                if self._dealer.may_be_lost(readable):
                    self._reopen_if_lost(settled)
                if self._outbox:
                    self._dealer.retry_if_due()
                    self._outbox.send_waiting()
        settle_all(settled)
        if ended is not None:
            self._shortcut.lose(ended)
        self._requests.give_up_overdue()

    def descriptors(self) -> tuple[int, ...]:
        """What to sleep on until something comes; empty when there is something to do already.

        They are good until the next call that receives, and only while nobody else receives.
        """
        with self._lock:
            if self._closed or self._dealer.is_readable:
                return ()
            if self._outbox and self._dealer.is_connected:
                return ()
            line = self._shortcut.line
            fds = (*self._dealer.descriptors, self._wake)
            if line is None:
                return fds
            unsent_fd = line.unsent_fd
            return (*fds, line.fd) if unsent_fd is None else (*fds, line.fd, unsent_fd)

    @property
    def look_in_s(self) -> float | None:
        """Seconds until connection and time limits have to be checked; None: not at all."""
        return self._requests.look_in_s(self._dealer.retry_in_s if self._outbox else None)

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- what came, and what was lost; under the lock ---

    def _receive_all(self, settled: list[Settled]) -> None:
        while (message := self._dealer.receive_nowait()) is not None:
            self._requests.match(message[0].buffer, message[1:], settled)
            if not self._dealer.is_readable:
                return

    def _notice_loss(self) -> None:
        """See a break of the connection that nobody was waiting in, before something is sent on it.

        Else the next request would be taken for lost although the new connection carries it.
        """
        if not self._lock.acquire(blocking=False):
            return  # somebody is waiting in it
        settled: list[Settled] = []
        try:
            if not self._closed:
                self._reopen_if_lost(settled)
        finally:
            self._lock.release()
        settle_all(settled)

    def _reopen_if_lost(self, settled: list[Settled]) -> None:
        """What the connection had is not answered any more; what goes by a line, or was not sent
        yet, is not concerned."""
        if not self._dealer.was_lost():
            return
        self._receive_all(settled)  # what was answered before the end
        self._shortcut.connection_was_lost()
        self._dealer.reopen()
        for pending in self._requests.take_all(lambda each: each.handed_over):
            settled.append((pending, None, (), NotConfirmed(lost_text(self.name))))


def wait_any(channels: Iterable[Channel], timeout_s: float, wake_fd: int) -> None:
    """Receive, in the calling thread, what comes first on any of the channels.

    Returns when something came, when `wake_fd` can be read (which is left to the caller), or after
    the time. No channel may have a pump: one thread makes all its requests and calls this.
    """
    watched: dict[int, Channel] = {}
    ready: set[Channel] = set()
    retrying: set[Channel] = set()
    for channel in channels:
        descriptors = channel.descriptors()
        if not descriptors:
            ready.add(channel)
            continue
        watched.update(dict.fromkeys(descriptors, channel))
        look_in_s = channel.look_in_s
        if look_in_s is not None:
            retrying.add(channel)
            timeout_s = min(timeout_s, max(look_in_s, 0.001))
    if not ready:
        waiting = [(fd, POLLIN) for fd in (wake_fd, *watched)]
        readable = zmq.zmq_poll(waiting, poll_ms(timeout_s))
        ready.update(watched[fd] for fd, _ in readable if fd != wake_fd)
        ready.update(each for each in retrying if (each.look_in_s or 0.0) <= 0.001)
    for channel in ready:
        channel._pump_once()


def line_to_lend(channel: Channel) -> Line | None:
    """The channel's line, if it has one and a pump."""
    return None if channel._pump is None else channel._shortcut.line


def lend_line(channel: Channel, line: Line) -> None:
    """The caller, which is an event loop, calls `read_line` when it can be read, from now on. The
    pump reads it only when nobody has for a while."""
    channel._lent = line
    channel._ring()


def read_line(channel: Channel, line: Line) -> bool:
    """Settle what has come by a line that was lent; False when it has ended."""
    settled: list[Settled] = []
    with channel._lock:
        ended = channel._shortcut.receive_all(line, settled)
    settle_all(settled)
    if ended is not None:
        channel._shortcut.lose(ended)
    return ended is None


__all__ = ["Channel", "Payload", "Pending", "lend_line", "line_to_lend", "read_line", "wait_any"]
