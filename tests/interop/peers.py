"""Other brokers in tests: fetched if they can be had, and skipped loudly where they cannot."""

from __future__ import annotations

import functools
from typing import Final

import pytest

from cometmq.bench import systems
from cometmq.bench.peers import fetch

#: Of a broker of RocketMQ that lives for seconds. The timer wheel is compared whole at each flush,
#: mostly by the interpreter; and a new broker asks for the time without a pause until the first of
#: the other intervals is over. Milliseconds. Pops need the wheel itself.
ROCKETMQ_IN_SHORT: Final = {
    "timerFlushIntervalMs": "60000",
    "transactionMetricFlushInterval": "200",
}


@functools.cache
def _missing(name: str) -> str | None:
    """Asked once a session, so that a machine without a network waits only once."""
    return fetch([name])[name]


def require(name: str) -> systems.System:
    """A new System, or a skip of the running test."""
    missing = _missing(name)
    if missing is not None:
        pytest.skip(f"{name} as a peer: {missing}")
    return systems.usable(name)
