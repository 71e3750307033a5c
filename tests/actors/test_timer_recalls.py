"""What is recalled is not delivered, whatever the clock does meanwhile: the scheduler's part.

Log, wheel and clocks are the test's own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest
import timer_world
from timer_world import DAY_MS, World

from cometmq.actors.scheduling.beside import COUNT_MAX, COUNT_MIN
from cometmq.actors.scheduling.timer_clock import AHEADS_MAX, MOVES_MAX
from cometmq.actors.tables.timers import PASSED_MAX
from cometmq.protocol.names import TIMER_TOPIC

SEEDS: Final = (10, 12, 20_261_125)  # a message was lost by the first two
DELAY_MS: Final = 20_000


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "config").mkdir()
    return World(tmp_path, monkeypatch)


@pytest.mark.parametrize("step", [-DAY_MS, -1_000, -1_937])
@pytest.mark.parametrize("read", ["read", "not read"])
@pytest.mark.parametrize("dies", ["", "before", "after"])
def test_a_recall_before_a_step_and_one_behind(
    world: World, step: int, read: str, dies: str
) -> None:
    """In the wheel or not as the step is seen; the scheduler dies around the move."""
    names = "before", "behind", "as it moves", "never"
    dues = {name: world.send(name, DELAY_MS) for name in names}
    world.recall("before", dues["before"])
    if read == "read":
        world.run()
    world.ahead += step
    world.dies = dies
    world.recall("behind", dues["behind"])
    world.step()
    world.recall("as it moves", dues["as it moves"])
    world.wait(DELAY_MS + 1_000)
    assert world.came.keys() == {b"never"}
    assert len(world.came[b"never"]) == 1


def test_what_was_recalled_is_not_stored_anew(world: World) -> None:
    """So RocketMQ, which looks for a recall in one second alone, does not deliver it either."""
    due = world.send("recalled", DELAY_MS)
    world.send("never", DELAY_MS)
    world.recall("recalled", due)
    world.run()
    world.ahead -= DAY_MS
    world.run()
    assert [bytes(each.body) for each in world.waiting] == [b"recalled", b"never", b"0", b"never"]


@pytest.mark.parametrize("then", ["nothing", "kill"])
def test_a_recall_that_is_stored_anew_on_its_way(world: World, then: str) -> None:
    """More than two days ahead: it comes up later than what it recalls, whose time was moved."""
    delay = 3 * DAY_MS
    dues = [world.send(name, delay) for name in ("recalled", "never")]
    world.recall("recalled", dues[0])
    world.run()
    world.ahead -= 2 * DAY_MS
    world.run()
    if then == "kill":
        world.begin()
    world.wait(delay + 1_000_000)
    assert world.came.keys() == {b"never"}


def test_a_step_to_and_fro(world: World) -> None:
    """By not quite as much: what was moved lies in the second beside that of its recall."""
    world.up += -world.now % 1_000
    due = world.send("recalled", DELAY_MS)  # at the end of a second
    world.recall("recalled", due)
    world.run()
    world.ahead -= 5_000
    world.run()
    world.ahead += 5_020
    world.wait(DELAY_MS + 10_000)
    assert not world.came


def test_more_steps_than_are_remembered(world: World) -> None:
    due = world.send("recalled", DELAY_MS)
    for _ in range(AHEADS_MAX + 2):
        world.ahead -= 1_000
        world.run()
    world.recall("recalled", due)
    world.begin()
    world.wait(2 * DELAY_MS)
    assert not world.came


def test_keys_are_forgotten_when_their_second_has_passed(world: World) -> None:
    due = world.send("recalled", DELAY_MS)
    world.recall("recalled", due)
    world.ahead -= 5_000
    world.wait(DELAY_MS)
    keys = world.scheduler._recalls.keys
    assert keys == {b"t+recalled"}
    world.wait(2 * DAY_MS)
    world.send("more", 1_000)
    world.wait(2_000)
    assert not keys
    assert world.came.keys() == {b"more"}


def test_a_recall_that_is_dispatched_as_its_message_comes_due(world: World) -> None:
    """Between the last look at the topic and the one at the dispatcher."""
    due = world.send("recalled", DELAY_MS)
    world.run()
    looks: list[bool] = []

    def dispatched() -> int:
        looks.append(True)
        if len(looks) == 2:
            world.recall("recalled", due)
        return len(looks) > 1

    world.up += DELAY_MS
    world.scheduler._wrote.value, world.scheduler._dispatched = 1, dispatched
    world.run()
    assert len(looks) > 2
    assert not world.came


@pytest.mark.parametrize("others", [True, False])
def test_who_else_sends_comes_in_between(world: World, others: bool) -> None:
    """Of many that are due together less is stored at once, and others have time behind it."""
    for number in range(COUNT_MIN + 1):
        world.send(f"m{number}", DELAY_MS)
    world.run()
    world.up += DELAY_MS
    if others:
        world.scheduler._wrote.value, world.scheduler._dispatched = 1, lambda: 1
    pause = None
    while not world.came:
        pause = world.step()
    assert len(world.came) == (COUNT_MIN if others else COUNT_MIN + 1)
    assert bool(pause) == world.scheduler.rests == others
    world.wait(1_000)
    assert {len(each) for each in world.came.values()} == {1}
    assert len(world.came) == COUNT_MIN + 1


def test_who_sends_now_and_then_has_time_between_any_two_writes(world: World) -> None:
    """Also where nothing of theirs came between two: they are shorter than a sender's pauses."""
    total = 2 * COUNT_MAX + 3
    for number in range(total):
        world.send(f"m{number}", DELAY_MS)
    world.run()
    world.up += DELAY_MS
    world.scheduler._wrote.value, world.scheduler._dispatched = 1, lambda: 1
    for _ in range(2):
        before, pause = len(world.came), None
        while len(world.came) == before:
            pause = world.step()
        assert COUNT_MIN <= len(world.came) - before <= COUNT_MAX
        assert pause
    world.scheduler._beside._until = 0.0  # a while later
    assert world.step() == 0.0
    assert len(world.came) == total


def test_one_that_no_record_of_ours_can_hold_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """RocketMQ can be told to take frames of more than 16 MiB."""
    monkeypatch.setattr(timer_world, "SEGMENT", 1 << 25)
    (tmp_path / "config").mkdir()
    world = World(tmp_path, monkeypatch)
    world.send("before", DELAY_MS)
    more = f"{world._timed(world.now + DELAY_MS)}REAL_TOPIC\1t\2REAL_QID\0010\2".encode()
    place = world._log.append(world._cursors[TIMER_TOPIC], bytes(1 << 24), more)
    world.waiting.append(world.record_at(place))
    world.send("behind", DELAY_MS)
    world.wait(2 * DELAY_MS)
    assert world.came.keys() == {b"before", b"behind"}
    assert f"at physical offset {place} (" in caplog.text
    assert "is never delivered: record of" in caplog.text


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.slow
def test_whatever_happens(world: World, seed: int) -> None:
    """Steps in both directions, kills, sends and recalls, as they come."""
    print("seed", seed)
    chance = random.Random(seed)
    began: dict[str, int] = {}
    dues: dict[str, int] = {}
    recalled: set[str] = set()
    for number in range(300):
        name = f"m{number}"
        began[name] = world.up
        dues[name] = world.send(name, chance.randrange(2_000, 30_000))
        what = chance.randrange(8)
        room = min(
            PASSED_MAX - len(world.wheel.passed), MOVES_MAX - len(world.scheduler._clock.moves)
        )
        if what == 0 and room > 1:  # beyond, what waits is late
            world.ahead -= chance.choice([1_000, 3_333, 60_000])
        elif what == 1:
            world.run()  # else it is overdue as it is read
            world.ahead += chance.choice([1_000, 3_333])
        elif what == 2:
            world.dies = chance.choice(["before", "after"])
        other = chance.choice(list(dues))
        if not world.came.get(other.encode()) and dues[other] > world.now + 100:
            world.recall(other, dues[other])
            recalled.add(other)
        world.wait(chance.choice([0, 100, 1_500]))
    world.wait(600_000)
    wanted = {each.encode() for each in dues.keys() - recalled}
    assert world.came.keys() == wanted
    assert all(len(each) == 1 for each in world.came.values())
