"""Failed tests in `.ci/run` (fault 41): they run once more, alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import again
import pytest
from paths import KIT, ROOT
from patience import patient

PASSES = "def test_passes(): pass\n"
# A test that fails beside others and passes alone: a second process finds the note of the first.
ONCE = """
from pathlib import Path
import pytest

NOTES = Path(__file__).parent

@pytest.mark.parametrize("number", {numbers})
def test_once(number, request):
    note = NOTES / f"note {{number}}".replace("/", "-")
    was_there = note.exists()
    note.touch()
    if was_there:
        assert not hasattr(request.config, "workerinput")
        {second}
    else:
        {first}
"""


@dataclass
class Ended:
    status: int
    output: str
    listed: str

    @property
    def last(self) -> str:
        return self.output.splitlines()[-1]


class Suite:
    """A small test suite in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.list = folder / "listed"
        (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
        self.write("passes", PASSES)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"test_{name}.py").write_text(text)

    def once(self, numbers: str = "[1]", first: str = "assert 0", second: str = "pass") -> None:
        self.write("once", ONCE.format(numbers=numbers, first=first, second=second))

    def command(self, *options: str) -> list[str]:
        program = [sys.executable, str(KIT / "again.py"), f"--list={self.list}"]
        return [*program, "-q", "-p", "no:cacheprovider", *options, "--", str(self.folder)]

    def run(self, *options: str) -> Ended:
        done = subprocess.run(
            self.command(*options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=patient(240),
        )  # fmt: skip
        listed = self.list.read_text() if self.list.exists() else ""
        return Ended(done.returncode, done.stdout, listed)

    def runs_of(self, number: int) -> int:
        return len(list(self.folder.glob(f"note {number}")))


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_a_run_that_passes_is_all_there_is(suite: Suite) -> None:
    ended = suite.run("-n", "0")
    assert (ended.status, ended.listed) == (0, "")
    assert suite.list.exists()  # .ci/run prints it at its end
    assert "1 passed in" in ended.last


@pytest.mark.slow
def test_what_passes_alone_is_listed_and_the_run_passes(suite: Suite) -> None:
    suite.once("[1, 'a::b[c] d', 'x/y']")
    ended = suite.run("-n", "2")
    assert ended.status == 0, ended.output
    assert "3 failed, 1 passed" in ended.output
    assert "3 passed in" in ended.output
    assert sorted(ended.listed.splitlines()[1:]) == [
        "  test_once.py::test_once[1]",
        "  test_once.py::test_once[a::b[c] d]",
        "  test_once.py::test_once[x/y]",
    ]
    assert ended.output.endswith(ended.listed)


@pytest.mark.slow
def test_as_many_as_may_run_again_do(suite: Suite) -> None:
    suite.once("range(5)")
    ended = suite.run("-n", "0")
    assert ended.status == 0, ended.output
    assert len(ended.listed.splitlines()) == 1 + again.FAILED_MAX == 6


def test_more_than_that_fail_without_a_second_run(suite: Suite) -> None:
    suite.once("range(6)")
    ended = suite.run("-n", "0")
    assert (ended.status, ended.listed) == (1, "")
    assert ended.output.count("failed, 1 passed in") == 1
    assert ended.last == "FAILED: 6 tests: at most 5 would run once more, so none did"


@pytest.mark.slow
@pytest.mark.parametrize("second", ["assert 0", "pytest.skip('not now')", "pytest.xfail('no')"])
def test_what_does_not_pass_alone_fails(suite: Suite, second: str) -> None:
    """A test that is skipped in the second run fails as well: it has never passed."""
    suite.once("[1]", second=second)
    suite.write("other", ONCE.format(numbers="[2]", first="assert 0", second="pass"))
    ended = suite.run("-n", "0")
    assert ended.status == 1
    assert ended.listed.splitlines()[1:] == ["  test_other.py::test_once[2]"]
    assert "did not pass alone (1):\n  test_once.py::test_once[1]" in ended.output


@pytest.mark.parametrize("part", ["setup", "teardown"])
def test_a_fixture_that_fails_is_a_failure(suite: Suite, part: str) -> None:
    lines = ["assert 0", "yield"] if part == "setup" else ["yield", "assert 0"]
    body = "".join(f"    {line}\n" for line in lines)
    suite.write("f", f"import pytest\n@pytest.fixture\ndef f():\n{body}\ndef test_f(f): pass\n")
    ended = suite.run("-n", "0")
    assert ended.status == 1
    assert "did not pass alone (1):\n  test_f.py::test_f" in ended.output


def test_a_fixture_that_fails_once_is_run_again(suite: Suite) -> None:
    suite.write("f", """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def f():
    yield
    note = Path(__file__).with_name("note")
    is_first = not note.exists()
    note.touch()
    assert not is_first

def test_f(f): pass
""")  # fmt: skip
    ended = suite.run("-n", "0")
    assert ended.status == 0, ended.output
    assert ended.listed.splitlines()[1:] == ["  test_f.py::test_f"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("first", "said"), [
    ("import os; os._exit(0)", ""),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "a worker crashed"),
    ("raise KeyboardInterrupt", "interrupted"),
    ("pytest.exit('enough')", ""),
])  # fmt: skip
def test_what_ends_otherwise_fails_without_a_second_run(
    suite: Suite, workers: str, first: str, said: str
) -> None:
    suite.once("[1]", first=first)
    ended = suite.run("-n", workers)
    assert ended.status == 1
    assert "once more, alone" not in ended.output
    assert "\nFAILED: " in f"\n{ended.output}"
    if workers == "2":
        assert said in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("options", [(), ("--continue-on-collection-errors",)])
def test_what_cannot_be_collected_fails(
    suite: Suite, workers: str, options: tuple[str, ...]
) -> None:
    suite.once()
    suite.write("bad", "import nothing_of_that_name\n")
    ended = suite.run("-n", workers, *options)
    assert ended.status == 1
    assert "FAILED: test_bad.py cannot be collected" in ended.output
    assert "once more, alone" not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("hook", "said"), [
    ("def pytest_runtest_protocol(item): raise ValueError('inside')", "an internal error"),
    ("def pytest_sessionfinish(session): session.exitstatus = 1", "and no test failed"),
    ("def pytest_collection_modifyitems(items): items.clear()", "exit status 5"),
])  # fmt: skip
def test_an_error_outside_tests_fails(suite: Suite, workers: str, hook: str, said: str) -> None:
    (suite.folder / "conftest.py").write_text(hook + "\n")
    ended = suite.run("-n", workers)
    assert ended.status == 1
    assert said in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_tests_that_never_ran_fail(suite: Suite, workers: str) -> None:
    """A run fails if pytest stopped at a failure before the other tests."""
    suite.once()
    suite.write(
        "zz", "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_z(n): pass\n"
    )
    ended = suite.run("-n", workers, "-x")
    assert ended.status == 1
    assert "once more, alone" not in ended.output
    assert "FAILED: " in ended.last


def test_what_another_plugin_notes_fails(suite: Suite) -> None:
    """A noted problem, such as a remaining process, fails the run without a second one."""
    suite.once()
    (suite.folder / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(KIT)!r})\nimport outcomes\n"
        "def pytest_sessionfinish(session): outcomes.note_problem(session.config, 'it is left')\n"
    )
    ended = suite.run("-n", "0")
    assert (ended.status, ended.last) == (1, "FAILED: it is left")


@pytest.mark.slow
def test_a_second_run_ends_in_time(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.once(second="import threading; threading.Event().wait()")
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "0"]
    monkeypatch.setattr(again, "WITHIN_S", 3.0)
    began = time.monotonic()
    assert again.run(arguments, [str(suite.folder)], began, None) == 1
    assert time.monotonic() - began < patient(60)


@pytest.mark.slow
def test_an_interrupted_run_fails(suite: Suite) -> None:
    """Ctrl-C, which all processes of a terminal receive, fails the run."""
    suite.once(first="NOTES.joinpath('began').touch(); import threading; threading.Event().wait()")
    process = subprocess.Popen(
        suite.command("-n", "0"), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (suite.folder / "began").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=patient(60))
    assert process.returncode == again.INTERRUPTED
    assert output.splitlines()[-1].startswith("FAILED: interrupted")


def test_ci_runs_the_tests_this_way() -> None:
    text = (ROOT / ".ci/run").read_text()
    assert "tests/kit/again.py" in text
    assert 'cat "$work/again"' in text
