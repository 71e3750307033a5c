"""Isolation of failed tests: objects that they leave behind fail no later test. No tests here.

pytest keeps the traceback of a failure until the next test begins, with all objects in its frames.
A producer that the test could not close is then collected during the next test, which its
ResourceWarning would fail. The same holds for threads that a failed test has left running.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Generator
from typing import Any, Final

import pytest

NAME: Final = "aftermath"
LAST: Final = ("last_type", "last_value", "last_traceback", "last_exc")


class Aftermath:
    """Plugin for each process that runs tests."""

    def __init__(self) -> None:
        self._left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._has_failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        """Replace the hook for threads, after pytest has set its own."""
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> Any:
            if args.thread is None or args.thread not in self._left:
                return before(args)
            print(f"{args.thread.name}, left by a test that failed:", file=sys.stderr)
            traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
            return None

        threading.excepthook = hook

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Wrap setup, call and teardown of a test."""
        self._has_failed = False
        threads = set(threading.enumerate())
        result = yield
        if self._has_failed:
            self._left.update(set(threading.enumerate()) - threads)
            forget_failure()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed


def forget_failure() -> None:
    """Release the frames of a failure, and the objects that only they hold."""
    for name in LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
