"""`cometmq bench` in small: a bundle of a few seconds, so that none of it rots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patient


def lines_of(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Of a run without a fault, which has left nothing but its bundle."""
    (stores := tmp_path / "stores").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "cometmq", "bench", *arguments, "--rounds", "1",
         "--out", str(tmp_path / "bundle"), "--store", str(stores)],
        capture_output=True, text=True, timeout=patient(110),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(stores.iterdir())
    assert not list((tmp_path / "bundle").rglob("commitlog"))
    lines: list[dict[str, Any]] = json.loads((tmp_path / "bundle/results.json").read_bytes())[
        "lines"
    ]
    assert not [line for line in lines if line["faults"]]
    return lines


@pytest.mark.slow
def test_a_small_bundle(tmp_path: Path, full: bool) -> None:
    """Its producers are those of `produce`; consumers come on top."""
    size = ["--seconds", "10"] if full else ["--quick", "--seconds", "0.3"]
    lines = lines_of(tmp_path, "end-to-end", *size)
    assert {line["system"] for line in lines} == {"cometmq", "control"}
    assert list((tmp_path / "bundle/raw").rglob("*.hlog"))
    assert "data:image/png" in (tmp_path / "bundle/report.html").read_text()


@pytest.mark.slow
def test_what_exceeds_memory_in_small(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "beyond-memory", "--quick", "--beyond", "64m", "--no-controls")
    (values,) = [line["values"] for line in lines]
    assert (
        0
        < values["to_disk_mb_per_s"]
        == pytest.approx(
            values["of_disk"] * max(values["disk_direct_mb_per_s"], values["disk_cached_mb_per_s"])
        )
    )
    assert "NOT beyond memory" in lines[0]["notes"][0]
