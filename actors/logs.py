"""How the processes of the family log: lines a person can read, or JSON lines on request."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from cometmq.conf import BrokerSettings, LogFormat

_PACKAGE: Final = "cometmq"


class TextFormatter(logging.Formatter):
    """12:03:04.567 INFO commitlog: text"""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._role}: {text}"


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


def set_up_logging(role: str, settings: BrokerSettings) -> None:
    """Send this process's log of the package to standard error, in the format of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if settings.log_format is LogFormat.JSON else TextFormatter
    handler.setFormatter(formatter(role))
    logger = logging.getLogger(_PACKAGE)
    logger.handlers[:] = [handler]
    logger.setLevel(settings.log_level.value)
    logger.propagate = False
