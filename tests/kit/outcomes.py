"""Plugin that writes the outcome of a pytest run to a file, for again.py. No tests here.

python -m pytest -p tests.kit.outcomes --outcomes FILE
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

NAME: Final = "outcomes"  # plugin name


@dataclass
class Outcomes:
    """Outcome of a pytest run."""

    root: str = ""
    failed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    #: Problems that make a run fail whatever a second run shows.
    problems: list[str] = field(default_factory=list)
    closing: str = ""  # how many tests ended how, in pytest's words


class Recorder:
    """Plugin of the main process, which receives the results of each test from its workers."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._collected: dict[str, None] = {}
        self._reported: set[str] = set()
        self._passed: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self.problems: list[str] = []  # other plugins add theirs
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
        """Write the file, after all hooks of other plugins at the end of the session."""
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
    """Note a problem that a second run of a test does not resolve. Called by a conftest."""
    recorder = config.pluginmanager.get_plugin(NAME)
    if recorder is not None:
        recorder.problems.append(text)
