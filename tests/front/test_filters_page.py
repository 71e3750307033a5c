"""The programs of docs/filters.md, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import patient

from cometmq import Broker
from cometmq.protocol.filters.limits import DEPTH_MAX, NAMES_MAX, OPERATORS_MAX, TEXT_MAX

PAGE = Path(__file__).resolve().parents[2] / "docs" / "filters.md"
SERVER = "tcp://127.0.0.1:9876"


def test_the_programs(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) == 2
    with Broker(tmp_path / "store", profile="test") as broker:
        for program in programs:
            text = program.replace(SERVER, broker.name_server)
            run = subprocess.run(
                [sys.executable, "-c", text], capture_output=True, timeout=patient(90)
            )
            assert run.returncode == 0, (program, run.stderr.decode())


def test_the_limits() -> None:
    said = f"{TEXT_MAX:,} bytes, {OPERATORS_MAX:,} operators, {NAMES_MAX} different properties"
    assert said in PAGE.read_text()
    assert f"needs {DEPTH_MAX} values at once" in PAGE.read_text()
