"""What client tests run in processes of their own. No tests here."""

from __future__ import annotations

import mmap
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from patience import patient

from cometmq.client import Consumer, Message
from cometmq.client.receiving.kept import parse_offsets
from cometmq.shm.kernel.live import Bell, OwnedCell, ReadCell, Sleeper, WakeWords


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
            assert sleeper.sleep(patient(60)), f"hand-over {number + 1} was lost"
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
            consumer.ack(consumer.poll(10, patient(60)))
            consumer.commit()
            line.send(consumer.position(first))


def handle_until_killed(name_server: str, topic: str, folder: str, line: Connection) -> None:
    """Handle all but one message of two queues, which is at work for ever; report its offset, once
    the member's file has all else that it may have."""
    at_work, count = 5, 100
    done: list[Message] = []

    def handle(message: Message) -> None:
        if (message.queue_id, message.queue_offset) == (0, at_work):
            threading.Event().wait()
        done.append(message)

    with Consumer(name_server, "cast", topic, broadcast=folder, member="m") as consumer:

        def look() -> None:
            tick = threading.Event()
            path = Path(folder) / "m" / "cast" / "offsets.json"
            expected = {0: at_work, 1: count}
            while len(done) < 2 * count - 1 or offsets_in(path) != expected:
                tick.wait(0.01)
                consumer.commit()
            line.send(at_work)

        threading.Thread(target=look, daemon=True).start()
        consumer.run(handle)


def offsets_in(path: Path) -> dict[int, int]:
    """By queue, of a file of one topic."""
    found = parse_offsets(path.read_bytes(), path) if path.exists() else {}
    return {name.queue_id: offset for name, offset in found.items()}
