"""What clients want of the cleaner, by way of the coordinator: the cleaner has no port."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import Command, DeleteSegments
from cometmq.protocol.errors import NotConfirmed, ServiceNotAvailable, SystemBusy
from cometmq.protocol.wire.channel import Channel, Pending

RELAYED_MAX: Final = 64  # commands that the cleaner has not answered yet
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

    def pass_on(self, command: Command, request: Request) -> None:
        """Have the cleaner answer it."""
        if self._cleaner is None:
            raise ServiceNotAvailable("no cleaner belongs to this coordinator")
        if len(self._relayed) >= RELAYED_MAX:
            raise SystemBusy(f"{RELAYED_MAX} commands wait for the cleaner already")
        timer = self._actor.after(RELAY_TIMEOUT_S, partial(self._hand_back, request))
        self._relayed[request] = timer
        self._cleaner.request(
            command,
            on_done=lambda done: self._actor.call_soon(partial(self._hand_back, request, done)),
        )

    def on_delete_segments(self, command: DeleteSegments, request: Request) -> None:
        """The cleaner keeps what of the ledger is in no file yet: that is not to be in the way."""

        def go_on() -> None:
            self._actor.carry_out(request, partial(self.pass_on, command, request))

        self._when_saved(go_on)

    on_place_hold = on_drop_hold = on_list_holds = pass_on

    def _hand_back(self, request: Request, done: Pending | None = None) -> None:
        """What the cleaner answered, to whoever asked us; None: it has not, in time."""
        timer = self._relayed.pop(request, None)
        if timer is None:
            return  # too late
        timer.cancel()
        if done is None:
            request.fail(NotConfirmed(f"no answer from the cleaner within {RELAY_TIMEOUT_S} s"))
        elif done.answer is not None:
            request.reply(done.answer)
        elif done.error is not None:
            request.fail(done.error)
