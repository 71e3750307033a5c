"""Sends of an event loop: what its tasks send in one turn leaves together, and answers come home by
one `call_soon_threadsafe` a batch."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from cometmq.client.sending.lanes import Lane
from cometmq.client.sending.outgoing import Outgoing, Target
from cometmq.client.sending.receipt import Batch, Receipt
from cometmq.client.sending.sender import Held, Sender
from cometmq.protocol.errors import again


class LoopSends:
    """Of one producer. Used in its event loop alone."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._held: Held = {}  # what leaves at the end of this turn

    def send(self, target: Target, message: Outgoing) -> asyncio.Future[Receipt]:
        """Its receipt, once it is stored. Raises as `Sender.gather` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()

        def watch(batch: Batch, index: int) -> None:
            entry = (future, Receipt(batch, index))
            if batch.waiters is None:
                batch.waiters = [entry]
                batch.on_settled.append(partial(_come_home, loop))
                _set_alarm(loop, batch)
            else:
                batch.waiters.append(entry)

        if self._sender.lingers:
            self._sender.gather(target, message, watch)
            return future
        if not self._held:
            loop.call_soon(self._let_go)
        self._sender.gather(target, message, watch, held=self._held)
        return future

    def _let_go(self) -> None:
        """As far as queues are idle; what is left leaves when one is."""
        held, self._held = self._held, {}
        delivery = self._sender.delivery
        touched: list[Lane] = []
        with delivery.lock:
            for batch, (lanes, lane) in held.items():
                if batch.encoder is not None:  # it is still open
                    touched += delivery.accumulator.close_if_idle(batch, lanes, lane)
            flights = delivery.collect(touched)
        delivery.launch(flights)


def _come_home(loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
    """In the thread that heard the answer."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, batch)


def _set_alarm(loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
    left_s = batch.limit - time.monotonic()
    batch.alarm = loop.call_later(max(0.0, left_s), _overdue, loop, batch)


def _overdue(loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
    """Its time may be up; it has more when it left later than was to be expected."""
    if batch.limit > time.monotonic():
        _set_alarm(loop, batch)
        return
    waiters, batch.waiters = batch.waiters, None
    for future, _ in waiters or ():
        if not future.done():
            future.set_exception(batch.overdue())


def _resolve(batch: Batch) -> None:
    if batch.alarm is not None:
        batch.alarm.cancel()
        batch.alarm = None  # it knows the batch
    waiters, batch.waiters = batch.waiters, None
    for future, receipt in waiters or ():
        if future.done():  # cancelled
            continue
        if batch.error is not None:
            future.set_exception(again(batch.error))
        else:
            future.set_result(receipt)
