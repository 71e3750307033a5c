"""The log of an embedded broker's processes, on its way into the logging of the service.

    children, supervisor: ServiceHandler --- one packet a record, JSON ---> ServiceLog: the service

All processes of the broker write to one end of a socket pair, which keeps packets whole; a thread
of the service reads the other. Nobody waits for that thread: what does not fit is dropped and
counted, and the count is told as soon as there is room. When the service is gone, what is left to
say goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections import deque
from typing import Any, Final

from cometmq.actors.runtime.logs import JsonFormatter, TextFormatter

PACKET_MAX: Final = 65_536
TEXT_MAX: Final = 8_000  # characters that fit into a packet, however they are escaped
CLOSE_S: Final = 1.0
RECENT_MAX: Final = 1_000  # records


class ServiceHandler(logging.Handler):
    """Sends each record to the service; in every process of the broker.

    Args:
        line: this process's end, which it shares with the others.
    """

    def __init__(self, role: str, line: socket.socket) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(role))
        self.dropped = 0  # not told of yet
        self._line = line
        self._instead = logging.StreamHandler(sys.stderr)
        self._instead.setFormatter(TextFormatter(role))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped:
                self._send(self._complaint())
                self.dropped = 0
            self._send(record)
        except BlockingIOError:
            self.dropped += 1
        except OSError:
            self._instead.handle(record)
        except Exception:  # as of any handler: a record that cannot be formatted
            self.handleError(record)

    def _send(self, record: logging.LogRecord) -> None:
        packet = self.format(record).encode(errors="backslashreplace")
        if len(packet) > PACKET_MAX:
            short = logging.makeLogRecord(record.__dict__)
            short.msg, short.args = record.getMessage()[:TEXT_MAX] + " ...", ()
            short.exc_info = short.exc_text = None
            packet = self.format(short).encode(errors="backslashreplace")
        self._line.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _complaint(self) -> logging.LogRecord:
        text = f"{self.dropped} lines of this process's log were dropped: nobody read them"
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        return logging.makeLogRecord({**fields, "msg": text, "process": os.getpid()})


class ServiceLog:
    """The service's end: hands every record to the logger of its name, in a thread of its own.

    Records have `role`, `process` and the time of where they come from; their text begins with the
    role. `recent` has the last of them, also those that the service's loggers do not show.
    """

    def __init__(self) -> None:
        self.recent: deque[logging.LogRecord] = deque(maxlen=RECENT_MAX)
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._run, name="cometmq broker log", daemon=True)

    def fileno(self) -> int:
        """What the supervisor has to inherit."""
        return self._theirs.fileno()

    def start(self) -> None:
        """The supervisor has it. Reading ends when the last process of the broker has ended."""
        self._theirs.close()
        self._thread.start()

    def close(self) -> None:
        """The broker has ended: take in what it has said last."""
        self._theirs.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():  # somebody else still has their end, or a handler blocks
                self._ours.shutdown(socket.SHUT_RD)
                self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._ours.close()

    def _run(self) -> None:
        while True:
            try:
                packet = self._ours.recv(PACKET_MAX)
            except OSError:
                return
            if not packet:
                return
            try:
                record = _record_of(json.loads(packet))
                self.recent.append(record)
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
            except Exception:  # of a handler of the service, as of any: the next one is tried
                traceback.print_exc()


def _record_of(fields: dict[str, Any]) -> logging.LogRecord:
    logger = logging.getLogger(str(fields["logger"]))
    level = logging.getLevelNamesMapping().get(fields["level"], logging.WARNING)
    role, created = str(fields["role"]), float(fields["ts"])
    args, extra = (role, fields["event"]), {"role": role}
    record = logger.makeRecord(logger.name, level, __file__, 0, "%s: %s", args, None, extra=extra)
    record.created, record.msecs = created, (created % 1) * 1000
    record.process, record.processName = int(fields["pid"]), f"cmq-{role}"
    record.exc_text = fields.get("traceback")
    return record
