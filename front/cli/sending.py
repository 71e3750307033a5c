"""`cometmq msg send`: lines in, messages out, counts at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from cometmq.cli.interrupts import CtrlC
from cometmq.cli.output import JSON, console, hint, print_record
from cometmq.client import Producer, Receipt
from cometmq.protocol.errors import CometError, Refused
from cometmq.protocol.names import KEY_SEPARATOR

if TYPE_CHECKING:
    from rich.progress import Progress

READ_BYTES: Final = 4 * 1_048_576  # what is sent, and waited for, at a time
LINE_BYTES_MAX: Final = 64 * 1_048_576  # no broker takes a message like that
LINGER_MS: Final = 5
_TRAILING: Final = b":,;"

Extract = Callable[[bytes], str | None]


@dataclass(frozen=True, kw_only=True)
class SendOptions:
    """What the command line says about the messages."""

    topic: str
    name_server: str
    timeout_s: float
    wait_s: float
    count: int | None
    queue_id: int | None
    tags: str | None
    keys: str | None
    properties: dict[str, str] | None
    tags_from: Extract | None
    keys_from: Extract | None
    ordering_key: str | None
    ordering_key_from: Extract | None
    receipts: bool

    @classmethod
    def from_command_line(cls, topic: str, given: Mapping[str, Any]) -> SendOptions:
        return cls(
            topic=topic,
            name_server=given["name_server"],
            timeout_s=given["timeout"],
            wait_s=given["wait_s"],
            count=given["count"],
            queue_id=given["queue"],
            tags=given["tags"],
            keys=given["keys"],
            properties=dict(_pair(text) for text in given["properties"]) or None,
            tags_from=extractor(given["tags_from"]),
            keys_from=_key_extractor(given["keys_from"]),
            ordering_key=given["ordering_key"],
            ordering_key_from=extractor(given["ordering_key_from"]),
            receipts=given["receipts"],
        )

    @property
    def line_by_line(self) -> bool:
        return bool(self.tags_from or self.keys_from or self.ordering_key_from)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise click.UsageError(
            f"--property {text}: must be NAME=VALUE; a property cannot have an empty value"
        )
    return name, value


def _key_extractor(spec: str | None) -> Extract | None:
    """Return an extractor for one key of each line; it refuses keys with spaces."""
    extract = extractor(spec)
    if extract is None:
        return None

    def one_key(line: bytes) -> str | None:
        found = extract(line)
        if found and KEY_SEPARATOR in found:
            raise click.ClickException(
                f"--keys-from {spec}: the key {found[:100]!r} has a space, which separates keys; "
                "use an expression that matches one word"
            )
        return found

    return one_key


def extractor(spec: str | None) -> Extract | None:
    """Return a function that extracts a value from a line, by the number of a field, from 1, or a
    regular expression for the text. Bytes that are not UTF-8 are matched as surrogate escapes, as
    in Python's file names."""
    if spec is None:
        return None
    if spec.isascii() and spec.isdigit():
        return _field(int(spec))
    try:
        pattern = re.compile(spec)
    except re.error as error:
        raise click.UsageError(f"{spec!r} is no regular expression: {error}") from None
    group = min(1, pattern.groups)

    def search(line: bytes) -> str | None:
        match = pattern.search(line.decode(errors="surrogateescape"))
        found = match[group] if match else None
        return _storable(found) if found else None

    return search


def _storable(text: str) -> str:
    """Replace bytes that were not UTF-8 by U+FFFD: tags and keys are text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _field(number: int) -> Extract:
    if number < 1:
        raise click.UsageError("fields are numbered from 1")

    def split(line: bytes) -> str | None:
        fields = line.split(None, number)
        if len(fields) < number:
            return None
        return fields[number - 1].rstrip(_TRAILING).decode(errors="replace") or None

    return split


def _read(descriptor: int, name: str) -> bytes:
    try:
        return os.read(descriptor, READ_BYTES)
    except OSError as error:  # of a folder, say
        raise click.ClickException(f"{name}: {error.strerror}") from None


class LineSource:
    """The lines of files, a few MiB at a time; `-` is standard input.

    A line that is being written is waited for; what is whole is handed on at once.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.read_bytes = 0

    def total_bytes(self) -> int | None:
        """How much there is to read, if that can be known."""
        total = 0
        for name in self._names:
            try:
                found = os.fstat(0) if name == "-" else os.stat(name)
            except OSError:
                return None
            if not stat.S_ISREG(found.st_mode):
                return None
            total += found.st_size
        return total

    def __iter__(self) -> Iterator[list[bytes]]:
        for name in self._names:
            if name == "-":
                yield from self._lines(0, "standard input")
                continue
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise click.ClickException(f"{name}: {error.strerror}") from None
            try:
                yield from self._lines(descriptor, name)
            finally:
                os.close(descriptor)

    def _lines(self, descriptor: int, name: str) -> Iterator[list[bytes]]:
        begun: list[bytes] = []
        while data := _read(descriptor, name):
            self.read_bytes += len(data)
            lines = data.split(b"\n")
            begun.append(lines[0])
            if len(lines) == 1:
                if sum(map(len, begun)) > LINE_BYTES_MAX:
                    raise click.ClickException(f"{name}: a line of over {LINE_BYTES_MAX} bytes")
                continue
            lines[0] = b"".join(begun)
            begun = [lines.pop()]
            yield lines
        if last := b"".join(begun):
            yield [last]


@dataclass
class Counts:
    """What became of the lines. What is sent, and neither acknowledged nor refused, may be stored
    or not."""

    sent: int = 0
    acknowledged: int = 0
    refused: int = 0  # the broker took nothing of these
    skipped_empty: int = 0
    bytes: int = 0

    def add(self, *, sent: int = 0, acknowledged: int = 0, refused: int = 0) -> None:
        """Count lines."""
        self.sent += sent
        self.acknowledged += acknowledged
        self.refused += refused


class Sender:
    """Sends all lines of a source, a chunk at a time, and tells how many were acknowledged."""

    def __init__(self, options: SendOptions, output: str) -> None:
        self._options = options
        self._output = output
        self._counts = Counts()
        self._began = time.monotonic()

    def run(self, source: LineSource) -> None:
        options = self._options
        try:
            with (
                CtrlC() as ctrl_c,
                Producer(
                    options.name_server,
                    linger_ms=LINGER_MS,
                    timeout_s=options.timeout_s,
                    wait_for_broker=options.wait_s,
                ) as producer,
                _progress(source.total_bytes()) as progress,
            ):
                for lines in source:
                    with ctrl_c.held():
                        is_enough = self._take(producer, lines)
                    if is_enough:
                        break
                    _advance(progress, source.read_bytes, self._counts.acknowledged)
        except BrokenPipeError:
            raise
        except BaseException:
            if self._counts.sent:
                self._report()
            raise
        self._report()

    def _take(self, producer: Producer, lines: list[bytes]) -> bool:
        """Send these; whether that was enough."""
        counts = self._counts
        bodies = [line for line in lines if line]
        counts.skipped_empty += len(lines) - len(bodies)
        if self._options.count is not None:
            bodies = bodies[: self._options.count - counts.sent]
        if bodies and self._options.line_by_line:
            self._send_lines(producer, bodies)
        elif bodies:
            self._send_many(producer, bodies)
        return counts.sent == self._options.count

    def _send_many(self, producer: Producer, bodies: list[bytes]) -> None:
        """Send lines that have nothing of their own, and wait until they are stored."""
        counts, options = self._counts, self._options
        counts.add(sent=len(bodies))
        try:
            receipts = producer.send_many(
                options.topic,
                bodies,
                tags=options.tags,
                keys=options.keys,
                properties=options.properties,
                ordering_key=options.ordering_key,
                queue_id=options.queue_id,
            )
        except Refused as error:
            counts.add(acknowledged=error.stored, refused=len(bodies) - error.stored)
            raise
        self._acknowledged(bodies, receipts)

    def _send_lines(self, producer: Producer, bodies: list[bytes]) -> None:
        """Send each with the tags and keys that it holds, and wait until all are stored. The lines
        behind one that is refused here are not sent."""
        counts = self._counts
        receipts: list[Receipt] = []
        for body in bodies:
            counts.add(sent=1)
            try:
                receipts.append(self._send_line(producer, body))
            except (click.ClickException, CometError):
                counts.add(refused=1)
                with contextlib.suppress(CometError):  # the first error is the one to be seen
                    producer.flush()
                    self._acknowledged(bodies[: len(receipts)], receipts)
                raise
        producer.flush()
        self._acknowledged(bodies, receipts)

    def _acknowledged(self, bodies: list[bytes], receipts: Sequence[Receipt]) -> None:
        self._counts.add(acknowledged=len(bodies))
        self._counts.bytes += sum(map(len, bodies))
        if self._options.receipts:
            self._print_receipts(receipts)

    def _send_line(self, producer: Producer, body: bytes) -> Receipt:
        options = self._options
        key_from = options.ordering_key_from
        return producer.send(
            options.topic,
            body,
            tags=options.tags_from(body) if options.tags_from else options.tags,
            keys=options.keys_from(body) if options.keys_from else options.keys,
            properties=options.properties,
            ordering_key=key_from(body) if key_from else options.ordering_key,
            queue_id=options.queue_id,
        )

    def _print_receipts(self, receipts: Sequence[Receipt]) -> None:
        fields = ("topic", "broker", "queue_id", "queue_offset", "msg_id", "status")
        lines = []
        for receipt in receipts:
            values = {field: getattr(receipt, field) for field in fields}
            if self._output == JSON:
                lines.append(json.dumps(values))
            else:
                lines.append("\t".join(map(str, values.values())))
        click.echo("\n".join(lines))

    def _report(self) -> None:
        counts = self._counts
        seconds = time.monotonic() - self._began
        record = {
            "topic": self._options.topic,
            "sent": counts.sent,
            "acknowledged": counts.acknowledged,
            "refused": counts.refused,
            "unconfirmed": counts.sent - counts.acknowledged - counts.refused,
            "skipped_empty": counts.skipped_empty,
            "bytes": counts.bytes,
            "seconds": round(seconds, 3),
            "messages_per_s": round(counts.acknowledged / seconds),
        }
        if self._options.receipts and self._output != JSON:
            hint(f"{counts.sent} sent, {counts.acknowledged} acknowledged in {seconds:.2f} s")
        else:
            print_record(record, self._output)


# --- progress -------------------------------------------------------------------------------------


def _progress(total_bytes: int | None) -> Any:
    """A bar where somebody looks at standard error, else nothing."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    progress = Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[messages]:,} messages acknowledged"),
        console=console(stderr=True),
        transient=True,
    )
    progress.add_task("send", total=total_bytes, messages=0)
    return progress


def _advance(progress: Progress | None, read_bytes: int, messages: int) -> None:
    if progress is not None:
        progress.update(progress.task_ids[0], completed=read_bytes, messages=messages)
