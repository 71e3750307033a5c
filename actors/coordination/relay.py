"""What clients want of the cleaner, by way of the coordinator: the cleaner has no port."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import Command, DeleteSegments
from cometmq.protocol.errors import CometError, NotConfirmed, ServiceNotAvailable, SystemBusy
from cometmq.protocol.wire.channel import Channel, Pending

RELAYED_MAX: Final = 64  # requests that wait for the cleaner
RELAY_TIMEOUT_S: Final = 60


class Relay:
    """Passes commands on, and the answers back.

    Args:
        endpoint: where the cleaner takes them; empty: there is none.
        when_saved: calls something once the small state is in its files.
    """

    def __init__(
        self, actor: ServiceActor, endpoint: str, when_saved: Callable[[Callable[[], None]], None]
    ) -> None:
        self._actor = actor
        self._when_saved = when_saved
        self._cleaner = Channel(endpoint, "the cleaner") if endpoint else None
        self._relayed: dict[Request, Timer] = {}

    def close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.close()

    def expect(self, request: Request) -> None:
        """From now on it waits for the cleaner, and is answered in any case: by `hand_back`, `fail`
        or when time is up. Raises SystemBusy, ServiceNotAvailable."""
        if self._cleaner is None:
            raise ServiceNotAvailable("no cleaner belongs to this coordinator")
        if len(self._relayed) >= RELAYED_MAX:
            raise SystemBusy(f"{RELAYED_MAX} commands wait for the cleaner already")
        late = NotConfirmed(f"no answer from the cleaner within {RELAY_TIMEOUT_S} s")
        timer = self._actor.after(RELAY_TIMEOUT_S, partial(self.fail, request, late))
        self._relayed[request] = timer

    def ask(self, command: Command, on_done: Callable[[Pending], None]) -> None:
        """Say something to the cleaner; `on_done` is called in the actor's thread."""
        if self._cleaner is not None:
            self._cleaner.request(
                command, on_done=lambda done: self._actor.call_soon(partial(on_done, done))
            )

    def tell(self, command: Command) -> None:
        """The same, where no answer is waited for; it is dropped if nobody is there for 3 s."""
        if self._cleaner is not None:
            self._cleaner.start_pump()  # what is answered has to be received
            self._cleaner.tell(command)

    def hand_back(self, request: Request, done: Pending) -> None:
        """What the cleaner answered, to whoever asked us."""
        if done.error is not None:
            self.fail(request, done.error)
        elif done.answer is not None and self._is_waiting(request):
            request.reply(done.answer)

    def fail(self, request: Request, error: CometError) -> None:
        if self._is_waiting(request):
            request.fail(error)

    def _is_waiting(self, request: Request) -> bool:
        """And not any more: it is answered now. False: too late."""
        timer = self._relayed.pop(request, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def on_delete_segments(self, command: DeleteSegments, request: Request) -> None:
        """The cleaner keeps what of the ledger is in no file yet: that is not to be in the way."""
        self.expect(request)
        self._when_saved(partial(self.ask, command, partial(self.hand_back, request)))
