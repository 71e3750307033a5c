"""The replication core in random courses of faults, and what has come of the long form so far."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from simulator.campaign import TALLY, Line, append_line, next_seed, read_lines, report
from simulator.schedule import STEPS, Schedule, run

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1000
CHUNKS = [(3, first) for first in range(0, 4 * CHUNK, CHUNK)]
CHUNKS += [(5, first) for first in range(0, 2 * CHUNK, CHUNK)]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "first"), CHUNKS)
def test_nothing_is_lost(replicas: int, first: int) -> None:
    acks = epochs = available = 0
    for seed in range(first, first + CHUNK):
        outcome = run(seed, replicas)
        assert not outcome.violation, f"{replicas} replicas, seed {seed}: {outcome.violation}"
        acks += outcome.acks
        epochs += outcome.epochs
        available += outcome.is_available
    # Something happens in them.
    assert acks > 5 * CHUNK
    assert epochs > 1.3 * CHUNK
    assert available > 0.7 * CHUNK


def test_a_seed_tells_all() -> None:
    one, other = Schedule(7, 3), Schedule(7, 3)
    assert one.run() == other.run()
    assert [node.log for node in one.nodes] == [node.log for node in other.nodes]


def test_without_faults_all_is_acknowledged() -> None:
    schedule = Schedule(1, 5, steps=0)
    schedule.world.crash = 0.0
    outcome = schedule.run()
    assert not outcome.violation
    assert outcome.is_available
    assert schedule.world.acks == schedule.world.made > 0
    assert STEPS > 100


def test_the_tally_is_whole_and_says_what_it_has_seen() -> None:
    """Seeds follow each other, and no line was run twice."""
    lines = read_lines()
    assert lines, f"{TALLY} is empty"
    assert sum(line.schedules for line in lines) >= 150_000
    for replicas in {line.replicas for line in lines}:
        spans = sorted(
            (line.seed, line.seed + line.schedules) for line in lines if line.replicas == replicas
        )
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert "| 3 |" in report(lines)


def test_a_campaign_goes_on_behind_the_last_one(tmp_path: Path) -> None:
    tally = tmp_path / "tally.jsonl"
    append_line(Line(replicas=3, seed=100, schedules=50, commit="c", date="d"), tally)
    command = [sys.executable, "-m", "tests.simulator", "--tally", str(tally)]
    command += ["--schedules", "30", "--replicas", "3", "--processes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = read_lines(tally)
    assert [(line.seed, line.schedules) for line in lines] == [(100, 50), (150, 30)]
    assert lines[1].acks > 0
    assert next_seed(lines, 3) == 180
    assert next_seed(lines, 5) == 0


def test_a_planted_bug_is_told_and_not_tallied(tmp_path: Path) -> None:
    tally = tmp_path / "tally.jsonl"
    command = [sys.executable, "-m", "tests.simulator", "--tally", str(tally), "--mutant", "H"]
    command += ["--schedules", "60", "--replicas", "3", "--processes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "VIOLATED: 3 replicas, seed " in done.stderr
    assert not tally.exists()
