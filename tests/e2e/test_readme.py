"""The README's program, run as it stands."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from patience import patient

from cometmq import Broker

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_program(tmp_path: Path) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program.count("tcp://127.0.0.1:9876") == 2
    with Broker(tmp_path / "store") as broker:
        program = program.replace("tcp://127.0.0.1:9876", broker.name_server)
        command = [sys.executable, "-u", "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            assert run.stdout is not None
            line = run.stdout.readline()
            run.send_signal(signal.SIGINT)  # it would go on reading
            out, err = run.communicate(timeout=patient(60))
        assert (run.returncode, out, err) == (0, b"", b"")  # cleanly, without a traceback
    assert re.fullmatch(rb"b'paid' \d 0\n", line)


def test_the_service(tmp_path: Path) -> None:
    _, program, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=patient(60))
    with (
        Broker(tmp_path / "store") as broker,
        broker.consumer("g", "orders", start="earliest") as c,
    ):
        assert next(iter(c)).body == b"paid"
