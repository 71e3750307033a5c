"""What waits for a snapshot goes on, whichever snapshot it is that comes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from patience import patient

from cometmq.actors.coordination.snapshots import Snapshots
from cometmq.protocol.errors import ServiceNotAvailable
from cometmq.protocol.ledger import Place
from cometmq.shm.state.ledger_mark import LEDGER_FILE, Mark


class Actor:
    """Keeps what is to be done soon, until the test has it done."""

    def __init__(self) -> None:
        self.soon: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.call_soon = self.soon.put

    def step(self) -> None:
        self.soon.get(timeout=patient(30))()


class Ledger:
    """One with an entry that no file has."""

    covered = given = Place(1, 1)
    position, undone, is_settled = 1, 0, True

    def then(self, action: Callable[[None], None]) -> None:
        action(None)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Snapshots, Actor]]:
    ledger, actor = Ledger(), Actor()
    ledger.covered = Place()
    snapshots = Snapshots(cast(Any, actor), tmp_path, cast(Any, ledger), [], Mark())
    ledger.covered = Place(1, 1)
    yield snapshots, actor
    snapshots.close()


def test_it_waits_for_the_one_that_is_begun(made: tuple[Snapshots, Actor], tmp_path: Path) -> None:
    snapshots, actor = made
    done: list[int] = []
    snapshots.then(lambda: done.append(1))
    actor.step()
    assert done == []
    actor.step()
    assert done == [1]
    assert (tmp_path / LEDGER_FILE).exists()
    snapshots.then(lambda: done.append(2))  # there is nothing to wait for
    assert done == [1, 2]


def test_one_that_is_written_at_once_does_as_well(made: tuple[Snapshots, Actor]) -> None:
    snapshots, _ = made
    done: list[int] = []
    snapshots.then(lambda: done.append(1))
    snapshots.then(lambda: done.append(2))  # for the next one
    snapshots.write_now()
    assert done == [1, 2]


def test_so_does_one_that_fails(made: tuple[Snapshots, Actor], tmp_path: Path) -> None:
    snapshots, _ = made
    done: list[int] = []
    snapshots.then(lambda: done.append(1))
    (tmp_path / LEDGER_FILE).mkdir()
    with pytest.raises(ServiceNotAvailable):
        snapshots.write_now()
    assert done == [1]
