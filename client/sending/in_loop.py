"""Sends of an event loop: what its tasks send in one turn leaves together, and answers come home by
one call of the loop's a batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.outgoing import Outgoing, Target
from cometmq.client.sending.overdue import Overdue
from cometmq.client.sending.receipt import Batch, Receipt
from cometmq.client.sending.sender import Held, Sender
from cometmq.protocol.errors import CometError, again
from cometmq.protocol.wire.channel import Channel, lend_line, line_to_lend, read_line
from cometmq.protocol.wire.line import Line

COMPRESS_BYTES: Final = 65_536  # of a body that is not compressed in the event loop's thread


class _One:
    """A task that waits for the receipt of its message."""

    __slots__ = ("future", "index")

    def __init__(self, future: asyncio.Future[Receipt], index: int) -> None:
        self.future, self.index = future, index

    def stored(self, batch: Batch) -> None:
        error = batch.error_of(self.index)
        if error is not None:  # the error of its part of the batch
            self.failed(error)
        elif not self.future.done():  # else it was cancelled
            self.future.set_result(Receipt(batch, self.index))

    def failed(self, error: CometError) -> None:
        if not self.future.done():
            self.future.set_exception(again(error))


class LoopLines:
    """Has an event loop read the lines of channels, so that no other thread has to wake up before
    its tasks go on. Where the loop is held up, or over, the channels' own threads read them."""

    def __init__(self) -> None:
        self._heard: WeakKeyDictionary[Channel, tuple[Line, asyncio.AbstractEventLoop]]
        self._heard = WeakKeyDictionary()

    def hear(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, if it has a line by now."""
        line = line_to_lend(channel)
        if line is None or self._heard.get(channel) == (line, loop):
            return
        self._heard[channel] = line, loop
        try:
            loop.add_reader(line.fd, _read, loop, channel, line)
        except NotImplementedError:
            return  # it watches no descriptors
        lend_line(channel, line)


# Of loops that read a line now: what has come home by it. Each loop uses its own alone.
_arrived: Final[dict[asyncio.AbstractEventLoop, list[tuple[Callable[..., object], Any]]]] = {}


def _read(loop: asyncio.AbstractEventLoop, channel: Channel, line: Line) -> None:
    """A callback of the loop, and no task: so what has come home may be called here, which spares
    the loop a turn. It is one answer as a rule; if it fails, the others do not."""
    arrived = _arrived[loop] = []
    try:
        if not read_line(channel, line):
            loop.remove_reader(line.fd)
    finally:
        del _arrived[loop]
        for action, arguments in arrived[1:]:
            loop.call_soon(action, *arguments)
    if arrived:
        action, arguments = arrived[0]
        action(*arguments)


def call_home(
    loop: asyncio.AbstractEventLoop, action: Callable[..., object], *arguments: object
) -> None:
    """Have the loop call it, from whatever thread; nothing if the loop is closed."""
    try:
        if asyncio.get_running_loop() is loop:
            arrived = _arrived.get(loop)
            if arrived is None:
                loop.call_soon(action, *arguments)
            else:
                arrived.append((action, arguments))
            return
    except RuntimeError:
        pass  # another thread
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(action, *arguments)


class RunningLoop:
    """Remembers the running event loop: `asyncio.get_running_loop` costs a system call in Python
    3.11, and a send has several uses for it."""

    def __init__(self) -> None:
        self._last: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        last = self._last
        if last is None or not last.is_running():
            last = self._last = asyncio.get_running_loop()
        return last


class LoopSends:
    """Of one producer. Used in its event loop alone."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._running = RunningLoop()
        self._lines = LoopLines()
        self._overdue = Overdue(_late)
        self._held: Held = {}  # what leaves at the end of this turn
        # In whose turn that is; it may be closed before it comes to that, and nobody tells.
        self._due_in: asyncio.AbstractEventLoop | None = None

    def is_long(self, message: Outgoing) -> bool:
        """Whether it takes long to compress its body."""
        body = message.body
        return (
            self._sender.compresses
            and message.sys_flag is None
            and isinstance(body, (bytes, bytearray, memoryview))
            and len(body) >= COMPRESS_BYTES
        )

    def known(self, target: Target, message: Outgoing) -> TopicLanes | None:
        """Return the lanes of its topic; None if something may block before it is sent."""
        if not self._sender.has_room or self.is_long(message):
            return None
        return self._sender.known(target)

    def send(
        self, target: Target, message: Outgoing, lanes: TopicLanes | None
    ) -> asyncio.Future[Receipt]:
        """Its receipt, once it is stored. Raises as `Sender.gather` does.

        Args:
            lanes: of the target, if they are known.
        """
        loop = self._running.loop
        future: asyncio.Future[Receipt] = loop.create_future()

        def watch(batch: Batch, index: int) -> None:
            _wait(loop, self._overdue, batch, _One(future, index))

        if self._sender.lingers:
            self._sender.gather(target, message, watch, lanes=lanes)
            return future
        if self._due_in is not loop:
            self._due_in = loop
            loop.call_soon(self._let_go)
        self._sender.gather(target, message, watch, held=self._held, lanes=lanes)
        return future

    def _let_go(self) -> None:
        """As far as queues are idle; what is left leaves when one is."""
        self._due_in = None
        held, self._held = self._held, {}
        delivery = self._sender.delivery
        touched: list[Lane] = []
        with delivery.lock:
            for batch, (lanes, lane) in held.items():
                if batch.encoder is not None:  # it is still open
                    touched += delivery.accumulator.close_if_idle(batch, lanes, lane)
            flights = delivery.collect(touched)
        delivery.launch(flights)
        for flight in flights:
            if flight.pending is not None and isinstance(flight.pending.channel, Channel):
                self._lines.hear(flight.pending.channel, asyncio.get_running_loop())


def _wait(
    loop: asyncio.AbstractEventLoop, overdue: Overdue[Batch], batch: Batch, watching: _One
) -> None:
    """Under the producer's lock."""
    if batch.waiters is not None and batch.loop is loop:
        batch.waiters.append(watching)
        return
    # Or tasks of a loop wait for it that was closed since: they never go on.
    batch.waiters, batch.loop = [watching], loop
    batch.on_settled.append(partial(_come_home, loop, overdue))
    overdue.add(loop, batch)


def _come_home(loop: asyncio.AbstractEventLoop, overdue: Overdue[Batch], batch: Batch) -> None:
    """In the thread that heard the answer."""
    call_home(loop, _resolve, overdue, batch)


def _late(batch: Batch) -> None:
    for watching in _take(batch):
        watching.failed(batch.overdue())


def _resolve(overdue: Overdue[Batch], batch: Batch) -> None:
    overdue.discard(batch)
    for watching in _take(batch):
        if batch.error is not None:
            watching.failed(batch.error)
        else:
            watching.stored(batch)


def _take(batch: Batch) -> Sequence[_One]:
    waiters, batch.waiters = batch.waiters, None
    return waiters or ()
