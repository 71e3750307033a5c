"""What the log says of handlers that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from cometmq.client.handling import failures
from cometmq.client.handling.failures import BURST, FORGET_S, KINDS_MAX, REST_S, FailureLog
from cometmq.client.handling.outcomes import Reject, Retry

log = logging.getLogger("test.failures")


class Fake:
    """As much of a message as the log shows."""

    topic, queue_id, queue_offset, keys, reconsume_times = "t", 1, 2, None, 0


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


class Failing:
    """A run whose handler fails, at a time that does not go by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(failures.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(failures, "describe", lambda unit: unit.topic)
        caplog.set_level(logging.INFO, log.name)
        self.log = FailureLog(log)
        self._caplog = caplog

    def fail(self, error: Exception, times: int = 1) -> list[str]:
        """What is logged for it."""
        before = len(self._caplog.records)
        unit: Any = Fake()
        for _ in range(times):
            self.log.failed(unit, error)
        return self._texts(before)

    def end(self) -> list[str]:
        before = len(self._caplog.records)
        self.log.end()
        return self._texts(before)

    def _texts(self, before: int) -> list[str]:
        return [each.getMessage() for each in self._caplog.records[before:]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Failing:
    return Failing(monkeypatch, caplog)


def test_the_first_are_told_one_by_one_with_their_tracebacks(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    assert failing.fail(raised(ValueError("x")), BURST) == ["the handler failed on t"] * BURST
    assert all(record.exc_info for record in caplog.records)
    assert failing.end() == []


def test_of_the_rest_one_in_a_while_with_the_number_of_those_between(failing: Failing) -> None:
    error = raised(ValueError("x"))
    failing.fail(error, BURST)
    assert len(failing.fail(error, 500)) == 1
    failing.now += REST_S - 0.001
    assert failing.fail(error) == []
    failing.now += 0.001
    (text,) = failing.fail(error)
    assert text == "the handler failed on t (500 more like it since the last one)"
    failing.fail(error, 7)
    (text,) = failing.end()
    assert text.startswith("the handler failed 7 more times by ValueError at ")
    assert text.endswith(f"{__file__}:{raised.__code__.co_firstlineno + 2}")


def test_other_kinds_have_a_budget_of_their_own(failing: Failing) -> None:
    failing.fail(raised(ValueError("x")), BURST + 5)
    assert len(failing.fail(raised(TypeError("x")))) == 1

    def elsewhere() -> None:
        raise ValueError("x")

    assert len(failing.fail(caught(elsewhere))) == 1
    assert len(failing.fail(ValueError("never raised"))) == 1


def caught(call: Callable[[], None]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError


def test_what_was_not_seen_for_long_begins_anew(failing: Failing) -> None:
    error = raised(ValueError("x"))
    failing.fail(error, BURST + 3)
    failing.now += FORGET_S + 0.001
    assert len(failing.fail(error, BURST)) == BURST


def test_the_table_of_kinds_is_bounded(failing: Failing) -> None:
    for number in range(KINDS_MAX + 10):
        failing.now += 0.001
        kind = type(f"Error{number}", (Exception,), {})
        assert len(failing.fail(kind("x"))) == 1
    assert len(failing.log._kinds) == KINDS_MAX


def test_retry_and_reject_have_no_traceback(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    assert failing.fail(raised(Retry(after=2))) == ["t: again after 2 s"]
    assert failing.fail(raised(Reject("no"))) == ["t goes to the dead letters: no"]
    assert not any(record.exc_info for record in caplog.records)
    assert len(failing.fail(raised(Retry()), 50)) == 50  # at level INFO, all of them
    caplog.set_level(logging.WARNING, log.name)
    assert failing.fail(raised(Retry())) == []
