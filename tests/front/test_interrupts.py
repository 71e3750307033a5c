"""Ctrl-C while a command is still being imported: the end, without a word."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import environment
from interrupted import NEVER_CAME
from patience import patient

from cometmq.cli.interrupts import EXIT_INTERRUPTED, end_on_ctrl_c, ending_on_ctrl_c

DRIVER = Path(__file__).parents[1] / "kit" / "interrupted.py"
COMMANDS = {
    "topic": ["topic", "list", "--name-server", "127.0.0.1:1"],
    "send": ["msg", "send", "-t", "t", "--name-server", "127.0.0.1:1"],
    "broker": ["broker", "--port", "0"],
    "version": ["--version"],
}


def run(tmp_path: Path, when: str, command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, DRIVER, when, *COMMANDS[command]],
        input=b"", capture_output=True, timeout=patient(60), check=False, cwd=tmp_path,
        env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("version", "click"),
        ("version", "cometmq.cli.options"),
        ("topic", "cometmq.cli.topics"),
        ("topic", "cometmq.client"),
        ("topic", "cometmq.errors"),  # nobody is there, which is to be told
        ("send", "zmq"),
        ("send", "cometmq.protocol.commands"),
        ("broker", "cometmq.conf.settings"),
        ("broker", "cometmq.actors.launch.supervisor"),
        ("broker", "cometmq.actors.coordination.coordinator"),
    ],
)
@pytest.mark.slow
def test_an_interrupted_import_ends_silently(command: str, module: str, tmp_path: Path) -> None:
    done = run(tmp_path, module, command)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (EXIT_INTERRUPTED, b"", b"")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["topic", "send"])
def test_whichever_import_it_is(command: str, tmp_path: Path) -> None:
    number = 1
    while True:
        done = run(tmp_path, str(number), command)
        if done.returncode == NEVER_CAME:
            break
        assert (done.returncode, done.stdout, done.stderr.strip()) == (130, b"", b""), number
        number += 17
    assert number > 100


def test_what_others_have_decided_about_it_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_on_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert not end_on_ctrl_c()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ending_on_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
