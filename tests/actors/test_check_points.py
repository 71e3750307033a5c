"""Check points of RocketMQ's POP, as its broker writes them, and what is none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cometmq.actors.tables.check_points import ReviveQueue

POINT = {
    "bm": 0, "bn": "broker-a", "c": "g1", "d": [0, 1, 5], "it": 60_000, "n": 3,
    "pt": 1_700_000_000_000, "q": 1, "reviveTime": 1_700_000_060_000, "ro": 0, "so": 10,
    "t": "TopicA",
}  # fmt: skip
ACK = {"ao": 11, "bn": "broker-a", "c": "g1", "pt": 1_700_000_000_000, "q": 1, "so": 10,
       "t": "TopicA"}  # fmt: skip
DUE_MS = 1_700_000_060_000


def packed(fields: dict[str, Any], **other: Any) -> bytes:
    return json.dumps(fields | other).encode()


def left(queue: ReviveQueue) -> list[int]:
    return sorted(offset for point in queue.due(DUE_MS) for offset in point.left)


def test_what_was_not_acknowledged_is_left() -> None:
    queue = ReviveQueue(7)
    assert queue.take(7, "ck", packed(POINT))
    assert queue.due(DUE_MS - 1) == []
    assert left(queue) == [10, 11, 15]
    assert queue.take(8, "ack", packed(ACK))
    assert left(queue) == [10, 15]
    assert (queue.position, queue.done) == (9, 7)
    assert queue.take(9, "bAck", packed(ACK, ao=0, aol=[10, 15]))
    assert left(queue) == []
    assert queue.done == 10


def test_bits_and_acknowledgements_that_come_first() -> None:
    queue = ReviveQueue(0)
    assert queue.take(0, "ack", packed(ACK))
    assert queue.take(1, "ck", packed(POINT, bm=0b100))
    assert left(queue) == [10]
    assert queue.take(2, "ck", packed(POINT, pt=5, d=[], n=2))  # another one, without distances
    assert {tuple(sorted(each.left)) for each in queue.due(DUE_MS)} == {(10,), (10, 11)}
    for point in queue.due(DUE_MS):
        queue.settle(point)
    assert (left(queue), queue.done) == ([], 3)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (None, packed(POINT)),
        ("other", packed(POINT)),
        ("ck", b""),
        ("ck", b"[" * 100_000),
        ("ck", b"\xff"),
        ("ck", packed(POINT, n=10**6)),
        ("ck", packed(POINT, n=-1)),
        ("ck", packed(POINT, so=-1)),
        ("ck", packed(POINT, so=2**63)),
        ("ck", packed(POINT, q=2**40)),
        ("ck", packed(POINT, t=None)),
        ("ack", packed(ACK, ao="1")),
        ("bAck", packed(ACK, aol=[-1])),
    ],
)
def test_what_is_none(kind: str | None, body: bytes) -> None:
    queue = ReviveQueue(0)
    assert not queue.take(0, kind, body)
    assert (queue.position, queue.done, left(queue)) == (1, 1, [])


def test_flipped_bytes() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    queue = ReviveQueue(0)
    for place in range(2_000):
        kind, body = chance.choice([("ck", packed(POINT)), ("ack", packed(ACK))])
        damaged = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        queue.take(place, kind, bytes(damaged))
    assert queue.position == 2_000
