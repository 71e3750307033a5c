"""Run pytest, and what failed once more, alone. No tests here.

    python tests/kit/again.py [--until SECONDS] [--list FILE] PYTEST_OPTION... [-- PATH...]

A test that fails while others run beside it and passes alone has met a limit of this machine, or
shows a race. The run passes, and its last lines list such tests: each is to be fixed. These fail at
once, and nothing runs a second time: more failed tests than `FAILED_MAX`, errors of collection, a
worker or pytest that crashes, internal errors, interrupted runs, collected tests that never ran,
processes that are left.

As a plugin (`-p tests.kit.again --outcomes FILE`) it writes down how a run ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
NAME: Final = "outcomes"  # of the plugin, by which others find it
FAILED_MAX: Final = 5
WITHIN_S: Final = 300.0  # that the second run has in any case
INTERRUPT_S: Final = 30.0  # pytest ends what runs, and prints its closing lines
INTERRUPTED: Final = 130  # the exit status of a shell for that


@dataclass
class Outcomes:
    """How a run of pytest ended."""

    root: str = ""
    failed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    #: What makes a run fail whatever a second one shows, in words.
    problems: list[str] = field(default_factory=list)
    closing: str = ""  # how many tests ended how, in pytest's words


# --- the plugin -----------------------------------------------------------------------------------


class Recorder:
    """In the process that was started, not in its workers: it hears of each test from them."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._collected: dict[str, None] = {}
        self._reported: set[str] = set()
        self._passed: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self.problems: list[str] = []  # of others as well
        self._began = time.monotonic()
        self._closing = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update((item.nodeid, None) for item in getattr(session, "items", ()))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected.update((each, None) for each in ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(f"{report.nodeid or 'the suite'} cannot be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reported.add(report.nodeid)
        if report.failed:
            self._failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self._passed[report.nodeid] = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.problems.append(f"a worker crashed in {crashitem}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error is not None:
            self.problems.append(f"worker {node.gateway.id} ended: {error}")

    def pytest_internalerror(self, excrepr: object) -> None:
        last = str(excrepr).strip().splitlines()[-1:]
        self.problems.append(f"an internal error of pytest: {''.join(last)}")

    def pytest_keyboard_interrupt(self) -> None:
        self.problems.append("the run was interrupted")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        parts, _ = terminalreporter.build_summary_stats_line()
        took_s = time.monotonic() - self._began
        self._closing = f"{', '.join(text for text, _ in parts)} in {took_s:.0f} s"

    def pytest_unconfigure(self) -> None:
        """Behind everything that others do at the end of the session."""
        never = [each for each in self._collected if each not in self._reported]
        if never:
            some = ", ".join(never[:3])
            self.problems.append(f"{len(never)} collected tests did not run, such as {some}")
        found = Outcomes(
            root=str(self._root),
            failed=list(self._failed),
            passed=[each for each in self._passed if each not in self._failed],
            problems=self.problems,
            closing=self._closing,
        )
        self._path.write_text(json.dumps(asdict(found)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="File that the outcomes are written to.")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path, config.rootpath), NAME)


def note_problem(config: pytest.Config, text: str) -> None:
    """Of a conftest: something that a second run of a test does not make good."""
    recorder = config.pluginmanager.get_plugin(NAME)
    if recorder is not None:
        recorder.problems.append(text)


# --- the program ----------------------------------------------------------------------------------


def run_pytest(arguments: list[str], within_s: float | None = None) -> Outcomes:
    """Run it in a process of its own, with our output.

    Args:
    within_s: Interrupt it then.
    """
    with tempfile.TemporaryDirectory(prefix="cometmq-outcomes-") as folder:
        path = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-p", "tests.kit.again", f"--outcomes={path}"]
        process = subprocess.Popen([*command, *arguments], cwd=ROOT)
        late = ""
        try:
            status = process.wait(within_s)
        except subprocess.TimeoutExpired:
            late = f"it did not end within {within_s:.0f} s"
            status = _end(process)
        except KeyboardInterrupt:
            _wait_for_end(process)
            raise
        found = _read(path)
    if late:
        found.problems.insert(0, late)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        found.problems.append(f"pytest ended with exit status {status}")
    elif status and not found.failed and not found.problems:
        found.problems.append(f"pytest ended with exit status {status:d}, and no test failed")
    return found


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return _wait_for_end(process)


def _wait_for_end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(path: Path) -> Outcomes:
    try:
        return Outcomes(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        return Outcomes(problems=[f"pytest did not come to its end ({error})"])


def say(text: str = "") -> None:
    print(text, flush=True)


def fail(*problems: str) -> int:
    for each in problems:
        say(f"FAILED: {each}")
    return 1


def as_list(title: str, tests: list[str]) -> str:
    return "\n".join([f"{title} ({len(tests)}):", *(f"  {each}" for each in tests)])


def run(options: list[str], paths: list[str], until: float, listed: Path | None) -> int:
    """Both runs; the exit status of the whole.

    Args:
    until: When the second one is to have ended, by the clock `monotonic`.
    listed: Tests that passed only alone are written there as well.
    """
    first = run_pytest([*options, *paths])
    if first.problems:
        return fail(*first.problems)
    if not first.failed:
        return 0
    count = len(first.failed)
    if count > FAILED_MAX:
        return fail(f"{count} tests: at most {FAILED_MAX} would run once more, so none did")
    say(f"\n--- what failed runs once more, alone ({count})")
    places = [f"{first.root}{os.sep}{each}" for each in first.failed]
    second = run_pytest([*options, "-n", "0", *places], max(WITHIN_S, until - time.monotonic()))
    say(f"\nfirst run:  {first.closing}\nsecond run: {second.closing}")
    passed = [each for each in first.failed if each in second.passed]
    left = [each for each in first.failed if each not in second.passed]
    if passed:
        shown = as_list("passed only when they ran alone, each is a fault to be fixed", passed)
        say(shown)
        if listed:
            listed.write_text(shown + "\n")
    if left:
        say(as_list("did not pass alone", left))
    if left or second.problems:
        return fail(*second.problems, *([f"{len(left)} tests, twice"] if left else []))
    return 0


def main(arguments: list[str]) -> int:
    before, paths = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        before, paths = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--until", type=float, default=0.0, help="Seconds from now that both runs may take."
    )
    parser.add_argument("--list", type=Path, help="File for tests that passed only alone.")
    ours, options = parser.parse_known_args(before)
    began = time.monotonic()
    try:
        return run(options, paths, began + ours.until, ours.list)
    except KeyboardInterrupt:
        fail(f"interrupted after {time.monotonic() - began:.0f} s")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
