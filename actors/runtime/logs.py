"""How the processes of the family log: lines a person can read, or JSON lines on request.

What clients do wrong they can do a million times a second. So of one kind of line, which is one
place in the code, only some are written in a while, and then how many more there were.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cometmq.actors.runtime.log_file import LogFile
from cometmq.conf import BrokerSettings, LogFormat
from cometmq.protocol.errors import ConfigError

_PACKAGE: Final = "cometmq"
_logger: Final = logging.getLogger(_PACKAGE)
BURST: Final = 20  # lines of one kind in a period
PERIOD_S: Final = 30.0
TEXT_MAX: Final = 500  # characters of an example


class TextFormatter(logging.Formatter):
    """2026-11-21 12:03:04.567+0100 INFO commitlog: text"""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        local = time.localtime(record.created)
        clock = time.strftime("%Y-%m-%d %H:%M:%S", local)
        zone = time.strftime("%z", local)
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        clock += f".{int(record.msecs):03d}{zone}"
        return f"{clock} {record.levelname:<7} {self._role}: {text}"


class JsonFormatter(TextFormatter):
    """One object a line: ts (seconds), level, role, pid, logger, event, perhaps traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "role": self._role,
            "pid": record.process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Kind(msgspec.Struct):
    """Lines from one place in the code, in one period."""

    until: float  # time.monotonic()
    written: int = 0
    left_out: int = 0
    example: str = ""  # the first that was left out


class Repeats(logging.Filter):
    """Lets some lines of a kind through to the handler, and sums up the others at the end of a
    period. What is critical always goes through. Threads share it.

    Its memory is bounded by the places in the code that log.
    """

    def __init__(
        self, handler: logging.Handler, *, burst: int = BURST, period_s: float = PERIOD_S
    ) -> None:
        super().__init__()
        self._handler = handler
        self._burst = burst
        self._period_s = period_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, int, object], Kind] = {}
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL or hasattr(record, "sums_up"):
            return True
        error = record.exc_info[0] if record.exc_info else None
        key = record.pathname, record.lineno, record.levelno, error
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None or (now >= kind.until and not kind.left_out):
                kind = self._kinds[key] = Kind(now + self._period_s)
            if kind.written < self._burst:
                kind.written += 1
                return True
            if not kind.left_out:
                kind.example = record.getMessage()[:TEXT_MAX]
            kind.left_out += 1
            if self._timer is None:
                self._timer = threading.Timer(max(0.0, kind.until - now), self.sum_up)
                self._timer.daemon = True
                self._timer.start()
        return False

    def sum_up(self) -> None:
        """Say what was left out, of all kinds, and begin anew."""
        with self._lock:
            self._timer = None
            over = [(key, kind) for key, kind in self._kinds.items() if kind.left_out]
            for key, _ in over:
                del self._kinds[key]
        for (path, line, level, _), kind in over:
            text = f"{kind.left_out} more like this in {self._period_s:g} s: {kind.example}"
            record = logging.LogRecord(_PACKAGE, level, path, line, text, None, None)
            record.sums_up = kind.left_out
            self._handler.handle(record)


# How a handler is made for a role, where the log does not go to standard error. It is set before
# the first process is forked, so that all have it.
_make_handler: Callable[[str], logging.Handler] | None = None


def send_log_to(make_handler: Callable[[str], logging.Handler]) -> None:
    """Have the processes of this broker log by these handlers."""
    global _make_handler
    _make_handler = make_handler


def _handler_of(settings: BrokerSettings) -> logging.Handler:
    if not settings.log_file:
        return logging.StreamHandler(sys.stderr)
    path = Path(settings.log_file).absolute()
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)  # another process may be as far
        return LogFile(path, settings.log_file_max_bytes, settings.log_file_count)
    except OSError as error:
        raise ConfigError(f"logFile = {path}: {error.strerror}") from None


def _handler_for(role: str, settings: BrokerSettings) -> logging.Handler:
    if _make_handler is not None:
        handler = _make_handler(role)
    else:
        handler = _handler_of(settings)
        formatter = JsonFormatter if settings.log_format is LogFormat.JSON else TextFormatter
        handler.setFormatter(formatter(role))
    handler.addFilter(Repeats(handler))
    return handler


class ProcessLog(NamedTuple):
    """What a process that is still to be forked logs, and where.

    Args:
        handler: None: it has to open the file itself, which it locks in its own right.
        level: one of logging's numbers.
    """

    handler: logging.Handler | None
    level: int


def log_of(role: str, settings: BrokerSettings) -> ProcessLog:
    """To be worked out before the fork: what that looks at is shared then."""
    opens_itself = settings.log_file and _make_handler is None
    level = settings.log_level_of(role.partition("-")[0]).value
    handler = None if opens_itself else _handler_for(role, settings)
    return ProcessLog(handler, logging.getLevelNamesMapping()[level])


def set_up_logging(role: str, settings: BrokerSettings, made: ProcessLog | None = None) -> None:
    """Send this process's log of the package to standard error or `logFile`, in the format of the
    settings; or to where `send_log_to` has said.

    Args:
        made: what `log_of` gave before the fork.

    Raises ConfigError for a file that cannot be written.
    """
    made = made or log_of(role, settings)
    _logger.handlers[:] = [made.handler or _handler_for(role, settings)]
    if _logger.level != made.level:  # a fork has it; setting it visits all loggers
        _logger.setLevel(made.level)
    _logger.propagate = False
