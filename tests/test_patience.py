"""`COMETMQ_TEST_PATIENCE` (fault 40) multiplies every limit, also those of pytest-timeout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import limits
import pytest
from paths import KIT, SEARCH
from patience import VARIABLE, exactly, factor_of, patient

SUITE = """
import pytest

def limit_of(item):
    mark = item.get_closest_marker("timeout")
    if mark is None:
        return float(item.config._env_timeout)
    return mark.args[0] if mark.args else mark.kwargs["timeout"]

def test_plain(request): assert limit_of(request.node) == {plain}

@pytest.mark.timeout(20)
def test_marked(request): assert limit_of(request.node) == {marked}

@pytest.mark.timeout(timeout=7, method="thread")
def test_named(request):
    assert limit_of(request.node) == {named}
    assert request.node.get_closest_marker("timeout").kwargs["method"] == "thread"
"""
CONFTEST = """
import stretching

def pytest_configure(config):
    stretching.register(config)
    stretching.register(config)  # as of a second conftest.py
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("factor", "options", "plain", "marked", "named"), [
    ("1", [], 300, 20, 7), ("5", [], 1500, 100, 35), ("0.5", [], 150, 10, 4),
    ("5", ["--timeout=40"], 40, 100, 35),
])  # fmt: skip
def test_limits_of_tests(
    tmp_path: Path, workers: str, factor: str, options: list[str], plain: int, marked: int,
    named: int,
) -> None:  # fmt: skip
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 300\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    text = SUITE.format(plain=plain, marked=marked, named=named)
    (tmp_path / "test_limits.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", *options],
        cwd=tmp_path, env=os.environ | {VARIABLE: factor, "PYTHONPATH": SEARCH},
        capture_output=True, text=True, check=False, timeout=patient(120),
    )  # fmt: skip
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def in_child(factor: str, expression: str) -> str:
    program = f"from patience import exactly, patient; print({expression})"
    environ = os.environ | {VARIABLE: factor, "PYTHONPATH": str(KIT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ,
        capture_output=True, text=True, check=True, timeout=patient(60),
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(("factor", "expression", "value"), [
    ("5", "patient(60)", "300"), ("5", "patient(0.5)", "2.5"), ("1.5", "patient(5)", "8"),
    ("1", "patient(60), patient(60.0)", "60 60.0"), ("5", "exactly(7)", "7"),
])  # fmt: skip
def test_a_limit_is_multiplied(factor: str, expression: str, value: str) -> None:
    """An int limit stays an int, which is never shorter than the exact product."""
    assert in_child(factor, expression) == value


def test_without_the_variable_limits_are_as_written() -> None:
    if VARIABLE not in os.environ:
        assert (patient(60), patient(0.5), exactly(3)) == (60, 0.5, 3)


@pytest.mark.parametrize("text", ["", "five", "0", "-1", "nan", "inf", "1e400"])
def test_a_factor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a factor above 0 is expected"):
        factor_of(text)


# Lines whose limit the factor does not change, and lines that are legal.
BYPASSING = """
event.wait(60)
thread.join(60)
future.result(30)
lock.acquire(True, 10)
queue.get(timeout=5)
subprocess.run(command, timeout=100)
process.communicate(timeout=2 * 30)
deadline = time.monotonic() + 60
deadline, pause = began + 60, threading.Event()
assert time.monotonic() - began < 20
assert 20 > time.monotonic() - began
until(lambda: done, 30)
socket.poll(10_000)
dealer.linger, dealer.rcvtimeo = 0, 60_000
Producer(address, timeout_s=20)
Producer(address, **{"timeout_s": 20})
asyncio.wait_for(work(), 30)
psutil.wait_procs(left, 10)
event.wait(60 if slow else 10)
event.wait(min(60, left))
def ask(role, timeout_s=30): ...
def ask(role, *, timeout_s=30): ...
if time.monotonic() - began > 20: raise TimeoutError
assert took < 20
threading.Timer(90, kill)
"""
LEGAL = """
event.wait(0.01)
event.wait(timeout=1)
thread.join()
thread.join(patient(60))
", ".join(names)
os.path.join("a", 60)
queue.get(timeout=exactly(5))
world.wait(5_000)
assert took >= 20
consumer.poll(100)
consumer.poll(10_000, timeout_s=1)
deadline = time.monotonic() + patient(60)
assert time.monotonic() - began >= 20
assert time.monotonic() - began < 4 * LIMIT_S
def ask(role, timeout_s=patient(30)): ...
event.wait(LIMIT_S)
event.wait(2 * LIMIT_S)
event.wait(min(LIMIT_S, left))
@pytest.mark.timeout(300)
def test(): ...
"""


def lines_found(tmp_path: Path, text: str) -> list[int]:
    path = tmp_path / "bypassing.py"
    path.write_text(f"LATE_S = 60\nLIMIT_S = patient(60)\n{text}")
    found = limits.Modules([path]).limits()
    return sorted(each.used_at - 3 for each in found)


def test_what_bypasses_the_factor_is_found(tmp_path: Path) -> None:
    found = lines_found(tmp_path, BYPASSING)
    assert sorted(set(found)) == list(range(1, len(BYPASSING.splitlines())))


@pytest.mark.parametrize("use", ["LATE_S", "2 * LATE_S", "bypassing.LATE_S", "min(LATE_S, left)"])
def test_a_constant_is_found_where_it_is_used(tmp_path: Path, use: str) -> None:
    assert lines_found(tmp_path, f"\nevent.wait({use})\n") == [1]


def test_what_is_found_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("from __future__ import annotations\nevent.wait(60), event.wait(2 * 30)\n")
    limits.make_patient(path, [each.node for each in limits.Modules([path]).limits()])
    assert path.read_text() == (
        "from __future__ import annotations\n\nfrom patience import patient\n"
        "event.wait(patient(60)), event.wait(patient(2 * 30))\n"
    )
    assert limits.Modules([path]).limits() == []


def test_nothing_else_is_found(tmp_path: Path) -> None:
    assert lines_found(tmp_path, LEGAL) == []


def test_constants_that_are_called_limits_are_found(tmp_path: Path) -> None:
    path = tmp_path / "constants.py"
    path.write_text("READY_S = 90\nSTART_TIMEOUT_S: Final = 2 * 60\nSESSION_S = 10\nWAIT_S = 1\n")
    assert [each.node.lineno for each in limits.Modules([path]).limits()] == [1, 2]


def test_a_constant_of_another_module_is_found(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("from typing import Final\nWAIT_S: Final = 60\n")
    other.write_text("from one import WAIT_S\nevent.wait(WAIT_S)\n")
    (found,) = limits.Modules([other, one]).limits()
    assert (found.path, found.node.lineno, found.used_at) == (one, 2, 2)
