"""Where the processes listen, as the coordinator is told it, which registers the broker."""

from __future__ import annotations

from collections.abc import Callable

from cometmq.protocol.commands import BrokerEndpoints, EndpointsChanged
from cometmq.protocol.wire.channel import Channel


class Telling:
    """The last time counts: an answer that comes later, or of a run that has ended, is dropped.

    Args:
        call_soon: has a call made in the actor's thread.
        on_told: the name servers, or one of them, know it.
    """

    def __init__(
        self, call_soon: Callable[[Callable[[], object]], None], on_told: Callable[[], None]
    ) -> None:
        self._call_soon = call_soon
        self._on_told = on_told
        self._channel: Channel | None = None

    def tell(self, coordinator: str, endpoints: BrokerEndpoints) -> None:
        self.forget()
        channel = self._channel = Channel(coordinator, "coordinator")

        def told() -> None:
            if channel is self._channel:
                self.forget()
                self._on_told()

        channel.request(EndpointsChanged(endpoints), on_done=lambda _pending: self._call_soon(told))

    def forget(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
