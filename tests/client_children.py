"""What client tests run in processes of their own. No tests here."""

from __future__ import annotations

from multiprocessing.connection import Connection

from cometmq.client import Consumer


def consume_until_killed(name_server: str, group: str, topic: str, line: Connection) -> None:
    """Poll, acknowledge, and report the queues owned whenever they change."""
    known: list[tuple[str, str, int]] = []
    with Consumer(name_server, group, topic, auto_commit_ms=50) as consumer:
        while True:
            consumer.ack(consumer.poll(100, 0.1))
            if consumer.assignment != known:
                known = consumer.assignment
                line.send(known)
