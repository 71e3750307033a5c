"""What a record says of when it was stored, and who believes it."""

from __future__ import annotations

import random

import pytest

from cometmq.protocol.uptime import (
    AHEAD_MS,
    BYTES_MAX,
    NAME,
    Uptime,
    uptime_of,
    without_uptime,
)

HERE = Uptime("0123abcd", 7_000)
SEED = 20_261_125


def test_it_is_read_as_it_was_written() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    for _ in range(200):
        first = chance.choice([None, chance.randrange(10**12)])
        one = Uptime(f"{chance.randrange(1 << 32):08x}", chance.randrange(10**12), first)
        raw = one.as_property()
        assert len(raw) <= BYTES_MAX
        name, _, value = raw[:-1].partition(b"\1")
        assert (name.decode(), raw[-1:]) == (NAME, b"\2")
        assert uptime_of({NAME: value.decode()}) == one
        around = b"a\1b\2", b"c\1d"
        assert without_uptime(around[0] + raw + around[1]) == b"a\1b\2c\1d\2"


BAD = [
    "", "-", "0123abcd", "0123abcd-", "0123abcd-7000", "0123abcd-00000000700",
    "0123abcd-+00000007000", "0123abcd-00000000700²", "0123abc-000000007000",
    "0123abcd-000000007000-", "0123abcd--00000007000",
    "0123abcd-000000007000-000000000001-000000000001",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_says_nothing(text: str) -> None:
    assert uptime_of({NAME: text}) is None


def test_how_long_ago_it_was() -> None:
    assert HERE.since(HERE.clock, 6_999) == 1
    assert HERE.since(HERE.clock, 7_001) == -1  # one is rounded up, the other one down
    assert HERE.since(HERE.clock, 7_000 + AHEAD_MS) == -AHEAD_MS
    assert HERE.since(HERE.clock, 7_001 + AHEAD_MS) is None  # the clock has run back
    assert HERE.since("ffffffff", 6_999) is None
    assert HERE.since(HERE.clock, None) is None
