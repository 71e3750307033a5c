"""Which tests run beside each other under `python -m pytest -n 3` (pytest-xdist).

Files are handed out whole, since the tests of a file may share a broker. Where they share nothing,
slow ones are handed out one by one, so that in the end no worker is left alone with a file of them,
and all through the run, since some compute and others wait. Files come by what they weigh. What is
marked `alone` measures the machine or its processes: it comes last, when nobody else is at work. A
test that is not marked must bear company: ports of 0, files below its own tmp_path, processes known
by what it started, waits that end with an event.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ALONE: Final = "alone"  # the unit of those that are marked so
#: Of one worker, as if they were one file: they share what takes long to start. They take longest,
#: and come first of all.
TOGETHER: Final = (
    ("tests/spark/test_spark_cluster", "tests/spark/test_spark_installed"),  # an environment
    ("tests/spark/",),  # a JVM
    ("bench/spark/",),
    ("tests/replication/test_engine",),
)
GOLDEN: Final = (5**0.5 - 1) / 2  # its multiples modulo 1 lie evenly, wherever one stops
SINGLE_UNTIL: Final = 0.9  # of the run: what takes a minute is not to begin as its last
SLOW: Final = 30  # what a test that is marked slow counts against one that is not


def unit_of(nodeid: str) -> str:
    """What is handed to one worker as a whole, of those that bear company and share something."""
    place = place_of(nodeid)
    return TOGETHER[place][0] if place < len(TOGETHER) else nodeid.partition("::")[0]


def place_of(nodeid: str) -> int:
    """Among those that come first."""
    places = (at for at, each in enumerate(TOGETHER) if nodeid.startswith(each))
    return next(places, len(TOGETHER))


def shares(item: pytest.Item) -> bool:
    """Whether it has something with other tests: a fixture, but for pytest's own, or RocketMQ's
    classes, which each process compiles."""
    found: dict[str, Sequence[Any]] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    definitions = [each for known in found.values() for each in known]
    has_fixture = any(each.scope != "function" and each.baseid for each in definitions)
    return has_fixture or item.get_closest_marker("jvm") is not None


def note_of(workerinput: dict[str, Any]) -> Path:
    """Where a worker says what is to run alone, and what one by one: its scheduler is told names,
    and neither marks nor fixtures."""
    name = f"cometmq-alone-{workerinput['testrunuid']}-{workerinput['workerid']}"
    return Path(tempfile.gettempdir(), name)


def spread(weights: dict[str, int], single: Collection[str]) -> dict[str, float]:
    """How much of the run lies before each unit: of files those that weigh most come first. Slow
    tests that are handed out one by one come between them, and those of one file far from each
    other: one often waits, or computes, as long as the next, and others do the other meanwhile."""
    files = sorted(weights.keys() - single, key=lambda unit: (-weights[unit], unit))
    total, before, found = sum(weights[unit] for unit in files), 0, {}
    for unit in files:
        found[unit] = before / total
        before += weights[unit]
    return found | {unit: at * GOLDEN % 1 * SINGLE_UNTIL for at, unit in enumerate(sorted(single))}


def arrange(items: list[pytest.Item], workerinput: dict[str, Any]) -> None:
    """In a worker: what takes long first, and what is to run alone last."""
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    whole = {unit_of(item.nodeid) for item in items if shares(item)}
    single = {nodeid for nodeid in slow if unit_of(nodeid) not in whole}
    alone = {item.nodeid for item in items if item.get_closest_marker(ALONE)}
    weights: dict[str, int] = {}
    units = {each.nodeid: each.nodeid if each.nodeid in single else unit_of(each.nodeid)
             for each in items}  # fmt: skip
    for nodeid, unit in units.items():
        weights[unit] = weights.get(unit, 0) + (SLOW if nodeid in slow else 1)
    shares_of_run = spread(weights, single)

    def order(item: pytest.Item) -> tuple[bool, int, float]:
        nodeid = item.nodeid
        return nodeid in alone, place_of(nodeid), shares_of_run[units[nodeid]]

    items.sort(key=order)
    note_of(workerinput).write_text(json.dumps([sorted(alone), sorted(single)]))


class Scheduler(LoadFileScheduling):
    """Units in the order of `arrange`; the last of all when every other worker has ended."""

    _alone: frozenset[str] = frozenset()
    _single: frozenset[str] = frozenset()

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        note = note_of(node.workerinput)
        if note.exists():  # else it has found nothing, and says why
            self._alone, self._single = map(frozenset, json.loads(note.read_text()))
            note.unlink()
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in self._alone:
            return ALONE
        return nodeid if nodeid in self._single else unit_of(nodeid)

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
        """Where one crashed the others take over what it had not begun; the test that it was at,
        which nobody runs again. (pytest-xdist's own hands out that one again, and units of which
        nothing is left, for which nobody reports anything: then all wait for ever.)"""
        units = self.assigned_work.pop(node)
        left = [each for tests in units.values() for each in tests if not tests[each]]
        if not left:
            return None
        crashed = left[0]
        for unit, tests in units.items():
            if crashed in tests:
                tests[crashed] = True
            if not all(tests.values()):
                self.workqueue[unit] = tests
        if ALONE in self.workqueue:
            self.workqueue.move_to_end(ALONE)
        for other in self._staying():
            self._reschedule(other)
        return crashed

    def _only_alone_is_left(self) -> bool:
        return list(self.workqueue) == [ALONE]

    def _staying(self) -> list[WorkerController]:
        """Without one that was started in another's place, and does not know the tests yet."""
        known = self.registered_collections
        return [node for node in self.nodes if node in known and not node.shutting_down]

    def _others_are_busy(self, node: WorkerController) -> bool:
        return any(
            self._pending_of(work)
            for other, work in self.assigned_work.items()
            if other is not node
        )
