"""A reference to an actor in another process, that pykka code can tell and ask."""

from __future__ import annotations

from cometmq.protocol.commands import Command
from cometmq.protocol.wire.channel import Channel, Payload


class RemoteRef:
    """An actor in another process, addressed as a pykka ActorRef is."""

    def __init__(self, endpoint: str, name: str = "") -> None:
        self._channel = Channel(endpoint, name)

    def tell(self, command: Command, payload: Payload = ()) -> None:
        self._channel.tell(command, payload)

    def ask(self, command: Command, payload: Payload = (), *, timeout: float = 3.0) -> Command:
        """The answer; raises the error that was answered, or NotConfirmed."""
        return self._channel.ask(command, payload, timeout_s=timeout)[0]

    def stop(self) -> None:
        """Close the channel; the actor itself goes on."""
        self._channel.close()
