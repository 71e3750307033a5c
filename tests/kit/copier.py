"""A scheduled copy, which is a deriver: it reads a queue, and has each message that is due stored
once more, unchanged, in another topic. Delays and retries will do the same.

    python copier.py

Reads orders from its input, one as JSON a line, and forks for each: {"commitlog", "reader": the
family's addresses, "until": how many are to be copied, "die": [file, line, pass] or null, "lines":
whether to tell which it passes, "patient": whether nothing that it asks is asked again}. Answers
with the child's exit status; or with the lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import dying
import family
from paths import SEARCH
from patience import patient

from cometmq.actors.runtime import deriver, inner
from cometmq.actors.runtime.deriver import Deriver
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.protocol.commands import Position, PullMessages
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message

SOURCE, TARGET, NAME = "later", "now", "copier.later.0"
DUE = "DUE"  # property: from when on the copy may be there, in ms since 1970
COUNT_MAX = 7  # of one write
ANSWER_S = 1.0  # then it is tried again
PATIENT_S = patient(60.0)
WATCHED = frozenset({str(deriver.__file__), str(inner.__file__), __file__})


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Copier:
    """Its position's number is the queue offset of the next message that it copies."""

    def __init__(self, commitlog: Channel, reader: Channel, timeout_s: float = ANSWER_S) -> None:
        self.deriver = Deriver(commitlog, NAME, timeout_s=timeout_s)
        self._reader = reader
        self._timeout_s = timeout_s

    def step(self) -> int:
        """Copy what is due, in its order; how many."""
        at = self.deriver.position().number
        records = InnerRecords()
        copied = 0
        for message in self._next(at):
            if int(message.properties[DUE]) > now_ms():
                break
            records.encoder.add_stored(records.queue(TARGET, 0), message.record)
            copied += 1
        if copied:
            self.deriver.write(records, Position(0, at + copied))
        return copied

    def _next(self, at: int) -> Iterator[Message]:
        command = PullMessages(SOURCE, 0, at, COUNT_MAX)
        _, messages = family.pull(self._reader, command, self._timeout_s)
        yield from messages


def copy(commitlog: str, reader: str, until: int, timeout_s: float) -> None:
    """Until so many are copied, whatever becomes of the broker's processes meanwhile."""
    pause = threading.Event()
    with Channel(commitlog) as line, Channel(reader) as other:
        copier = Copier(line, other, timeout_s)
        while True:
            try:
                if copier.deriver.position().number >= until:
                    break
                copied = copier.step()
            except CometError:
                copied = 0
            if not copied:
                pause.wait(0.005)


# --- a process that forks copiers which die ---


class Copiers:
    """The test's end. It forks where no thread is and no socket."""

    def __init__(self) -> None:
        path = os.pathsep.join([SEARCH, os.environ.get("PYTHONPATH", "")])
        self._process = Popen(
            [sys.executable, __file__], stdin=PIPE, stdout=PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def run(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def obey(order: dict[str, Any]) -> Any:
    timeout_s = PATIENT_S if order.get("patient") else ANSWER_S
    work = partial(copy, order["commitlog"], order["reader"], order["until"], timeout_s)
    if order.get("lines"):
        return lines_of(work)
    if order.get("die"):
        file, number, nth = order["die"]
        with contextlib.suppress(TimeoutError):
            return dying.die_at(work, WATCHED, (file, number), nth)
        return dying.TOOK_TOO_LONG
    lines_of(work)
    return 0


def lines_of(work: partial[None]) -> list[tuple[str, int, int]]:
    """File, number and passes of each line, in a child."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            passed = dying.lines_of(work, WATCHED)
            told = [(*line, count) for line, count in passed.items()]
            with os.fdopen(write_end, "w") as pipe:
                json.dump(told, pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        found: list[tuple[str, int, int]] = json.load(pipe)
    os.waitpid(child, 0)
    return found


def main() -> None:
    assert Path(__file__).is_absolute()
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
