"""What client tests run in processes of their own. No tests here."""

from __future__ import annotations

import mmap
from multiprocessing.connection import Connection
from pathlib import Path

from cometmq.client import Consumer
from cometmq.shm.kernel._kernel import Bell, OwnedCell, ReadCell, Sleeper, WakeWords


def consume_until_killed(name_server: str, group: str, topic: str, line: Connection) -> None:
    """Poll, acknowledge, and report the queues owned whenever they change."""
    known: list[tuple[str, str, int]] = []
    with Consumer(name_server, group, topic, auto_commit_ms=50) as consumer:
        while True:
            consumer.ack(consumer.poll(100, 0.1))
            if consumer.assignment != known:
                known = consumer.assignment
                line.send(known)


def hand_back(path: Path, count: int) -> None:
    """Answer every step of the first counter in a file by the same step of the second."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 8192)
        read_only = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ)
    words = WakeWords(memoryview(memory)[4096:])
    there = ReadCell(read_only, 0, 1, words, 0)
    back = OwnedCell(memory, 128, (), 1, False, words, 1)
    sleeper = Sleeper([there], Bell())
    number = 0
    while number < count:
        sleeper.look()
        if there.value == number:
            assert sleeper.sleep(60), f"hand-over {number + 1} was lost"
            continue
        number = there.value
        back.advance(number)


def broadcast_until_killed(name_server: str, topic: str, folder: str, line: Connection) -> None:
    """Read the first queue by tens, commit each, and report where the next begins."""
    with Consumer(name_server, "g", broadcast=folder, member="child") as consumer:
        consumer.assign(topic)
        first = next(queue for queue in consumer.assignment if queue[2] == 0)
        consumer.assign([first])
        while True:
            consumer.ack(consumer.poll(10, 60))
            consumer.commit()
            line.send(consumer.position(first))
