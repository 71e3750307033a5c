"""What the benchmark of pending timers runs in a process of its own. No benchmarks here."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Final

from cometmq import Producer

PAUSE_S: Final = 0.001  # between two: they are there to see, not to load


def probe_until_told(name_server: str, topic: str, body: bytes, line: Connection) -> None:
    """One plain `send` after the other; says of all of them when they ended and what they took:
    (time of day, s; s)."""
    probes: list[tuple[float, float]] = []
    with Producer(name_server) as producer:
        line.send(None)
        while not line.poll(PAUSE_S):
            began = time.perf_counter()
            producer.send(topic, body)
            probes.append((time.time(), time.perf_counter() - began))
    line.send(probes)
