"""The checker is judged: a good history is good, and each planted fault is found by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from simulator.truth import Truth, Violation


@dataclass
class History:
    """A good one: ten records, seven of them acknowledged, in two epochs."""

    log: list[int] = field(default_factory=lambda: list(range(11, 21)))
    acks: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    reads: list[tuple[str, int, list[int]]] = field(default_factory=list)
    cuts: list[tuple[str, int, int]] = field(default_factory=lambda: [("b", 8, 7)])
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = {record: index // 2 + index % 2 for index, record in enumerate(self.log)}
        self.acks = [
            (
                "a" if offset < 4 else "b",
                1 if offset < 4 else 2,
                offset,
                record,
                self.counts[record],
            )
            for offset, record in enumerate(self.log[:7])
        ]
        self.reads = [("a", 0, self.log[:5]), ("b", 3, self.log[3:7])]

    def judge(self) -> None:
        truth = Truth()
        for ack in self.acks:
            truth.acknowledged(*ack)
        for read in self.reads:
            truth.readable(*read)
        for cut in self.cuts:
            truth.cut(*cut)
        truth.final(0, self.log, self.counts)


def test_a_good_history_is_good() -> None:
    History().judge()


def drop(history: History) -> None:
    del history.log[6:]


def swap(history: History) -> None:
    history.log[2], history.log[3] = history.log[3], history.log[2]


def flip(history: History) -> None:
    history.log[6] ^= 1 << 10


def reuse_offset(history: History) -> None:
    history.acks.append(("b", 2, 3, 99, 9))


def reuse_queue_offset(history: History) -> None:
    history.acks.append(("b", 2, 7, 18, history.counts[16]))


def two_masters(history: History) -> None:
    who, _, *rest = history.acks[6]
    history.acks[6] = (who, 1, *rest)


def another_read(history: History) -> None:
    history.reads.append(("c", 4, [77]))


def read_gone(history: History) -> None:
    history.reads.append(("c", 9, [history.log[9]]))
    del history.log[9]


def cut_confirmed(history: History) -> None:
    history.cuts.append(("c", 6, 7))


def hole_in_queue(history: History) -> None:
    history.counts[history.log[9]] += 1


FAULTS: list[tuple[Callable[[History], None], str]] = [
    (drop, "lost"),
    (swap, "lost"),
    (flip, "lost"),
    (reuse_offset, "offset twice"),
    (reuse_queue_offset, "queue offset twice"),
    (two_masters, "two masters"),
    (another_read, "changed"),
    (read_gone, "changed"),
    (cut_confirmed, "cut"),
    (hole_in_queue, "queue"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[each.__name__ for each, _ in FAULTS])
def test_a_planted_fault_is_found(fault: Callable[[History], None], name: str) -> None:
    history = History()
    fault(history)
    with pytest.raises(Violation, match=f"^{name}:"):
        history.judge()
