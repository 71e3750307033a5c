"""For all tests: what was skipped is said at the end, and no broker outlives the run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import aftermath
import crashes
import jvm
import outcomes
import psutil
import pytest
import stretching
from hypothesis import HealthCheck, settings
from patience import patient

from cometmq.protocol.client_timeout import TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from cometmq import Broker
    from cometmq.testing import Sandbox

# How long an example takes says what else the machine does.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")

# Likewise how long a broker takes to answer: the 3 s of a user are little on a busy machine. A test
# of a time limit sets its own. Programs that tests start have it too.
os.environ.setdefault(TIMEOUT_VARIABLE, str(patient(30.0)))

# Tests start interpreters by the hundred, and each would compile anew all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.setdefault("COMETMQ_TEST_PACE_S", "0.02")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads spin, for sums of some rows
os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(jvm.SPARK))
os.environ.setdefault("MAVEN_OPTS", " ".join(jvm.SMALL))

# A shell that starts us in the background has Ctrl-C ignored, and our children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cometmq_settings() -> Mapping[str, object]:
    """The broker of all tests that need any one: a retry comes after a second."""
    return {"messageDelayLevel": "1s " * 18}


@pytest.fixture
def broker(cometmq_broker: Broker) -> Broker:
    """The broker of the session; files whose tests need another one define it."""
    return cometmq_broker


@pytest.fixture
def topic(cometmq: Sandbox) -> str:
    """A new topic of two queues on the broker of the session."""
    return cometmq.topic(queues=2)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    stretching.register(config)
    config.pluginmanager.register(aftermath.Aftermath(), aftermath.NAME)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Without a path all tests run, side by side: they wait more than they compute."""
    option = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_worker = hasattr(config, "workerinput")
    looked_at = option.usepdb or option.collectonly or option.capture == "no"
    if whole and not is_worker and not looked_at and getattr(option, "numprocesses", 0) is None:
        option.numprocesses = 4 + (psutil.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from parallel import Scheduler

    config.option.loadscopereorder = False
    return Scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        crashes.keep_traces(session.config.workerinput)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    report.longrepr = f"{report.longrepr}\n{crashes.words(report.node)}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from parallel import arrange

        arrange(items, config.workerinput)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was collected stays: looking for garbage in it, again and again, finds nothing."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a worker reports travels as UTF-8, and tests log what is none."""
    return encodable((yield))


def encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {key: encodable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(encodable, data))
    return data


def longest_files(stats: dict[str, list[Any]], count: int) -> list[tuple[float, str]]:
    """Seconds of all their tests, fixtures included."""
    took: dict[str, float] = defaultdict(float)
    for report in (each for reports in stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            took[report.nodeid.partition("::")[0]] += report.duration
    return sorted(((seconds, path) for path, seconds in took.items()), reverse=True)[:count]


_left: list[str] = []  # brokers' processes that outlived their tests, in words


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _left.extend(getattr(node, "workeroutput", {}).get("left", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    family = sys.modules.get("family")
    if family is not None:
        left = family.left_behind()
        _left.extend(map(str, left))
        for process in left:
            process.kill()
        psutil.wait_procs(left, patient(10))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = _left
        crashes.forget_traces(session.config.workerinput)
    elif _left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for process in _left:
            outcomes.note_problem(session.config, f"a broker's process is left: {process}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What could not be tested here is said, each reason once; and with --durations which files
    take longest."""
    if terminalreporter.config.option.durations:
        terminalreporter.section("longest files")
        for seconds, path in longest_files(terminalreporter.stats, 15):
            terminalreporter.write_line(f"{seconds:8.1f}s {path}")
    for process in _left:
        terminalreporter.write_line(f"ERROR: a broker's process is left: {process}", red=True)
    skipped = terminalreporter.stats.get("skipped", [])
    for reason in sorted({report.longrepr[2] for report in skipped}):
        line = f"WARNING: NOT TESTED: {reason.removeprefix('Skipped: ')}"
        terminalreporter.write_line(line, yellow=True, bold=True)
