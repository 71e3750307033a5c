"""Failed tests cause no failures of other tests (fault 39)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SEARCH
from patience import patient

CONFTEST = """
import aftermath

def pytest_configure(config):
    config.pluginmanager.register(aftermath.Aftermath(), aftermath.NAME)
"""
FAILS = """
import asyncio, gc, threading
from pathlib import Path
import pytest
from cometmq import Admin, AsyncProducer, Consumer, PopConsumer, Producer

NOWHERE = "tcp://127.0.0.1:1"
go_on, is_over = threading.Event(), threading.Event()

class Cycle:
    def __init__(self, held): self.held, self.itself = held, self

def fails_later():
    go_on.wait()
    try:
        raise RuntimeError("of the test before")
    finally:
        is_over.set()
"""
NEXT = """
def test_next():
    gc.collect()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "left": thread.join()
"""
CASES = {
    "a producer": "producer = Producer(NOWHERE); assert 0",
    "a pop consumer": "consumer = PopConsumer(NOWHERE, 'g', 't'); assert 0",
    "an admin's file": "admin, file = Admin(NOWHERE), open('/dev/null'); assert 0",
    "a producer in a cycle": "held = Cycle(Producer(NOWHERE)); assert 0",
    "a producer of an error": "raise ValueError(Producer(NOWHERE))",
    "a thread": "threading.Thread(target=fails_later, name='left').start(); assert 0",
}


def run(tmp_path: Path, text: str) -> str:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_two.py").write_text(FAILS + text + NEXT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SEARCH}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=patient(120),
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_what_a_failed_test_leaves_is_its_own(tmp_path: Path, what: str) -> None:
    output = run(tmp_path, f"\ndef test_first(): {CASES[what]}\n")
    assert "1 failed, 1 passed" in output, output


@pytest.mark.slow
def test_a_fixture_that_fails_leaves_nothing_either(tmp_path: Path) -> None:
    fixture = "@pytest.fixture\ndef broken():\n    producer = Producer(NOWHERE)\n    assert 0\n"
    output = run(tmp_path, f"\n{fixture}\ndef test_first(broken): pass\n")
    assert "1 passed, 1 error" in output, output


@pytest.mark.slow
def test_what_a_passed_test_leaves_is_an_error_still(tmp_path: Path) -> None:
    output = run(tmp_path, "\ndef test_first(): held = Cycle(Producer(NOWHERE))\n")
    assert "failed" in output or "error" in output, output
    assert "a producer was not closed" in output
