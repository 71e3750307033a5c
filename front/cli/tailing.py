"""`cometmq msg tail`: a topic's messages on standard output, with a group or without."""

from __future__ import annotations

import json
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import click

from cometmq.cli.formatting import Render, as_record, compile_format
from cometmq.cli.interrupts import CtrlC
from cometmq.cli.output import JSON, hint
from cometmq.cli.positions import Offset, Position
from cometmq.client import Admin, Consumer, Message
from cometmq.client.receiving.buffer import Chunk, Queue
from cometmq.client.receiving.pulling import Puller
from cometmq.client.receiving.replicas import Replicas, follow
from cometmq.client.routes import Routes
from cometmq.protocol.errors import CometError
from cometmq.protocol.positions import EARLIEST, LATEST
from cometmq.protocol.tags import ALL_TAGS, check_expression, joined
from cometmq.shm.reading.selection import selection_of

PULL_BYTES: Final = 1_048_576
PREFETCH_BYTES: Final = 16 * 1_048_576
PULL_COUNT: Final = 8_192
POLL_COUNT: Final = 1_024
WAIT_S: Final = 1.0
CTRL_C_S: Final = 0.2  # the longest that Ctrl-C waits for a poll to end
DEFAULT_FORMAT: Final = r"%s\n"


@dataclass(frozen=True, kw_only=True)
class TailOptions:
    """What the command line says."""

    topic: str
    name_server: str
    start: Position | None
    count: int | None
    until_end: bool
    tags: str
    sql: str
    queue_id: int | None
    group: str | None
    template: str | None
    wait_s: float = 0

    @classmethod
    def from_command_line(cls, topic: str, given: Mapping[str, Any]) -> TailOptions:
        options = cls(topic=topic, queue_id=given["queue"], **_without(given, "queue"))
        check_expression(options.tags)
        selection_of(options.tags, options.sql)
        if options.group is not None:
            options._check_for_group()
        return options

    def _check_for_group(self) -> None:
        if self.until_end or self.queue_id is not None:
            raise click.UsageError("the members of a group share its queues: leave out -g, "
                                   "or --until-end and --queue")  # fmt: skip
        if isinstance(self.start, Offset):
            raise click.UsageError(
                "with -g, --from is earliest, latest or a time; see `group reset`"
            )


def _without(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


def run_tail(options: TailOptions, output: str) -> None:
    """Print until there is enough, or Ctrl-C."""
    printer = Printer(options.template, output)
    try:
        if options.wait_s:
            with closing(Routes(options.name_server)) as routes:
                routes.wait_for_broker(options.wait_s)
        if options.group is not None:
            print_as_member(options, options.group, printer)
            return
        for batch in first_of(TopicReader(options).batches(), options.count):
            printer.print(batch)
    except KeyboardInterrupt:
        hint(f"{printer.count} messages")
        raise


def first_of(batches: Iterable[list[Message]], count: int | None) -> Iterator[list[Message]]:
    """No more than so many messages of all."""
    left = count
    for batch in batches:
        if left is None:
            yield batch
            continue
        yield batch[:left]
        left -= len(batch)
        if left <= 0:
            return


class Printer:
    """Messages as bytes on standard output, whole batches at a time."""

    def __init__(self, template: str | None, output: str) -> None:
        if template is not None and output == JSON:
            raise click.UsageError("-o json has a format of its own: leave out -f")
        self._render: Render = as_line if output == JSON else compile_format(
            template if template is not None else DEFAULT_FORMAT
        )  # fmt: skip
        self.count = 0

    def print(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        sys.stdout.buffer.write(b"".join(map(self._render, messages)))
        self.count += len(messages)  # before anybody sees them: Ctrl-C may come right behind that
        sys.stdout.buffer.flush()


def as_line(message: Message) -> bytes:
    return json.dumps(as_record(message), ensure_ascii=False).encode() + b"\n"


# --- as a member of a group -----------------------------------------------------------------------


def print_as_member(options: TailOptions, group: str, printer: Printer) -> None:
    """Print what the group has for us; what is printed is acknowledged."""
    with Admin(options.name_server) as admin:
        admin.describe_topic(options.topic)  # a consumer would create it
    start: Any = options.start
    with (
        CtrlC() as ctrl_c,
        Consumer(
            options.name_server,
            group,
            options.topic,
            options.tags,
            sql=options.sql,
            start=EARLIEST if start is None else start,
        ) as consumer,
    ):
        while (left := (options.count or sys.maxsize) - printer.count) > 0:
            with ctrl_c.held():
                batch = consumer.poll(min(POLL_COUNT, left), timeout_s=CTRL_C_S)
                printer.print(batch)
                consumer.ack(batch)


# --- as nobody ------------------------------------------------------------------------------------


class Source:
    """One queue, and what of it waits to be printed."""

    def __init__(self, queue: Queue, end: int) -> None:
        self.queue = queue
        self.end = end  # where the queue ended when we began
        self.chunks: deque[Chunk] = deque()

    @property
    def has_backlog(self) -> bool:
        """Whether there is older news than what has arrived."""
        return not self.chunks and self.queue.next_offset < self.end

    @property
    def head(self) -> Message:
        chunk = self.chunks[0]
        return chunk.messages[chunk.position]


def age(message: Message) -> tuple[int, int]:
    """Messages in the order in which they were stored; several brokers' by their clocks."""
    return message.store_timestamp_ms, message.physical_offset


class TopicReader:
    """Reads all queues of a topic in the order of storing, and belongs to no group.

    It pulls as consumers do, but joins nothing and commits nothing, so that no broker keeps
    anything of it. Queues are merged as long as they hold what was there at the beginning; what
    comes later is handed out as it arrives.
    """

    def __init__(self, options: TailOptions) -> None:
        self._options = options
        self._routes = Routes(options.name_server)
        self._brokers: dict[str, Replicas] = {}
        self._puller = Puller(
            threading.Lock(),
            pull_bytes=PULL_BYTES,
            prefetch_bytes=PREFETCH_BYTES,
            prefetch_count=PULL_COUNT,
            on_trouble=self._look_up,
        )
        self._sources: dict[Queue, Source] = {}

    def batches(self) -> Iterator[list[Message]]:
        """Messages as they are to be printed; sleeps until there are some."""
        try:
            self._open()
            self._puller.note(self._sources)
            while self._sources:
                self._sort_in()
                batch = self._next()
                if batch:
                    yield batch
                elif self._sources:
                    self._puller.pump(WAIT_S)
        finally:
            self._puller.close()
            self._routes.close()

    def _open(self) -> None:
        options = self._options
        self._learn()
        with Admin(options.name_server) as admin:
            found_queues = admin.describe_topic(options.topic).queues
            numbers = {each.queue_id for each in found_queues}
            if options.queue_id is not None and options.queue_id not in numbers:
                raise click.UsageError(
                    f"topic {options.topic} has no queue {options.queue_id}, but 0 to "
                    f"{max(numbers, default=0)}"
                )
            for each in found_queues:
                if options.queue_id not in (None, each.queue_id):
                    continue
                found = range(each.min_queue_offset, each.max_queue_offset)
                start = self._start(admin, each.broker, each.queue_id, found)
                if options.until_end and start >= found.stop:
                    continue
                queue = self._queue(each.broker, each.queue_id, start)
                self._sources[queue] = Source(queue, found.stop)

    def _queue(self, broker: str, queue_id: int, start: int) -> Queue:
        options = self._options
        # A reader tells nothing of messages that it passes over, but keeps the pull. So that we
        # learn where the queue ends, what is there already is filtered here.
        expression = joined(options.tags, options.sql)
        pulled = expression if options.start == LATEST else ALL_TAGS
        queue = Queue(self._brokers[broker], broker, options.topic, queue_id, pulled, start)
        queue.selection = selection_of(options.tags, options.sql)
        return queue

    def _start(self, admin: Admin, broker: str, queue_id: int, found: range) -> int:
        """The first queue offset to read."""
        position = self._options.start
        if isinstance(position, datetime):
            return admin.search_offset(self._options.topic, queue_id, position, broker=broker)
        if isinstance(position, Offset):
            wanted = position.value if position.value >= 0 else found.stop + position.value
            return min(max(wanted, found.start), found.stop)
        return found.stop if position == LATEST else found.start

    def _learn(self) -> None:
        route = self._routes.find(self._options.topic)
        follow(self._brokers, route)

    def _look_up(self) -> None:
        """A reader does not answer: the broker may be elsewhere by now."""
        try:
            self._learn()
        except CometError:
            return  # it is tried again with the next pull

    def _sort_in(self) -> None:
        """What has arrived, decoded, to its queue."""
        ready = self._puller.ready
        while ready:
            chunk = ready.popleft()
            self._puller.open(chunk)
            source = self._sources.get(chunk.queue)
            if source is not None and chunk.position < chunk.stop:
                source.chunks.append(chunk)
            else:
                self._puller.taken(chunk)
        if self._options.until_end:
            for source in [each for each in self._sources.values() if self._is_through(each)]:
                source.queue.dropped = True
                del self._sources[source.queue]
                self._puller.note([source.queue])

    @staticmethod
    def _is_through(source: Source) -> bool:
        if source.chunks:
            return source.head.queue_offset >= source.end
        return source.queue.next_offset >= source.end

    def _next(self) -> list[Message]:
        """The oldest messages of all queues; none while an older one may still arrive."""
        sources = self._sources.values()
        if any(source.has_backlog for source in sources):
            return []
        heads = sorted(
            ((age(source.head), source) for source in sources if source.chunks),
            key=lambda entry: entry[0],
        )
        if not heads:
            return []
        source = heads[0][1]
        chunk = source.chunks[0]
        begin, end = chunk.position, chunk.stop
        if len(heads) > 1:
            end = max(begin + 1, bisect_right(chunk.messages, heads[1][0], begin, end, key=age))
        batch = chunk.messages[begin:end]
        if self._options.until_end and batch[-1].queue_offset >= source.end:
            batch = [each for each in batch if each.queue_offset < source.end]
        self._advance(source, chunk, end)
        return batch

    def _advance(self, source: Source, chunk: Chunk, position: int) -> None:
        chunk.position = position
        if position == chunk.stop:
            source.chunks.popleft()
            self._puller.taken(chunk)
