"""Which tests run beside each other under `python -m pytest -n 3` (pytest-xdist).

Files are handed out whole, since the tests of a file may share a broker, those that take long
first. What is marked `alone` measures the machine or its processes: it comes last, when nobody else
is at work. A test that is not marked must bear company: ports of 0, files below its own tmp_path,
processes known by what it started, waits that end with an event.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ALONE: Final = "alone"  # the unit of those that are marked so
#: Of one worker, as if they were one file: they share what takes long to start.
TOGETHER: Final = ("tests/spark/", "tests/replication/test_engine")
SLOW: Final = 30  # what a test that is marked slow counts against one that is not


def unit_of(nodeid: str) -> str:
    """What is handed to one worker as a whole, of those that bear company."""
    folder = next((each for each in TOGETHER if nodeid.startswith(each)), None)
    return folder or nodeid.partition("::")[0]


def note_of(workerinput: dict[str, Any]) -> Path:
    """Where a worker says what is to run alone: its scheduler is told names, and no marks."""
    name = f"cometmq-alone-{workerinput['testrunuid']}-{workerinput['workerid']}"
    return Path(tempfile.gettempdir(), name)


def arrange(items: list[pytest.Item], workerinput: dict[str, Any]) -> None:
    """In a worker: longest units first, and what is to run alone last."""
    weights: dict[str, int] = {}
    for item in items:
        weight = SLOW if item.get_closest_marker("slow") else 1
        weights[unit_of(item.nodeid)] = weights.get(unit_of(item.nodeid), 0) + weight
    alone = {item.nodeid for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: (item.nodeid in alone, -weights[unit_of(item.nodeid)]))
    note_of(workerinput).write_text("\n".join(alone))


class Scheduler(LoadFileScheduling):
    """Units in the order of `arrange`; the last of all when every other worker has ended."""

    _alone: frozenset[str] = frozenset()

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        note = note_of(node.workerinput)
        self._alone = frozenset(note.read_text().splitlines())
        note.unlink()
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return ALONE if nodeid in self._alone else unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self._only_alone_is_left() and self._others_are_busy(node):
            return
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """A worker is not needed any more once another one will do the rest."""
        if self._only_alone_is_left() and not node.shutting_down and len(self._staying()) > 1:
            node.shutdown()
        else:
            super()._reschedule(node)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        super().mark_test_complete(node, item_index, duration)
        for other in self._staying():
            self._reschedule(other)

    def remove_node(self, node: WorkerController) -> str | None:
        """Where one crashed the others take over what it had."""
        crashed = super().remove_node(node)
        if ALONE in self.workqueue:
            self.workqueue.move_to_end(ALONE)
        for other in self._staying():
            self._reschedule(other)
        return crashed

    def _only_alone_is_left(self) -> bool:
        return list(self.workqueue) == [ALONE]

    def _staying(self) -> list[WorkerController]:
        return [node for node in self.nodes if not node.shutting_down]

    def _others_are_busy(self, node: WorkerController) -> bool:
        return any(
            self._pending_of(work)
            for other, work in self.assigned_work.items()
            if other is not node
        )
