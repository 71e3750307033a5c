"""A reference to an actor in another process, that pykka code can tell and ask."""

from __future__ import annotations

from cometmq.protocol.client_timeout import default_timeout_s
from cometmq.protocol.commands import Command
from cometmq.protocol.wire.channel import Channel, Payload
from cometmq.protocol.wire.uninterrupted import uninterrupted_class


@uninterrupted_class()
class RemoteRef:
    """An actor in another process, addressed as a pykka ActorRef is."""

    def __init__(self, endpoint: str, name: str = "") -> None:
        self._channel = Channel(endpoint, name)

    def tell(self, command: Command, payload: Payload = ()) -> None:
        self._channel.tell(command, payload)

    def ask(
        self, command: Command, payload: Payload = (), *, timeout: float | None = None
    ) -> Command:
        """Return the answer; raises the error that was answered, or NotConfirmed.

        Args:
            timeout: seconds; None: the environment variable COMETMQ_CLIENT_TIMEOUT, else 3.
        """
        timeout_s = default_timeout_s() if timeout is None else timeout
        return self._channel.ask(command, payload, timeout_s=timeout_s)[0]

    def stop(self) -> None:
        """Close the channel; the actor itself goes on."""
        self._channel.close(by_client=True)
