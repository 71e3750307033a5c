"""A replica in a process of its own, which says back what it hears. No tests here.

    peers_child.py SECRET_HEX NAME HOST:PORT NAME=HOST:PORT ...

It prints a line once it can be come to, and ends with its standard input.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paths import SEARCH

from cometmq.actors.replication.core.frames import AnyFrame
from cometmq.actors.replication.peers.peers import Peers
from cometmq.actors.runtime.event_log import EventLog

GROUP = "group-a"


@contextmanager
def running(
    secret: bytes, name: str, bind: str, others: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """From when it can be come to. It is killed, if it has not ended."""
    command = [sys.executable, str(Path(__file__)), secret.hex(), name, bind]
    command += [f"{other}={address}" for other, address in others.items()]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SEARCH},
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def main(secret: str, name: str, bind: str, *others: str) -> None:
    def say_back(sender: str, frame: AnyFrame, content: memoryview | None) -> None:
        peers.send(sender, frame, content)

    peers = Peers(
        group=GROUP,
        own=name,
        secret=bytes.fromhex(secret),
        bind=bind,
        on_frame=say_back,
        said=EventLog(),
    )
    peers.replace(dict(other.split("=") for other in others))
    print("ready", flush=True)
    while True:
        if sys.stdin in select.select([peers, sys.stdin], [], [], 0.05)[0]:
            peers.close()
            return
        peers.receive()
        peers.tend()


if __name__ == "__main__":
    main(*sys.argv[1:])
