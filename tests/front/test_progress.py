"""What long jobs say of themselves."""

from __future__ import annotations

import logging
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cometmq.actors.launch.orderly_end import OrderlyEnd
from cometmq.cli.progress import Line, progress
from cometmq.protocol.progress import MIB, Progress
from cometmq.shm.live.control import Counter
from cometmq.shm.log import recovery
from cometmq.shm.os.files import segment_name


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def said(capsys: pytest.CaptureFixture[str], steps: int, *, total: int = 4096 * MIB) -> str:
    clock = Clock()
    line = Line("repairing", "MiB", MIB, clock)
    for number in range(steps + 1):
        line.show(total * number // 100, total)
        clock.seconds += 1
    line.clear()
    return capsys.readouterr().err


def test_in_a_pipe_a_line_every_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, 12).splitlines() == [
        "repairing: 81 of 4,096 MiB, 98 s left",
        "repairing: 286 of 4,096 MiB, 93 s left",
        "repairing: 491 of 4,096 MiB, 88 s left",
    ]


def test_on_a_terminal_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    text = said(capsys, 4)
    assert "\n" not in text
    assert text.count("\r") == 4  # three times, and cleared
    assert text.endswith("\r\x1b[K")


def test_what_is_over_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, 1) == ""
    with progress("verifying") as show:
        show(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "left"), [(1, "99 s"), (50, "82 min"), (1000, "27 h 30 min"), (0.001, "1 s")]
)
def test_the_time_left(seconds: float, left: str, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = Line("archive", "segments", 1, clock)
    clock.seconds += max(seconds, 0)
    line._next = 0
    line.show(1, 100)
    assert capsys.readouterr().err == f"archive: 1 of 100 segments, {left} left\n"


def test_of_how_many_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = Line("ingest", "rows", 1, clock)
    clock.seconds += 3
    line.show(12_345, 0)
    assert capsys.readouterr().err == "ingest: 12,345 rows\n"


def test_a_recovery_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the segment on with which it begins, to the end of the last one."""
    (tmp_path / "commitlog").mkdir()
    for number in range(4):
        (tmp_path / "commitlog" / segment_name(number * MIB)).write_bytes(b"\0" * MIB)
    clock = Clock()
    monkeypatch.setattr(recovery, "Progress", partial(Progress, now=clock))
    with caplog.at_level(logging.INFO):
        step = recovery.telling(tmp_path, MIB)
        for at in range(MIB + 100, 4 * MIB, MIB):
            step(at)
            clock.seconds += 3
    assert [each.getMessage() for each in caplog.records] == [
        "recovering the log: 1 of 3 MiB, 6 s left"
    ]


class Left:
    """As much of a control file as the end looks at."""

    meta: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.values = {Counter.WROTE: 96 * MIB, Counter.DISPATCHED: 0, Counter.FLUSHED: 32 * MIB}

    def read(self, counter: Counter) -> SimpleNamespace:
        return SimpleNamespace(value=self.values.get(counter, 0))


def test_an_end_with_a_backlog_says_how_much_is_left() -> None:
    control: Any = Left()
    table: Any = SimpleNamespace(pids={"dispatcher": 7}, roles=[])
    end = OrderlyEnd(table, control, {}, None, lambda seconds: None, lambda: None)
    assert end.run() == [
        f"dispatched is {96 * MIB} bytes behind", f"flushed is {64 * MIB} bytes behind",
    ]  # fmt: skip
    control.values[Counter.DISPATCHED] = 80 * MIB
    text = end._what_is_waited_for("dispatcher")
    assert text.startswith(
        f"the end waits for dispatcher (process 7): dispatched is {16 * MIB} bytes behind, "
        f"flushed is {64 * MIB} bytes behind, done: 80 of 160 MiB, "
    )
    assert text.endswith(" s left")
    assert end._what_is_waited_for("flush").startswith("the end waits for flush (which is started ")


JOBS = ("archive", "verify", "replay", "audit", "dlq", "ingest", "compact", "stats")


@pytest.mark.parametrize("job", JOBS)
def test_every_job_over_a_store_shows_how_far_it_is(job: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "front" / "cli" / "spark"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    shown = re.findall(
        rf'with tasks\("{job}"[^)]*\) as progress:\n(?:.*\n){{0,6}}?.*progress', text
    )
    assert shown, f"cometmq spark {job} runs without progress"
