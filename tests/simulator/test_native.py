"""The compiled form of the simulator is the interpreted one, or it says that it is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.campaign import Chunk, add, append_line, new_line, of_chunk, read_lines

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 60
FEW = 6  # where nothing is compiled, there is one simulator, not two to compare


def native(
    tally: Path, *, search: Path, schedules: int = SCHEDULES
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulator.native", "--tally", str(tally), "--seed", "0"]
    command += ["--schedules", str(schedules), "--processes", "1"]
    quickly_made = {"MYPYC_OPT_LEVEL": "0", "MYPYC_DEBUG_LEVEL": "0"}  # it runs for seconds here
    environment = {**os.environ, **quickly_made, "PYTHONPATH": str(search)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def interpreted(tally: Path, schedules: int = SCHEDULES) -> None:
    for replicas in (3, 5):
        line = new_line(replicas, 0)
        add(line, *of_chunk(Chunk(replicas, 0, schedules)))
        append_line(line, tally)


@pytest.mark.slow
def test_a_seed_means_the_same(tmp_path: Path) -> None:
    done = native(tmp_path / "native", search=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")  # it was compiled
    interpreted(tmp_path / "interpreted")
    assert read_lines(tmp_path / "native") == read_lines(tmp_path / "interpreted")


@pytest.mark.slow
def test_without_a_compiler_it_is_interpreted(tmp_path: Path) -> None:
    (tmp_path / "mypyc.py").write_text("raise ImportError('none here')")
    done = native(tmp_path / "native", search=tmp_path, schedules=FEW)
    assert done.returncode == 0, done.stderr
    assert "cannot be compiled, so it is interpreted" in done.stderr
    assert "none here" in done.stderr
    interpreted(tmp_path / "interpreted", FEW)
    assert read_lines(tmp_path / "native") == read_lines(tmp_path / "interpreted")
