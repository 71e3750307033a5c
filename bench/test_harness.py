"""`cometmq bench` in small: a bundle of a few seconds, so that none of it rots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("workload", ["produce", "end-to-end"])
def test_a_small_bundle(workload: str, tmp_path: Path, full: bool) -> None:
    size = ["--seconds", "10"] if full else ["--quick", "--seconds", "0.3"]
    done = subprocess.run(
        [sys.executable, "-m", "cometmq", "bench", workload, *size, "--rounds", "1",
         "--out", str(tmp_path / "bundle"), "--store", str(tmp_path)],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bundle/results.json").read_bytes())
    assert not [line for line in results["lines"] if line["faults"]]
    assert {line["system"] for line in results["lines"]} == {"cometmq", "control"}
    assert list((tmp_path / "bundle/raw").rglob("*.hlog"))
    assert "data:image/png" in (tmp_path / "bundle/report.html").read_text()
