"""The control file: counters, sleepers, and what is refused."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from patience import patient

from cometmq.protocol.errors import StoreError
from cometmq.shm.kernel.live import InvariantBroken, wait_until
from cometmq.shm.live.control import BOUNDS, CONTROL_FILE, ControlFile, Counter, Doorbell
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueRange, QueueTable

HANDOVERS = 20_000


@pytest.fixture
def doorbells() -> list[int]:
    return [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]


def test_nobody_sleeps_through_a_change(tmp_path: Path, doorbells: list[int]) -> None:
    """Two processes hand a number to and fro, each asleep until the other has moved its counter.

    A wake-up that is lost stops both: the poll's limit fails the test.
    """
    control = ControlFile.create(tmp_path / CONTROL_FILE, {}, doorbells)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            echo(ControlFile.open(control.path, doorbells, writable=True), doorbells)
            status = 0
        finally:
            os._exit(status)
    mine = control.own(Counter.WROTE)
    theirs = control.sleep_on(Counter.FLUSHED, 0)
    for number in range(1, HANDOVERS + 1):
        mine.advance(number)
        sleep_until(theirs, doorbells[0], number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nobody_waits_through_a_change(tmp_path: Path) -> None:
    """The same of two that wait for each other's counter without a doorbell."""
    control = ControlFile.create(tmp_path / CONTROL_FILE, {})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            other = ControlFile.open(control.path, writable=True)
            theirs, mine = other.read(Counter.WROTE), other.own(Counter.FLUSHED)
            for number in range(1, HANDOVERS + 1):
                assert wait_until(theirs, number, patient(60))
                mine.advance(number)
            status = 0
        finally:
            os._exit(status)
    mine, theirs = control.own(Counter.WROTE), control.sleep_on(Counter.FLUSHED, 0)
    for number in range(1, HANDOVERS + 1):
        mine.advance(number)
        assert wait_until(theirs, number, patient(60))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_wait_ends_with_its_time(tmp_path: Path, doorbells: list[int]) -> None:
    control = ControlFile.create(tmp_path / CONTROL_FILE, {}, doorbells)
    wrote = control.own(Counter.WROTE)
    cell = control.sleep_on(Counter.WROTE, 0)
    wrote.advance(5)
    assert wait_until(cell, 5, 0)
    assert not wait_until(cell, 6, 0)
    assert not wait_until(cell, 6, 0.001)
    wrote.advance(6)  # in vain: that one has gone
    assert wait_until(cell, 6, 0)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(doorbells[0])  # which nobody has asked to be rung
    with pytest.raises(ValueError, match="wake word"):
        wait_until(ControlFile.open(control.path, writable=False).read(Counter.WROTE), 7, 0)


def test_who_has_not_moved_rings_for_nobody(tmp_path: Path, doorbells: list[int]) -> None:
    control = ControlFile.create(tmp_path / CONTROL_FILE, {}, doorbells)
    control.own(Counter.WROTE).reset(9)
    flushed = control.own_second(Counter.FLUSHED)
    cell = control.sleep_on(Counter.FLUSHED, 1)
    cell.arm()
    flushed.wake_moved()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(doorbells[1])
    for value in (3, 9):
        cell.arm()
        flushed.raise_to(value)
        flushed.wake_moved()
        assert os.eventfd_read(doorbells[1]) == 1
        cell.arm()
        flushed.wake_moved()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(doorbells[1])


def echo(control: ControlFile, doorbells: list[int]) -> None:
    theirs = control.sleep_on(Counter.WROTE, 1)
    mine = control.own(Counter.FLUSHED)
    for number in range(1, HANDOVERS + 1):
        sleep_until(theirs, doorbells[1], number)
        mine.advance(number)


def sleep_until(cell: object, doorbell: int, value: int) -> None:
    poll = select.poll()
    poll.register(doorbell, select.POLLIN)
    while True:
        cell.arm()  # type: ignore[attr-defined]
        if cell.value >= value:  # type: ignore[attr-defined]
            cell.disarm()  # type: ignore[attr-defined]
            return
        assert poll.poll(patient(20_000)), f"slept through {value}"
        os.eventfd_read(doorbell)


def test_a_counter_only_grows(tmp_path: Path) -> None:
    cell = ControlFile.create(tmp_path / CONTROL_FILE, {}).own(Counter.WROTE)
    cell.advance(7)
    cell.advance(7)
    with pytest.raises(AssertionError):
        cell.advance(6)
    cell.reset(0)
    assert cell.value == 0


@pytest.mark.parametrize(
    ("counter", "bound"),
    [(counter, bound) for counter, bounds in BOUNDS.items() for bound in bounds],
)
def test_no_counter_passes_what_bounds_it(tmp_path: Path, counter: Counter, bound: Counter) -> None:
    """Its writer ends: nothing is published."""
    control = ControlFile.create(tmp_path / CONTROL_FILE, {})
    mine = control.own(counter)
    control.own(bound).reset(100)
    mine.advance(100)
    for publish in (mine.publish, mine.advance, mine.raise_to):
        with pytest.raises(InvariantBroken) as broken:
            publish(101)
        assert str(broken.value) == (
            f"{counter.name.lower()} = 101 would be above {bound.name.lower()} = 100"
        )
        assert mine.value == 100
    control.own(bound).advance(150)
    mine.advance(150)
    with pytest.raises(InvariantBroken, match="= 149 would be below 150, where it was"):
        mine.advance(149)


def test_a_bound_whose_writer_has_not_begun_bounds_nothing(tmp_path: Path) -> None:
    """At a start the log's beginning is told before the first flush; `reset` is an epoch's."""
    control = ControlFile.create(tmp_path / CONTROL_FILE, {})
    control.own(Counter.WROTE).reset(1000)
    control.own(Counter.MIN_OFFSET).advance(500)
    control.own(Counter.FLUSHED).advance(1000)
    control.own(Counter.WROTE).reset(900)  # whoever takes over has found less
    control.own(Counter.DISPATCHED).advance(900)
    with pytest.raises(InvariantBroken):
        control.own(Counter.DISPATCHED).advance(901)


def test_the_second_writer_is_bounded_as_the_first(tmp_path: Path) -> None:
    control = ControlFile.create(tmp_path / CONTROL_FILE, {})
    control.own(Counter.WROTE).reset(10)
    with pytest.raises(InvariantBroken):
        control.own_second(Counter.FLUSHED).raise_to(11)


def test_the_writer_rings_only_for_who_sleeps(tmp_path: Path, doorbells: list[int]) -> None:
    control = ControlFile.create(tmp_path / CONTROL_FILE, {}, doorbells)
    cell = control.own(Counter.DISPATCHED)
    control.sleep_on(Counter.DISPATCHED, 2).arm()
    cell.advance(1)
    cell.advance(2)
    assert os.eventfd_read(doorbells[2]) == 1  # once, although two changes came
    for quiet in doorbells[:2]:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(quiet)


def test_readers_cannot_write(tmp_path: Path) -> None:
    ControlFile.create(tmp_path / CONTROL_FILE, {"pid": 1})
    seen = ControlFile.open(tmp_path / CONTROL_FILE, writable=False)
    assert seen.meta == {"pid": 1}
    with pytest.raises((ValueError, BufferError)):
        seen.own(Counter.WROTE)
    with pytest.raises((ValueError, BufferError)):
        seen.sleep_on(Counter.WROTE, 0)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff" * 9, b"[" * 3000])
def test_a_description_that_is_none_is_said(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / CONTROL_FILE
    size = len(text)
    ControlFile.create(path, {"x": "y" * size})
    held = path.read_bytes()
    begin = held.index(b'{"x"')
    head = held[: begin - 4] + size.to_bytes(4, "little") + text
    path.write_bytes(head + held[len(head) :])
    with pytest.raises(StoreError, match=r"cometmq\.control: its description"):
        ControlFile.open(path, writable=False).meta  # noqa: B018


def test_each_counter_has_lines_of_its_own(tmp_path: Path) -> None:
    control = ControlFile.create(tmp_path / CONTROL_FILE, {})
    for number, counter in enumerate(Counter):
        control.own(counter).reset(number + 1)
    assert list(control.values().values()) == list(range(1, len(Counter) + 1))


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 65536])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / CONTROL_FILE
    path.write_bytes(content)
    with pytest.raises(StoreError, match=CONTROL_FILE):
        ControlFile.open(path, writable=False)


def test_no_control_file_means_no_broker(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no broker is running"):
        ControlFile.open(tmp_path / CONTROL_FILE, writable=False)


def test_queue_table(tmp_path: Path) -> None:
    """A slot is seen when the counter has moved past it, and not before."""
    control = ControlFile.create(tmp_path / CONTROL_FILE, {})
    count = control.own(Counter.QUEUES)
    table = QueueTable.create(tmp_path / QUEUES_FILE, count)
    seen = QueueTable.open(tmp_path / QUEUES_FILE, control.read(Counter.QUEUES))
    table.fill_slot(0, "t" * 255, 7, QueueRange(2, 9))
    assert seen.range_of("t" * 255, 7) is None
    count.advance(1)
    assert seen.range_of("t" * 255, 7) == (2, 9)
    assert seen.range_of("t" * 255, 8) is None
    assert list(seen.queues()) == [("t" * 255, 7)]


def test_a_reader_is_a_doorbell_behind_all_others() -> None:
    assert max(Doorbell) == Doorbell.READER


def test_of_two_writers_the_larger_word_counts(tmp_path: Path, doorbells: list[int]) -> None:
    """Each moves its own, and either wakes who sleeps on the counter."""
    control = ControlFile.create(tmp_path / CONTROL_FILE, {}, doorbells)
    first, second = control.own(Counter.FLUSHED), control.own_second(Counter.FLUSHED)
    sleeper = control.sleep_on(Counter.FLUSHED, 0)
    for writer, value, larger in [(first, 5, 5), (second, 9, 9), (first, 7, 9), (first, 12, 12)]:
        sleeper.arm()
        writer.advance(value)
        assert os.eventfd_read(doorbells[0]) == 1
        assert sleeper.value == first.value == second.value == larger
    second.raise_to(3)  # another thread of its process was faster
    first.reset(0)
    assert sleeper.value == control.values()["flushed"] == 9
    with pytest.raises(AssertionError):
        control.own_second(Counter.WROTE)
