"""Killed at any line of a reset or a deletion of a group: all of it is done, or nothing, and no
commit of an owner of before counts where it is done."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from coordinator_child import FakeCommitlog, address_of, running
from reset_child import MOVES, die_everywhere

from cometmq.protocol.client_timeout import TIMEOUT_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def killed_everywhere(name: str, tmp_path: Path, commitlog: str) -> Iterator[tuple[Any, Any]]:
    """Yield each process at its end, with the count that it has sent."""
    context = multiprocessing.get_context("spawn")
    count, ready = context.Pipe(duplex=False)
    arguments = (tmp_path / "store", commitlog, name, ready)
    child = context.Process(target=die_everywhere, args=arguments)
    child.start()
    ready.close()
    child.join()
    with count:
        yield child, count


@pytest.mark.parametrize("name", MOVES)
def test_killed_at_any_line(name: str, tmp_path: Path) -> None:
    with running(commitlog := FakeCommitlog.start()):
        address = address_of(commitlog)
        with killed_everywhere(name, tmp_path, address) as (child, count):
            assert child.exitcode == 0
            assert count.recv() > 20


def test_a_busy_machine_breaks_no_invariant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault 39: a missing answer is reported as a time-out, not as a wrong state."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.2")
    with (
        running(FakeCommitlog.start()),
        killed_everywhere("reset", tmp_path, f"ipc://{tmp_path}/nobody") as (child, _),
    ):
        assert child.exitcode == 1
    said = capfd.readouterr().err
    assert "TimeoutError: a child was not answered in time" in said
    assert "AssertionError" not in said
