"""A consumer that stops itself, as by `kill -STOP`, with a commit in its hands. No tests here."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from still import stop_here

from cometmq.client import Consumer
from cometmq.protocol.commands import BeginGroup, CommitOffsets
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel


def stop_at_first_commit(line: Connection) -> None:
    """Everything is decided and only the sending is left when the process stops."""
    ask = Channel.ask
    commands: list[BeginGroup | CommitOffsets] = []

    def stopping(self: Channel, command: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(command, BeginGroup | CommitOffsets):
            commands.append(command)
            if len(commands) == 1:
                line.send(("stops", [each.queue_offset for each in command.offsets]))
                stop_here()
        return ask(self, command, *arguments, **options)

    Channel.ask = stopping  # type: ignore[method-assign]


def start_at_the_end(name_server: str, group: str, topic: str, line: Connection) -> None:
    """Its first command of offsets is the place where the group begins."""
    stop_at_first_commit(line)
    options: dict[str, Any] = {"member": "a", "start": "latest", "auto_commit_ms": 3_600_000}
    with Consumer(name_server, group, topic, **options) as consumer:
        while not (messages := consumer.poll(1)):
            pass
        line.send(("read", messages[0].queue_offset))


def seek(name_server: str, group: str, topic: str, line: Connection) -> None:
    """The first commit is where it wants to go on."""
    stop_at_first_commit(line)
    options: dict[str, Any] = {"member": "z", "auto_commit_ms": 3_600_000}
    with Consumer(name_server, group, topic, **options) as consumer:
        while not consumer.poll(1):
            pass
        try:
            consumer.seek("earliest")
        except CometError as error:
            line.send(("refused", type(error).__name__))
        else:
            line.send(("done", ""))
