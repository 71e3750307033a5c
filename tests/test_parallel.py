"""What the tests are run by: a process of it that crashes costs the test that it was at, and no
other, and is told how it ended."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import parallel
import pytest
from patience import patient

CONFTEST = """
import crashes
import pytest
from parallel import Scheduler, arrange


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: last")


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return Scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        arrange(items, config.workerinput)


def pytest_sessionstart(session):
    if hasattr(session.config, "workerinput"):
        crashes.keep_traces(session.config.workerinput)


def pytest_handlecrashitem(report):
    report.longrepr = f"{report.longrepr}\\n{crashes.words(report.node)}"
"""
FILES, TESTS = 40, 25  # that are done while another process is started
ORDINARY = f"""
import pytest

@pytest.mark.parametrize("number", range({TESTS}))
def test_it(number): pass
"""
CRASH = """
import os, signal

def test_it(): os.kill(os.getpid(), signal.SIGSEGV)
"""
ALONE = """
import pytest

@pytest.mark.alone
def test_it(): pass
"""


@pytest.mark.slow
def test_a_process_that_crashes(tmp_path: Path) -> None:
    contents = {"conftest.py": CONFTEST, "test_crash.py": CRASH, "test_alone.py": ALONE}
    contents |= {f"test_{number}.py": ORDINARY for number in range(FILES)}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    kit = Path(parallel.__file__).parent
    options = ("-q", "-n", "2", "-p", "no:cacheprovider", f"-o=pythonpath={kit}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patient(240),
    )  # fmt: skip
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"1 failed, {FILES * TESTS + 1} passed"), done.stdout + done.stderr
    assert "it was ended by SIGSEGV" in done.stdout
    assert 'test_crash.py", line 4 in test_it' in done.stdout


def test_what_waits_is_spread_over_the_run() -> None:
    files = {f"file {number}": 1 + number % 7 for number in range(30)}
    single = [f"single {number:02}" for number in range(60)]
    found = parallel.spread(files | dict.fromkeys(single, parallel.SLOW), single)
    in_order = sorted(found, key=found.__getitem__)
    weights = [files[unit] for unit in in_order if unit in files]
    assert weights == sorted(weights, reverse=True)
    places = [found[unit] / parallel.SINGLE_UNTIL for unit in single]
    for tenth in range(10):
        within = sum(tenth <= 10 * place < tenth + 1 for place in places)
        assert 5 <= within <= 7, tenth
    neighbours = [abs(one - other) for one, other in pairwise(places)]
    assert min(neighbours) > 0.3
