"""For all tests: what was skipped is said at the end, and no broker outlives the run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

# A shell that starts us in the background has Ctrl-C ignored, and our children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))


def pytest_sessionfinish(session: pytest.Session) -> None:
    family = sys.modules.get("family")
    if family is None:
        return
    left = family.left_behind()
    for process in left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"ERROR: a broker's process is left: {process}", red=True)
        process.kill()
    if left:
        psutil.wait_procs(left, 10)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from interop import rocketmq

    if rocketmq.SKIP_REASON:
        terminalreporter.write_line(f"WARNING: {rocketmq.SKIP_REASON}", yellow=True, bold=True)
    for name in ("fault.disk", "interop.peers"):
        module = sys.modules.get(name)
        for what, reason in module.skipped.items() if module is not None else ():
            line = f"WARNING: NOT TESTED: {what}: {reason}"
            terminalreporter.write_line(line, yellow=True, bold=True)
