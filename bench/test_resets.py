"""A reset of a group whose members work on a backlog: how long until all are at the new place.

Canonical load: 8 members in processes of their own, each with a queue of 128-byte messages and a
handler that takes a millisecond (`run` with concurrency=1, else as it comes), so that each member
has some MiB read ahead. From the call of `Admin.reset_offsets` until the last member's handler has
been given the message at its new place, by CLOCK_MONOTONIC. In turns back to the beginning and
forward by a time, 90 % of a queue each; the members have committed something between two resets.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from typing import Final

import pytest
from benchmarks import Report
from patience import patient
from reset_load import handle_until_told

from cometmq import Admin, Broker
from cometmq.errors import GroupNotExist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MEMBERS: Final = 8
PER_QUEUE: Final = 100_000  # a minute and more of a member's work
BEHIND: Final = 10_000  # of them lie behind the time that a reset goes to
TOPIC: Final = "reset"
GROUP: Final = "resetting"
WAIT_S: Final = patient(60.0)
GOAL_S: Final = 1.0
SPAWN = multiprocessing.get_context("spawn")
Reports = list[Connection]


def fill(broker: Broker) -> datetime:
    """A time of which most of each queue is older."""
    bodies = [random.Random(number).randbytes(128) for number in range(1_000)]
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic(TOPIC, queues=MEMBERS)
        for queue_id in range(MEMBERS):
            producer.send_many(TOPIC, bodies * ((PER_QUEUE - BEHIND) // 1_000), queue_id=queue_id)
        then = datetime.now(UTC)
        for queue_id in range(MEMBERS):
            producer.send_many(TOPIC, bodies * (BEHIND // 1_000), queue_id=queue_id)
    return then


@contextmanager
def members(broker: Broker, admin: Admin) -> Iterator[Reports]:
    """Each with a queue of its own."""
    lines, children = [], []
    try:
        for _ in range(MEMBERS):
            here, there = SPAWN.Pipe()
            child = SPAWN.Process(
                target=handle_until_told, args=(broker.name_server, GROUP, TOPIC, there)
            )
            child.start()
            there.close()
            lines.append(here)
            children.append(child)
        deadline = time.monotonic() + WAIT_S
        while owners(admin) < MEMBERS:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield lines
    finally:
        for line, child in zip(lines, children, strict=True):
            line.send(None)
            child.join(WAIT_S)


def owners(admin: Admin) -> int:
    try:
        found = admin.describe_group(GROUP).queues
    except GroupNotExist:  # the first one has not joined yet
        return 0
    return len({each.member for each in found if each.topic == TOPIC and each.member})


def reset_s(admin: Admin, lines: Reports, to: str | datetime) -> float:
    """Until each queue's handler has been given the message at the queue's new place."""
    began = time.monotonic()
    moved = admin.reset_offsets(GROUP, TOPIC, to)
    left = {queue_id: offset for (_, queue_id), offset in moved.items()}
    last = began
    while left:
        ready = wait(lines, WAIT_S)
        assert ready, f"nothing came of {left}"
        for line in ready:
            assert isinstance(line, Connection)
            at, queue_id, offset = line.recv()
            if at >= began and left.get(queue_id) == offset:
                del left[queue_id]
                last = max(last, at)
    deadline = time.monotonic() + WAIT_S
    while any(
        offset <= moved[broker, queue_id]
        for (broker, queue_id), offset in admin.committed(GROUP, TOPIC).items()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return last - began


def test_reset_of_a_group(broker: Broker, full: bool, report: Report) -> None:
    then = fill(broker)
    took: dict[str, list[float]] = {"forward": [], "back": []}
    with Admin(broker.name_server) as admin, members(broker, admin) as lines:
        for _ in range(20 if full else 2):
            took["forward"].append(reset_s(admin, lines, then))
            took["back"].append(reset_s(admin, lines, "earliest"))
    for way, found in took.items():
        report(f"reset {way}, {MEMBERS} members, p50", statistics.median(found) * 1e3, "ms")
        report(f"reset {way}, {MEMBERS} members, worst", max(found) * 1e3, "ms")
    if full:
        assert max(map(max, took.values())) <= GOAL_S
