"""Sends of an event loop: what its tasks send in one turn leaves together, and answers come home by
one call of the loop's a batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from cometmq.client.sending.lanes import Lane
from cometmq.client.sending.outgoing import Alike, Outgoing, Target
from cometmq.client.sending.overdue import Overdue
from cometmq.client.sending.receipt import Batch, Receipt, Watching
from cometmq.client.sending.sender import Held, Sender
from cometmq.protocol.errors import CometError, again
from cometmq.protocol.wire.channel import Channel, lend_line, line_to_lend, read_line
from cometmq.protocol.wire.line import Line
from cometmq.protocol.wire.pending import Asked


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


# Of messages of one kind: whoever waits for those from this index of a batch on, of which the
# first is that one of all; so many.
WatchAlike = Callable[[int, int, int], Watching]


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


class LoopSends:
    """Of one producer. Used in its event loop alone."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lines = LoopLines()
        self._overdue = Overdue(_late)
        self._held: Held = {}  # what leaves at the end of this turn
        self._last: list[Callable[[], None]] = []  # called before, they add to it
        # In whose turn that is; it may be closed before it comes to that, and nobody tells.
        self._due_in: asyncio.AbstractEventLoop | None = None

    @property
    def alike_bytes_max(self) -> int:
        """The largest body of `send_alike`; 0: there is none."""
        return self._sender.alike_bytes_max

    def send(self, target: Target, message: Outgoing) -> asyncio.Future[Receipt]:
        """Its receipt, once it is stored. Raises as `Sender.gather` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()

        def watch(batch: Batch, index: int) -> None:
            _wait(loop, self._overdue, batch, _One(future, index))

        if self._sender.lingers:
            self._sender.gather(target, message, watch)
            return future
        self._see_to_the_end(loop)
        self._sender.gather(target, message, watch, held=self._held)
        return future

    def at_the_end(self, loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
        """Have it called at the end of this turn; it calls `send_alike`."""
        self._last.append(action)
        self._see_to_the_end(loop)

    def send_alike(
        self,
        target: Target,
        alike: Alike,
        watch: WatchAlike,
    ) -> None:
        """Messages that differ in their bodies alone, at the end of a turn. Raises as
        `Sender.gather` does; `alike.next` tells which were sent."""
        loop = asyncio.get_running_loop()
        while alike.next < len(alike.bodies):
            begin = alike.next

            def added(batch: Batch, index: int, begin: int = begin) -> None:
                _wait(loop, self._overdue, batch, watch(index, begin, alike.next - begin))

            self._sender.gather(target, alike, added, held=self._held)

    def _see_to_the_end(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._due_in is not loop:
            self._due_in = loop
            loop.call_soon(self.let_go)

    def hold(self, loop: asyncio.AbstractEventLoop) -> bool:
        """What is sent from now on waits for the caller's `let_go` or `let_go_soon`; False: it
        leaves at the end of this turn."""
        if self._due_in is loop:
            return False
        self._due_in = loop
        return True

    def let_go_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """What was held leaves at the end of this turn."""
        self._due_in = None
        if self._last or self._held:
            self._see_to_the_end(loop)

    def let_go(self) -> None:
        """As far as queues are idle; what is left leaves when one is."""
        self._due_in = None
        if self._last:
            last, self._last = self._last, []
            for action in last:
                action()
        if not self._held:
            return
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
            if flight.pending is not None:
                self.hear(flight.pending.channel)

    def hear(self, channel: Asked) -> None:
        """What was asked in this turn is answered there."""
        if isinstance(channel, Channel):
            self._lines.hear(channel, asyncio.get_running_loop())


def _wait(
    loop: asyncio.AbstractEventLoop, overdue: Overdue[Batch], batch: Batch, watching: Watching
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


def _take(batch: Batch) -> Sequence[Watching]:
    waiters, batch.waiters = batch.waiters, None
    return waiters or ()
