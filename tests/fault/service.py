"""A service with its broker's writer inside, whose disk goes away.

    python service.py STORE SETTINGS(JSON)

Appends ten messages and says so; once it reads a line it appends two more, and prints the names and
texts of what it is told, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from cometmq import Broker
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel.store import Appender


def told(appender: Appender) -> tuple[str, str]:
    try:
        return "stored", str(appender.append(b"when the disk is gone"))
    except CometError as error:
        return type(error).__name__, str(error)


def main(store: str, settings: str) -> None:
    broker = Broker(store, settings=json.loads(settings), writer="here")
    appender = broker.appender("orders", 0)
    for number in range(10):
        appender.append(b"%d" % number)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([told(appender), told(appender)]), flush=True)
    os._exit(0)  # there is nothing to be closed in order


if __name__ == "__main__":
    main(*sys.argv[1:])
