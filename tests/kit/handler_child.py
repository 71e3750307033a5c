"""Consumers with handlers in processes of their own. No tests here."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

from inside import is_ending, queues_of
from patience import patient
from still import stop_here

from cometmq.client import Consumer, Message
from cometmq.client.receiving.buffer import Queue

STOP_AT = 5


def stop_in_the_sixth(name_server: str, group: str, topic: str, line: Connection) -> None:
    """In order. Stands still in a handler; says what it handles, and when it has lost its queue."""
    seen = 0

    def handle(message: Message) -> None:
        nonlocal seen
        if not seen:  # it is certain to own the queue now
            (owned,) = queues_of(consumer)
            threading.Thread(target=wait_until_lost, args=(owned,), daemon=True).start()
        line.send(("handles", message.queue_offset))
        seen += 1
        if seen == STOP_AT + 1:
            stop_here()

    def wait_until_lost(owned: Queue) -> None:
        tick = threading.Event()
        while not owned.dropped:  # it may come back at once, under another epoch
            tick.wait(0.01)
        line.send(("lost", None))
        consumer.close()

    with Consumer(name_server, group, topic, member="z", auto_commit_ms=50) as consumer:
        consumer.run(handle, orderly=True)
    line.send(("ended", None))


def wait_for_ctrl_c(name_server: str, group: str, topic: str, line: Connection) -> None:
    """Four handlers at work when Ctrl-C comes, which end when the run has heard of it."""
    told = threading.Event()
    at_work = threading.Semaphore(0)

    def handle(message: Message) -> None:
        at_work.release()
        assert told.wait(patient(60))

    def listen() -> None:
        for _ in range(4):
            at_work.acquire()
        line.send(("at work", None))
        tick = threading.Event()
        while not is_ending(consumer):
            tick.wait(0.005)
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    with Consumer(name_server, group, topic) as consumer:
        try:
            consumer.run(handle, concurrency=4)
        except KeyboardInterrupt:
            line.send(("interrupted", None))


def hang_after_ten(name_server: str, group: str, topic: str, line: Connection) -> None:
    """Says what is done; the eleventh and whatever comes then is never done."""
    handle_all(name_server, group, topic, line, 10)


def handle_all(
    name_server: str, group: str, topic: str, line: Connection, count: int = 1_000_000
) -> None:
    """Says what is done."""
    lock = threading.Lock()

    def handle(message: Message) -> None:
        nonlocal count
        with lock:
            count -= 1
            if count >= 0:
                line.send(("done", int(message.body)))
                return
        threading.Event().wait()

    with Consumer(name_server, group, topic, auto_commit_ms=50) as consumer:
        consumer.run(handle, concurrency=2)
