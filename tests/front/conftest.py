"""Clusters on this machine, for tests of what people see of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from members import FakeMembers, make_cluster

from cometmq.cluster import stores
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.looking import Looker
from cometmq.cluster.place import GroupPlace
from cometmq.shm.live.control import Service


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the control files of kit/members.py there is no process that could be asked."""
    monkeypatch.setattr(stores, "ASK_S", 0.01)


@pytest.fixture
def made(tmp_path: Path) -> ClusterFolder:
    return make_cluster(tmp_path / "try")


@pytest.fixture
def members(made: ClusterFolder) -> Iterator[FakeMembers]:
    found = FakeMembers(made)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def served(members: FakeMembers) -> FakeMembers:
    """n0 is master, all are in sync."""
    for name in ("n0", "n1", "n2"):
        members.start(name)
    members.elect("n0")
    members.join("n1", "n2")
    members.log("n0", 5_000, wrote_ms=9_000, service=Service.OPEN)
    members.log("n1", 4_000, wrote_ms=8_500)
    members.log("n2", 5_000, wrote_ms=9_000)
    return members


@pytest.fixture
def looker(served: FakeMembers) -> Iterator[Looker]:
    with Looker(GroupPlace.of_folder(served.folder), served.engine) as found:
        yield found
