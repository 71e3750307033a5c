"""One consumer of the demo, in a process of its own.

It is told what to do by one line of JSON on standard input, whose end then means: read on until
nothing comes any more, and finish. It tells how far it is by lines of JSON on standard output, and
marks every message in a file: one byte for each, the number of times that it came.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from cometmq.client import Consumer, Message

POLL_COUNT: Final = 4_096
REPORT_S: Final = 0.1
QUIET_S: Final = 0.5
SAMPLE_EVERY: Final = 64
TIMES_MAX: Final = 255


class Marks:
    """Which messages came, how often, and whether they were what was sent."""

    def __init__(self, file: Path, lines: list[bytes]) -> None:
        with file.open("r+b") as stream:
            self._times = mmap.mmap(stream.fileno(), 0)
        self._lines = lines
        self.received = 0
        self.distinct = 0
        self.changed = 0  # another body than the one that was sent under its number
        self.latencies_ms: list[int] = []

    def take(self, messages: list[Message]) -> None:
        times, lines, count = self._times, self._lines, len(self._lines)
        for message in messages:
            number = message.flag
            seen = times[number]
            if not seen:
                self.distinct += 1
            if seen < TIMES_MAX:
                times[number] = seen + 1
            if message.body != lines[number % count]:
                self.changed += 1
        self.received += len(messages)
        now_ms = time.time_ns() // 1_000_000
        self.latencies_ms += [now_ms - each.born_timestamp_ms for each in messages[::SAMPLE_EVERY]]

    def report(self, **more: Any) -> None:
        counts = {key: getattr(self, key) for key in ("received", "distinct", "changed")}
        print(json.dumps(counts | more), flush=True)


def percentile(values: list[float] | list[int], percent: float) -> float | None:
    """None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else None


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    marks = Marks(Path(plan["marks"]), Path(plan["lines"]).read_bytes().split(b"\n"))
    finish = threading.Event()

    def follow() -> None:
        sys.stdin.read()
        finish.set()

    threading.Thread(target=follow, daemon=True).start()
    with Consumer(plan["name_server"], plan["group"], plan["topic"], plan["tags"]) as consumer:
        while len(consumer.assignment) < plan["queues"] and not finish.is_set():
            marks.take(_poll(consumer, REPORT_S))
        marks.report(ready=True)
        _consume(consumer, marks, finish)
    latencies = marks.latencies_ms
    marks.report(p50_ms=percentile(latencies, 50), p99_ms=percentile(latencies, 99))


def _consume(consumer: Consumer, marks: Marks, finish: threading.Event) -> None:
    report_at = time.monotonic()
    while True:
        messages = _poll(consumer, QUIET_S)
        if not messages and finish.is_set():
            return
        marks.take(messages)
        if time.monotonic() >= report_at:
            marks.report()
            report_at = time.monotonic() + REPORT_S


def _poll(consumer: Consumer, timeout_s: float) -> list[Message]:
    messages = consumer.poll(POLL_COUNT, timeout_s)
    if messages:
        consumer.ack(messages)
    return messages


if __name__ == "__main__":
    main()
