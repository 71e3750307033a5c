"""The main process of an embedded broker, from its beginning, and what it says to the service."""

from __future__ import annotations

import gc
import os
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cometmq.actors.runtime.logs import send_log_to
from cometmq.actors.runtime.service_log import ServiceHandler
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import CometError

if TYPE_CHECKING:
    from cometmq.actors.launch.broker import BrokerActor


class EmbeddedReady(msgspec.Struct, tag="ready"):
    """What an embedding process is told once the broker serves."""

    token: str
    name_server: str
    broker: str
    pid: int


class EmbeddedFailed(msgspec.Struct, tag="failed"):
    code: int
    text: str


def main() -> None:
    """An embedded broker: settings come as one line of JSON on standard input, which then is the
    lifeline; what became of it goes out as one line on standard output.

    The broker is imported here: a service imports this module for what is said alone.

    With the argument `hosted` standard input is the socket of a service that has the writer. With
    `log=N` descriptor N takes the log, for the service's own; see service_log.py.
    """
    gc.disable()  # all that is imported stays: looking for garbage in it finds nothing
    from cometmq.actors.launch.supervisor import run_broker

    gc.enable()
    for argument in sys.argv[1:]:
        if argument.startswith("log="):
            service = socket.socket(fileno=int(argument.removeprefix("log=")))
            service.set_inheritable(False)
            send_log_to(partial(ServiceHandler, line=service))
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return
        line += more
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to the log

    def tell(message: EmbeddedReady | EmbeddedFailed) -> None:
        os.write(out, msgspec.json.encode(message) + b"\n")

    def ready(actor: BrokerActor) -> None:
        tell(
            EmbeddedReady(
                actor.token, actor.public_name_server, actor.endpoints.broker, os.getpid()
            )
        )

    hosted = "hosted" in sys.argv[1:]
    try:
        settings = BrokerSettings.from_keys(msgspec.json.decode(line))
        if hosted:
            from cometmq.actors.launch.hosted import Host

            run_broker(settings, ready, host=Host(0))
        else:
            run_broker(settings, ready, lifeline=0)
    except Exception as error:
        tell(EmbeddedFailed(getattr(error, "code", CometError.code), str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
