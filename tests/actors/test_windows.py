"""What a broker's processes may have open: descriptors as many as they are allowed, and segments
mapped by half of what the system allows."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from family import CHILDREN, RunningBroker

from cometmq.actors.launch.supervisor import raise_descriptor_limit
from cometmq.shm.os import files


@pytest.mark.parametrize(
    ("allowed", "most", "set_to"),
    [(1024, 1 << 20, [(1 << 20, 1 << 20)]), (4096, 4096, [])],
)
def test_the_limit_of_descriptors_is_raised(
    allowed: int, most: int, set_to: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (allowed, most))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limits: found.append(limits))
    raise_descriptor_limit()
    assert found == set_to


def test_a_limit_that_nobody_may_have_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_what: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _what: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()


def test_every_process_of_a_broker_has_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        broker = RunningBroker(tmp_path / "store", program=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with broker:
        pids = broker.pids()
        for role in CHILDREN:
            assert resource.prlimit(pids[role], resource.RLIMIT_NOFILE) == (before[1],) * 2, role


def test_half_of_the_mappings_that_the_system_allows() -> None:
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert allowed // 2 == files.FILE_MAPS_MAX
