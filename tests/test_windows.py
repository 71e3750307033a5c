"""How many pieces of ConsumeQueue files the dispatcher has mapped at a time."""

from __future__ import annotations

import resource

import pytest

from cometmq.shm.queue_builder import WINDOWS_MAX, windows_max


@pytest.mark.parametrize(
    ("soft", "hard", "count", "raised"),
    [
        (100, 400, 300, [(400, 400)]),
        (400, 400, 300, []),
        (1024, resource.RLIM_INFINITY, WINDOWS_MAX, [(resource.RLIM_INFINITY,) * 2]),
        (1024, 1 << 20, WINDOWS_MAX, [(1 << 20, 1 << 20)]),
    ],
)
def test_descriptors_bound_them(
    soft: int,
    hard: int,
    count: int,
    raised: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each holds one: the limit is raised as far as it may be, and a quarter is left for others."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert windows_max() == count
    assert set_to == raised
