"""Commands of clients that a process of this broker carries out which has no port of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

from cometmq.actors.runtime.held import NEVER, HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import CometError, NotConfirmed, ServiceNotAvailable
from cometmq.protocol.wire.channel import Channel, Pending

TIMEOUT_S: Final = 60.0


class Relay(TimedRequests[Request, HeldRequest[Request]]):
    """Passes commands on, and the answers back.

    Args:
        endpoint: where that process takes them; empty: there is none.
        name: what error texts call it.
        limit: requests that wait for it.
    """

    def __init__(self, actor: ServiceActor, endpoint: str, name: str, limit: int) -> None:
        super().__init__(actor, f"commands for {name}", limit, self._too_late)
        self._name = name
        self._channel = Channel(endpoint, name) if endpoint else None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def expect(self, request: Request, timeout_s: float = TIMEOUT_S) -> None:
        """From now on it waits for an answer, and is answered in any case: by `hand_back`, `fail`
        or when time is up. Raises SystemBusy, ServiceNotAvailable."""
        self._there()
        self.add(HeldRequest(request, request, time.monotonic() + timeout_s))

    def _there(self) -> Channel:
        if self._channel is None:
            raise ServiceNotAvailable(f"this coordinator has no {self._name.removeprefix('the ')}")
        return self._channel

    def pass_on(self, request: Request, timeout_s: float = TIMEOUT_S) -> None:
        """Answer a request as that process answers its command. Raises what `expect` raises."""
        self.expect(request, NEVER)  # the channel ends it
        self.ask(request.command, partial(self.hand_back, request), timeout_s)

    def ask(
        self, command: Command, on_done: Callable[[Pending], None], timeout_s: float = TIMEOUT_S
    ) -> None:
        """Send a command; `on_done` is called in the actor's thread. Raises ServiceNotAvailable."""
        self._there().request(
            command,
            on_done=lambda done: self._actor.call_soon(partial(on_done, done)),
            timeout_s=timeout_s,
        )

    def tell(self, command: Command) -> None:
        """The same, where no answer is waited for; it is dropped if nobody is there for 3 s."""
        if self._channel is not None:
            self._channel.start_pump()  # what is answered has to be received
            self._channel.tell(command)

    def hand_back(self, request: Request, done: Pending) -> None:
        """What that process answered, to the client that asked us."""
        if done.error is not None:
            self.fail(request, done.error)
        elif done.answer is not None:
            for held in self.release_key(request):
                held.request.reply(done.answer, [frame.buffer for frame in done.payload])

    def fail(self, request: Request, error: CometError) -> None:
        for held in self.release_key(request):
            held.request.fail(error)

    def _too_late(self, _held: HeldRequest[Request]) -> NoReturn:
        raise NotConfirmed(f"no answer from {self._name} within {TIMEOUT_S:g} s")
