"""Runs of pop consumers: threads, or asyncio tasks, call the handler."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from cometmq.client.handling.async_run import AsyncRun
from cometmq.client.handling.options import Handling
from cometmq.client.handling.run import Run
from cometmq.client.handling.settlement import Settlement
from cometmq.client.handling.stuck import Watch
from cometmq.client.popping.broker import may_help
from cometmq.client.popping.settlement import POLL_S, Popping, PopSettlement
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel.codec import Message


class PopRun(Run):
    """Run of a pop consumer."""

    def __init__(self, consumer: Popping, handling: Handling, *, orderly: bool) -> None:
        super().__init__("cometmq pop", handling)
        self._consumer = consumer
        self._orderly = orderly
        self._watch = Watch(handling.stuck_s)
        self._pops = PopSettlement(
            consumer, handling, ahead=True, orderly=orderly, wake=self._woken.set
        )

    @property
    def _settlement(self) -> Settlement:
        return self._pops

    def _turn(self) -> None:
        if self._consumer.is_closed:
            self._ends = True
            return
        self._watch.look(self._seats)
        self._pool.hurry()
        self._pops.release_late()
        self._woken.clear()
        if self._ends:  # the wake that was cleared may have been its own
            return
        mean_s = self._pool.mean_s
        count = self._pops.wanted(mean_s, 0)
        if not count:
            self._woken.wait(self._pops.late_in_s())
            return
        try:
            messages = self._consumer.poll(
                count, POLL_S if self._orderly else self._pops.late_in_s()
            )
        except CometError as error:
            if not may_help(error):
                raise
            return  # nobody has been there for long: a run waits until somebody is
        for work in self._pops.works_of(messages, mean_s):
            self._pool.put(work)

    def _finish(self, left_s: float) -> None:
        self._pops.finish(left_s)


class AsyncPopRun(AsyncRun):
    """Run of an asyncio pop consumer.

    Args:
        poll: the consumer's, in a thread; a cancelled one releases its messages.
        in_thread: calls a function in a thread of the consumer.
    """

    def __init__(
        self,
        consumer: Popping,
        poll: Callable[[int, float], Coroutine[Any, Any, list[Message]]],
        in_thread: Callable[..., Coroutine[Any, Any, Any]],
        handling: Handling,
        *,
        orderly: bool,
    ) -> None:
        super().__init__(handling)
        self._poll = poll
        self._call_in_thread = in_thread
        self._consumer = consumer
        self._watch = Watch(handling.stuck_s)
        self._pops = PopSettlement(
            consumer, handling, ahead=False, orderly=orderly, wake=self._wake
        )

    @property
    def _settlement(self) -> Settlement:
        return self._pops

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await self._call_in_thread(call, *arguments)

    async def _turn(self) -> None:
        if self._consumer.is_closed:
            self._ends = True
            return
        self._watch.look(self._seats)
        if not self._pops.late_in_s():
            await self._in_thread(self._pops.release_late)
        self._woken.clear()
        if self._ends:  # the wake that was cleared may have been its own
            return
        mean_s = self._pool.mean_s
        count = self._pops.wanted(mean_s, sum(seat.unit is None for seat in self._seats))
        if not count:
            await self._sleep(self._pops.late_in_s())
            return
        try:
            messages = await self._poll(count, POLL_S)
        except CometError as error:
            if not may_help(error):
                raise
            return  # nobody has been there for long: a run waits until somebody is
        for work in self._pops.works_of(messages, mean_s):
            self._pool.put(work)

    def _finish(self, left_s: float) -> None:
        self._pops.finish(left_s)
