"""Clients in a process in which gevent has replaced threads and sockets (Fault 25)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

from cometmq import Broker

CLIENTS = {
    "Producer": "Producer({address!r})",
    "Consumer": "Consumer({address!r}, 'g', 't')",
    "PopConsumer": "PopConsumer({address!r}, 'g', 't')",
    "Admin": "Admin({address!r})",
    "AsyncProducer": "AsyncProducer({address!r})",
    "AsyncConsumer": "AsyncConsumer({address!r}, 'g', 't')",
    "AsyncPopConsumer": "AsyncPopConsumer({address!r}, 'g', 't')",
    "Broker": "Broker({store!r})",
}
PROGRAM = """
from gevent import monkey
{patch}
import cometmq
from cometmq import *
from cometmq.errors import MonkeyPatched
try:
    cometmq.{call}
except MonkeyPatched as error:
    print(error)
"""


def run(patch: str, call: str) -> str:
    program = PROGRAM.format(patch=patch, call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(120),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", CLIENTS)
def test_what_gevent_has_patched_is_refused(kind: str, tmp_path: Path) -> None:
    """Constructors raise MonkeyPatched; futures ended in NotConfirmed, and `poll` found nothing."""
    pytest.importorskip("gevent", reason="gevent is not installed (pip install -e '.[dev]')")
    call = CLIENTS[kind].format(address="127.0.0.1:1", store=str(tmp_path / "store"))
    said = run("monkey.patch_all()", call)
    assert "gevent has replaced thread" in said
    assert "gthread" in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["thread", "socket", "select"])
def test_a_part_that_is_patched_is_enough(name: str) -> None:
    pytest.importorskip("gevent", reason="gevent is not installed (pip install -e '.[dev]')")
    said = run(f"monkey.patch_{name}()", "Admin('127.0.0.1:1')")
    assert f"gevent has replaced {name}" in said


def test_gevent_without_patches_is_no_matter(tmp_path: Path) -> None:
    pytest.importorskip("gevent", reason="gevent is not installed (pip install -e '.[dev]')")
    with Broker(tmp_path / "store", profile="test") as broker:
        said = run("", f"Producer({broker.name_server!r}).send('t', b'x')")
    assert not said
