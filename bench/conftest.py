"""Two sizes of every benchmark: small with the tests, so that none rots, and `--full` for figures.

    python -m pytest bench                small; says nothing about speed
    python -m pytest bench --full         the sizes that docs/performance.md quotes
    ... --full --full-memory              what writes logs finds memory as in a service of some days

Ratios are taken inside one run, since machines are noisy. Figures are printed at the end, a line
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stretching
from benchmarks import Report

from cometmq import Broker
from cometmq.bench.memory import fill

_FIGURE = "figure"  # in the properties of a test's report, which comes here from any process


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    stretching.register(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="benchmarks at their full size")
    parser.addoption(
        "--full-memory",
        action="store_true",
        help="fill the memory with pages of files first, as on a machine that has run for a while",
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], None]:
    """What is measured finds its memory as `--full-memory` says; called, it is so once more."""

    def renew() -> None:
        if request.config.getoption("--full-memory"):
            fill(tmp_path)

    renew()
    return renew


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Takes a figure: what, how much, unit."""

    def add(what: str, value: float, unit: str) -> None:
        line = f"{request.node.name:<44} {what:<34} {value:>12,.2f} {unit}"
        request.node.user_properties.append((_FIGURE, line))

    return add


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(Path(tmp_path_factory.mktemp("bench")) / "store") as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # With those of a test that failed: its figures say by how much it missed its aim.
    done = [each for word in ("passed", "failed") for each in terminalreporter.stats.get(word, ())]
    found = [line for each in done for name, line in each.user_properties if name == _FIGURE]
    if found:
        terminalreporter.section("figures")
        for line in found:
            terminalreporter.write_line(line)
