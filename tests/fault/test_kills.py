"""The short form of the kill campaigns; the long one is `python -m tests.fault`.

A store that failed is left in pytest's folder; the seed is in the test's text.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from family import EndedEarly, RunningBroker
from fault import launcher, points
from fault.campaigns import Options, Tally, append_tally, read_tally, report
from fault.kills import ELSEWHERE, kill_at_one, kill_one, one_round
from fault.pairs import VICTIMS, Pair, fault_with, pair_one
from fault.points import POINTS, Point, Points
from fault.rig import TARGETS, Outcome, Rig
from patience import patient

from cometmq.actors.launch import ending
from cometmq.shm.live.control import Counter

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SEED = 20
KILLS_EACH = 1  # in either flush mode


def judged(outcome: Outcome) -> Outcome:
    assert outcome.ok, f"{outcome.folder}:\n{outcome.verdict}"
    assert outcome.verdict.counts["lost"] == 0
    return outcome


@pytest.mark.parametrize("sync", [False, True])
def test_kill_9_of_each_process(sync: bool, tmp_path: Path) -> None:
    """Each of them, under load, in one life of the clients; the long form goes on and on."""
    options = Options(quiet=True)
    outcome = judged(
        one_round(
            options,
            tmp_path / "rig",
            SEED + sync,
            sync,
            KILLS_EACH * len(TARGETS),
            lambda rig, number: kill_one(rig, TARGETS, number),
        )
    )
    lines = outcome.tally("kills", SEED, sync)
    assert {line.target for line in lines} == set(TARGETS)
    assert sum(line.faults for line in lines) == KILLS_EACH * len(TARGETS)
    assert sum(line.acknowledged for line in lines) == outcome.verdict.counts["acknowledged"]
    assert max(ms for line in lines for ms in line.recover_ms) < 15_000


@pytest.mark.parametrize("sync", [False, True])
def test_kill_9_at_each_point(sync: bool, tmp_path: Path) -> None:
    """Half of the points in either mode; the long form has them all in both."""
    load = [
        point for point in POINTS.values() if point.when != "clean" and point.when not in ELSEWHERE
    ]
    chosen = [point for point in load if not point.sync_only][sync::2]
    if sync:
        chosen += [point for point in load if point.sync_only]
    outcome = judged(
        one_round(
            Options(quiet=True),
            tmp_path / "rig",
            SEED + sync,
            sync,
            len(chosen),
            partial(kill_at_one, chosen),
        )
    )
    killed = [op for op in outcome.faults if not op.value.startswith("restart")]
    assert {op.note for op in killed} == {point.name for point in chosen}


@pytest.mark.parametrize("sync", [False, True])
def test_two_faults_at_a_time(sync: bool, tmp_path: Path) -> None:
    """Each process is killed while another fault is not made good yet, or by it.

    Half of the processes in either mode; `python -m tests.fault pairs` has them all in both.
    """
    victims = VICTIMS[sync::2]
    outcome = judged(
        one_round(
            Options(quiet=True),
            tmp_path / "rig",
            SEED + sync,
            sync,
            len(victims),
            lambda rig, number: pair_one(rig, victims, number),
        )
    )
    killed = [op for op in outcome.faults if not op.value.startswith("restart")]
    assert len(killed) == len(victims)


def test_an_end_meets_a_kill(tmp_path: Path) -> None:
    """The order to end, and a child killed just before or after: it is an orderly end."""
    with Rig(tmp_path / "rig", seed=SEED) as rig:
        for role in ("commitlog", "dispatcher", "flush", "coordinator"):
            fault_with(rig, Pair("kill", role, "end", "broker"))
            fault_with(rig, Pair("end", "broker", "kill", role))
        judged(rig.finish())


def test_kill_9_while_old_segments_go(tmp_path: Path) -> None:
    chosen = [point for point in POINTS.values() if point.when == "clean"]
    outcome = judged(
        one_round(
            Options(quiet=True),
            tmp_path / "rig",
            SEED,
            False,
            len(chosen),
            partial(kill_at_one, chosen),
            retention=True,
        )
    )
    assert outcome.verdict.counts["expired"] > 0


def test_each_process_stands_still(tmp_path: Path) -> None:
    """SIGSTOP for a second, SIGCONT: nothing is lost, and everything goes on."""
    with Rig(tmp_path / "rig", seed=SEED) as rig:
        for target in TARGETS:
            rig.pause(target, rig.chance.uniform(0.7, 1.5))
        judged(rig.finish())


# --- the points themselves ------------------------------------------------------------------------


def test_a_point_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Point("append.gone", "commitlog", "cometmq.shm.log.commit_log:CommitLog.gone", "before")
    with Points(tmp_path / "points"):
        monkeypatch.setattr(points, "POINTS", {gone.name: gone})
        with pytest.raises(AttributeError, match=r"CommitLog\.gone is gone, see append\.gone"):
            points.install(tmp_path / "points")
    assert Counter.FLUSHED.name in POINTS["flush.flushed.before"].target


def test_a_broker_does_not_start_without_its_points(tmp_path: Path) -> None:
    with Points(tmp_path / "points") as armed:
        environ = armed.environ | {points.FOLDER_VARIABLE: str(tmp_path / "no")}
        with pytest.raises(EndedEarly):
            RunningBroker(tmp_path / "store", module=Points.MODULE, environ=environ).close()
    assert launcher.__name__ == Points.MODULE


def test_who_is_dead_but_not_buried_is_not_waited_for() -> None:
    """After the zygote's end that is init's to do, and in a container often nobody does it."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    began = time.monotonic()
    assert ending.has_ended(child, patient(10))
    assert time.monotonic() - began < patient(9)
    assert os.waitpid(child, 0) == (child, 0)


# --- the tally ------------------------------------------------------------------------------------


def test_the_tally_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "tally.jsonl"
    for seed in (1, 2):
        append_tally(
            Tally(
                campaign="kills", seed=seed, commit="abc", date="2026-01-01", fault="kill",
                target="flush", flush="SYNC_FLUSH", faults=3, acknowledged=1_000, lost=seed - 1,
                recover_ms=[1.0, 2.0, 300.0], outcome="ok" if seed == 1 else "1 LOST",
            ),
            path,
        )  # fmt: skip
    text = report(read_tally(path))
    assert "| kills | kill | flush | SYNC_FLUSH | 6 | 2,000 | 1 | 0 | 2 / 300 / 300 | 1 |" in text
    assert "Commits: abc." in text
