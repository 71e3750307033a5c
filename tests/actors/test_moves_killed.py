"""Killed at any line of a reset or a deletion of a group: all of it is done, or nothing, and no
commit of an owner of before counts where it is done."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from coordinator_child import FakeCommitlog, address_of, running
from reset_child import MOVES, die_everywhere

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", MOVES)
def test_killed_at_any_line(name: str, tmp_path: Path) -> None:
    with running(commitlog := FakeCommitlog.start()):
        context = multiprocessing.get_context("spawn")
        count, ready = context.Pipe(duplex=False)
        arguments = (tmp_path / "store", address_of(commitlog), name, ready)
        child = context.Process(target=die_everywhere, args=arguments)
        child.start()
        ready.close()
        child.join()
        assert child.exitcode == 0
        assert count.recv() > 20
