"""Recovery that dies at any line, or of any system call, and is begun again: the same end."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import golden
import pytest
from dying import DIED, some_of
from recovery_child import die_at, fail_at_call, lines_of_a_recovery, recover

from cometmq.shm.derived.queue_builder import REBUILD_FILE
from cometmq.shm.live.queue_table import queues_before

SEED = 20_261_121
GARBAGE = b"\xda\xa3\x20\xa7" * 200


@pytest.fixture(params=["rebuild", "redo"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store with a dirty tail after a bad end.

    rebuild: a topic's queues are gone. redo: the queues of the last run are known, and the last
    entries of one are lost.
    """
    store = golden.unpack(
        "damaged-nocq" if request.param == "rebuild" else "damaged-tail", tmp_path
    )
    if request.param == "redo":
        known = tmp_path / "known"
        shutil.copytree(store, known)
        recover(known)
        shutil.copy(known / "cometmq.queues.before", store)
        with (store / "consumequeue/dmg_Apache/1/00000000000000004000").open("r+b") as segment:
            segment.seek(20 * 45)
            segment.write(bytes(20 * 5))
    else:
        with (store / "commitlog/00000000000000262144").open("r+b") as segment:
            segment.seek(11_032 + 40)
            segment.write(GARBAGE)
    return store


def contents(store: Path) -> dict[str, bytes]:
    """Log and queues; that nothing is left to be rebuilt."""
    assert not (store / REBUILD_FILE).exists()
    assert len(queues_before(store)) == 4
    return {
        str(path.relative_to(store)): path.read_bytes()
        for folder in ("commitlog", "consumequeue")
        for path in sorted((store / folder).rglob("*"))
        if path.is_file()
    }


def copy_of(store: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    return copy


@pytest.mark.slow
def test_killed_at_any_line(damaged: Path, tmp_path: Path) -> None:
    """At the first pass of a line, and at a later pass of those that are passed again.

    At 20 lines of each kind of recovery; with COMETMQ_ALL_LINES at all of them, in 3 minutes.
    """
    lines = lines_of_a_recovery(copy_of(damaged, tmp_path))
    wanted = contents(tmp_path / "copy")
    assert len(lines) > 200
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    for line, passes in some_of(sorted(lines.items()), 20):
        for nth in {1, chance.randint(1, passes)}:
            copy = copy_of(damaged, tmp_path)
            assert die_at(copy, line, nth) == DIED, (line, nth)
            recover(copy)
            assert contents(copy) == wanted, (line, nth)


@pytest.mark.slow
def test_any_system_call_fails(damaged: Path, tmp_path: Path) -> None:
    recover(copy_of(damaged, tmp_path))
    wanted = contents(tmp_path / "copy")
    nth = 1
    while fail_at_call(copy_of(damaged, tmp_path), nth):
        recover(tmp_path / "copy")
        assert contents(tmp_path / "copy") == wanted, nth
        nth += 1
    assert nth > 20
