"""`cometmq demo`: real lines through a real broker, with a kill -9 in the middle, all counted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from cometmq.broker import Broker
from cometmq.children import module_command
from cometmq.cli.demo_reader import percentile
from cometmq.cli.demo_text import Text, collect
from cometmq.cli.interrupts import CtrlC
from cometmq.cli.options import output_option
from cometmq.cli.output import JSON, console, hint, print_json, print_rows
from cometmq.client import Admin, Producer, Receipt
from cometmq.protocol.commands import GetStatistics, Statistics
from cometmq.protocol.errors import CometError

TOPIC: Final = "demo"
QUEUES: Final = 8
COUNT: Final = 1_000_000
COUNT_MAX: Final = 100_000_000
CHUNK: Final = 2_048  # messages that are sent between two looks at the clock
WINDOW: Final = 64  # chunks whose receipts are still to be looked at
LINGER_MS: Final = 5
TIMEOUT_S: Final = 60
STALL_S: Final = 20  # a group that gets nothing for so long has got all it will get
REFRESH_S: Final = 0.1
DISK_BYTES_MIN: Final = 1 << 30
SETTINGS: Final = {"logLevel": "ERROR", "mappedFileSizeCommitLog": 64 * 1_048_576}


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--count", type=click.IntRange(1, COUNT_MAX), help=f"Messages to send. [{COUNT}]")
@click.option("--seconds", type=click.FloatRange(0.1), help="Send for so long instead.")
@click.option("--no-kill", is_flag=True, help="Kill nothing.")
@click.option("--keep", is_flag=True, help="Leave the store, to be looked at.")
@output_option
@click.pass_context
def demo(
    ctx: click.Context,
    paths: tuple[str, ...],
    count: int | None,
    seconds: float | None,
    no_kill: bool,
    keep: bool,
    output: str,
) -> None:
    """See it work: real lines, two groups, and a kill -9.

    Starts a broker in a temporary folder and sends the lines of the files or folders PATH through
    it at full speed, over and over; without PATH, text that it finds on this machine. Each line is
    tagged with its log level, or with its file's name. Two consumer groups read along, one all of
    it, the other three tags. In the middle the commitlog process, which alone writes messages, is
    killed (-9), and started again by the broker.

    Then everything is counted: lost are acknowledged messages that a group did not get. Exit code
    1 if there is one. Every message is numbered, and its bytes are compared.
    """
    text = collect(paths)
    hint(f"{len(text.lines):,} lines of {len(text.files)} files: {_some(text.files)}")
    folder = Path(tempfile.mkdtemp(prefix="cometmq-demo-"))
    limit = count or (COUNT_MAX if seconds else COUNT)
    try:
        if shutil.disk_usage(folder).free < DISK_BYTES_MIN:
            raise click.ClickException(f"{folder}: less than 1 GiB is free; set TMPDIR to another")
        outcome = Demo(folder, text, limit, seconds, kill=not no_kill).run()
    finally:
        if keep:
            hint(f"the store: {folder / 'store'}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    outcome.print(output)
    if outcome.failed:
        ctx.exit(1)
    if outcome.interrupted:
        ctx.exit(130)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


# --- what comes out -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the table. Latencies: of the producer until the acknowledgement, of a group from
    the sending to the receiving."""

    who: str
    tags: str
    sent: int | None = None
    acknowledged: int  # by the broker; in a group's row those that are for the group
    received: int | None = None  # with duplicates
    lost: int | None = None
    duplicates: int | None = None
    wrong: int | None = None  # not for this group, or with other bytes than were sent
    messages_per_s: int
    p50_ms: float | None
    p99_ms: float | None


@dataclass
class Outcome:
    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    killed_pid: int | None = None
    back_after_s: float | None = None  # from the kill to the next acknowledgement
    restarts: int = 0
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        return any(line.lost or line.wrong for line in self.lines)

    def print(self, output: str) -> None:
        if output == JSON:
            print_json(asdict(self) | {"failed": self.failed})
            return
        rows = [asdict(line) for line in self.lines]
        if sys.stdout.isatty():  # lying down, it fits on a screen of 80 columns
            rows = [
                {"": name.replace("_", " ")} | {row["who"]: row[name] for row in rows}
                for name in rows[0]
                if name != "who"
            ]
        print_rows(rows, output)
        if self.killed_pid is not None and self.back_after_s is not None:
            hint(
                f"the commitlog process ({self.killed_pid}) was killed (-9) in the middle; the "
                f"next message was acknowledged {self.back_after_s:.2f} s later"
            )
        lost = sum(line.lost or 0 for line in self.lines)
        hint(f"lost: {lost}. What was sent again after the kill is stored once.")


# --- the consumers --------------------------------------------------------------------------------


class Group:
    """A consumer group of the demo: one process, and what it says."""

    def __init__(self, name: str, tags: list[str], folder: Path) -> None:
        self.name = name
        self.tags = tags  # none: all
        self.expression = " || ".join(tags) or "*"
        self.marks = folder / f"{name}.marks"
        self.said: dict[str, Any] = {"received": 0, "distinct": 0, "changed": 0}
        self.heard_at = time.monotonic()
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name_server: str, lines: Path, count: int) -> None:
        with self.marks.open("wb") as file:
            file.truncate(count)
        self._process = subprocess.Popen(
            module_command("cometmq.cli.demo_reader"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the sending; what was sent is still counted
        )
        plan = {
            "name_server": name_server,
            "group": self.name,
            "topic": TOPIC,
            "tags": self.expression,
            "queues": QUEUES,
            "lines": str(lines),
            "marks": str(self.marks),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(plan).encode() + b"\n")
        self._process.stdin.flush()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._changed:
                if said["received"] != self.said["received"]:
                    self.heard_at = time.monotonic()
                self.said = self.said | said
                self._changed.notify_all()
        with self._changed:
            self.said = self.said | {"ended": True}
            self._changed.notify_all()

    def wait_ready(self) -> None:
        self._wait(lambda: "ready" in self.said, STALL_S)

    def wait_for(self, distinct: int, show: Callable[[], None]) -> None:
        """Until it has got so many different messages, or gets nothing any more."""
        while not self._wait(lambda: self.said["distinct"] >= distinct, REFRESH_S):
            show()
            if time.monotonic() - self.heard_at > STALL_S:
                return

    def _wait(self, condition: Any, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: condition() or "ended" in self.said, timeout_s)
            if "ended" in self.said and not condition():
                raise CometError(f"the consumer of group {self.name} ended before its time")
            return bool(condition())

    def finish(self) -> bytes:
        """Have it read what is left and end; how often each message came to it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._wait(lambda: "ended" in self.said, STALL_S + TIMEOUT_S)
        return self.marks.read_bytes()

    def close(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


# --- the sending ----------------------------------------------------------------------------------


class Stream:
    """Sends the lines, numbered in the messages' `flag`, and keeps who was acknowledged."""

    def __init__(self, producer: Producer, text: Text) -> None:
        self._producer = producer
        self._text = text
        self._window: deque[tuple[Future[Receipt], list[Receipt]]] = deque()
        self.sent = 0
        self.acknowledged = bytearray()  # by number: 1 or 0
        self.latencies_ms: list[float] = []
        self.killed_at: float | None = None
        self.back_after_s: float | None = None

    def send_chunk(self, count: int) -> None:
        """Send so many; the time of the first of them is taken."""
        lines, tags, size = self._text.lines, self._text.tags, len(self._text.lines)
        send, numbers = self._producer.send, range(self.sent, self.sent + count)
        first, began = numbers[0] % size, time.monotonic()
        timed = self._producer.send_async(
            TOPIC,
            lines[first],
            tags=tags[first],
            flag=numbers[0],
            callback=lambda _receipt, error: self._settled(began, error),
        )
        receipts = [
            send(TOPIC, lines[number % size], tags=tags[number % size], flag=number)
            for number in numbers[1:]
        ]
        self.sent += count
        self._window.append((timed, receipts))
        if len(self._window) > WINDOW:
            self._look_at(*self._window.popleft())

    def _settled(self, began: float, error: BaseException | None) -> None:
        """In the producer's thread for callbacks."""
        now = time.monotonic()
        if error is not None:
            return
        self.latencies_ms.append((now - began) * 1000)
        if self.back_after_s is None and self.killed_at is not None and began > self.killed_at:
            self.back_after_s = now - self.killed_at

    def _look_at(self, timed: Future[Receipt], receipts: list[Receipt]) -> None:
        self.acknowledged.append(timed.exception() is None)
        for receipt in receipts:
            try:
                receipt.wait()
            except CometError:
                self.acknowledged.append(0)
            else:
                self.acknowledged.append(1)

    def finish(self) -> None:
        """Wait for every answer."""
        with contextlib.suppress(CometError):
            self._producer.flush()
        while self._window:
            self._look_at(*self._window.popleft())


# --- all of it ------------------------------------------------------------------------------------


class Demo:
    """One run in a folder of its own."""

    def __init__(
        self, folder: Path, text: Text, count: int, seconds: float | None, *, kill: bool
    ) -> None:
        self._folder = folder
        self._text = text
        self._count = count
        self._seconds = seconds
        self._kill = kill
        self._groups = [
            Group("everything", [], folder),
            Group("some-tags", text.filter_tags(), folder),
        ]
        self._outcome = Outcome()
        self._sending_s = 0.0

    def run(self) -> Outcome:
        lines = self._folder / "lines"
        lines.write_bytes(b"\n".join(self._text.lines))
        with contextlib.ExitStack() as stack:
            broker = stack.enter_context(Broker(self._folder / "store", settings=SETTINGS))
            with Admin(broker.name_server) as admin:
                admin.create_topic(TOPIC, queues=QUEUES)
            for group in self._groups:
                stack.callback(group.close)
                group.start(broker.name_server, lines, self._count)
            for group in self._groups:
                group.wait_ready()
            display = stack.enter_context(self._display())
            producer = broker.producer(linger_ms=LINGER_MS, timeout_s=TIMEOUT_S)
            stack.enter_context(producer)
            stream = Stream(producer, self._text)
            self._send(broker, stream, display)
            self._count_up(stream, display)
            self._outcome.restarts = int(_statistics(broker)["restarts"])
        return self._outcome

    def _send(self, broker: Broker, stream: Stream, display: Display) -> None:
        """Until there is enough, or Ctrl-C; and wait for all answers."""
        began = time.monotonic()
        try:
            with CtrlC() as ctrl_c, ctrl_c.held():
                hint("sending; two groups read along")
                while not ctrl_c.asked and (share := self._share(stream, began)) < 1:
                    if self._kill and share >= 0.5 and self._outcome.killed_pid is None:
                        self._kill_commitlog(broker, stream)
                    stream.send_chunk(min(CHUNK, self._count - stream.sent))
                    display.show(stream.sent, share)
        except KeyboardInterrupt:
            self._outcome.interrupted = True
            hint("interrupted: counting what was sent")
        stream.finish()
        self._sending_s = time.monotonic() - began

    def _share(self, stream: Stream, began: float) -> float:
        """How much of the sending is done: 1 = all."""
        by_time = (time.monotonic() - began) / self._seconds if self._seconds else 0.0
        return max(by_time, stream.sent / self._count)

    def _kill_commitlog(self, broker: Broker, stream: Stream) -> None:
        pid = int(_statistics(broker)["pid.commitlog"])
        os.kill(pid, signal.SIGKILL)
        stream.killed_at = time.monotonic()
        self._outcome.killed_pid = pid
        hint(f"killed -9 the commitlog process ({pid}) after {stream.sent:,} messages")

    def _count_up(self, stream: Stream, display: Display) -> None:
        """Wait for the groups, and compare what they got with what was acknowledged."""
        outcome = self._outcome
        outcome.back_after_s = stream.back_after_s
        outcome.seconds = round(self._sending_s, 2)
        acknowledged = stream.acknowledged.count(1)
        outcome.lines.append(
            Line(
                who="producer",
                tags="",
                sent=stream.sent,
                acknowledged=acknowledged,
                messages_per_s=round(acknowledged / self._sending_s),
                p50_ms=_rounded(percentile(stream.latencies_ms, 50)),
                p99_ms=_rounded(percentile(stream.latencies_ms, 99)),
            )
        )
        wanted = [self._wanted(group, stream.sent) for group in self._groups]
        began = time.monotonic()
        for group, mask in zip(self._groups, wanted, strict=True):
            group.wait_for(
                _count_both(mask, stream.acknowledged), lambda: display.show(stream.sent, 1.0)
            )
        seconds = self._sending_s + time.monotonic() - began
        display.close()
        for group, mask in zip(self._groups, wanted, strict=True):
            marks = group.finish()[: stream.sent]
            outcome.lines.append(self._line(group, mask, marks, stream.acknowledged, seconds))

    def _wanted(self, group: Group, count: int) -> bytes:
        """By number: 1 where the message is for the group."""
        tags = set(group.tags)
        once = bytes(not tags or tag in tags for tag in self._text.tags)
        return (once * (count // len(once) + 1))[:count]

    @staticmethod
    def _line(
        group: Group, wanted: bytes, times: bytes, acknowledged: bytearray, seconds: float
    ) -> Line:
        received, distinct = group.said["received"], len(times) - times.count(0)
        lost = wrong = 0
        for want, stored, seen in zip(wanted, acknowledged, times, strict=True):
            if not seen:
                lost += want & stored
            elif not want:
                wrong += 1
        return Line(
            who=f"group {group.name}",
            tags=group.expression,
            acknowledged=_count_both(wanted, acknowledged),
            received=received,
            lost=lost,
            duplicates=received - distinct,
            wrong=wrong + group.said["changed"],
            messages_per_s=round(received / seconds),
            p50_ms=_rounded(group.said.get("p50_ms")),
            p99_ms=_rounded(group.said.get("p99_ms")),
        )

    @contextlib.contextmanager
    def _display(self) -> Iterator[Display]:
        display = Display(self._groups)
        try:
            yield display
        finally:
            display.close()


def _statistics(broker: Broker) -> dict[str, int | float | str]:
    answer = broker.actor("broker").ask(GetStatistics())
    assert isinstance(answer, Statistics)
    return answer.values


def _count_both(wanted: bytes, acknowledged: bytearray) -> int:
    both = int.from_bytes(wanted, "big") & int.from_bytes(acknowledged, "big")
    return both.bit_count()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class Display:
    """What a terminal shows meanwhile; nothing in a pipe."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self._show_at = 0.0
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            text = "{task.fields[sent]:,} sent; received: {task.fields[received]}"
            self._progress = Progress(
                BarColumn(), TimeElapsedColumn(), TextColumn(text),
                console=console(stderr=True), transient=True,
            )  # fmt: skip
            self._progress.add_task("demo", total=1.0, sent=0, received="")
            self._progress.start()

    def show(self, sent: int, share: float) -> None:
        if self._progress is None or time.monotonic() < self._show_at:
            return
        self._show_at = time.monotonic() + REFRESH_S
        received = ", ".join(f"{group.said['received']:,} {group.name}" for group in self._groups)
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=share, sent=sent, received=received)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
