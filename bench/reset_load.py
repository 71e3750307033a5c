"""What the benchmark of resets runs in processes of their own. No benchmarks here."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from typing import Final

from cometmq import Consumer, Message

HANDLING_S: Final = 0.001  # of each message


def handle_until_told(name_server: str, group: str, topic: str, line: Connection) -> None:
    """A member with a handler that takes a millisecond. Whenever it is handed something else than
    what follows in the queue it says when (CLOCK_MONOTONIC, s), and what: queue and offset."""
    following: dict[int, int] = {}

    def handle(message: Message) -> None:
        queue_id, offset = message.queue_id, message.queue_offset
        if following.get(queue_id) != offset:
            line.send((time.monotonic(), queue_id, offset))
        following[queue_id] = offset + 1
        time.sleep(HANDLING_S)  # the work

    with Consumer(name_server, group, topic) as consumer:

        def end() -> None:
            line.recv()
            consumer.close()

        threading.Thread(target=end).start()
        consumer.run(handle, concurrency=1)
