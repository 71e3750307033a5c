"""Other brokers in tests: fetched if they can be had, and skipped loudly where they cannot."""

from __future__ import annotations

import functools

import pytest

from cometmq.bench import systems
from cometmq.bench.peers import fetch


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
