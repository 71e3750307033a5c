"""The book of half messages at the desk: which have ended, as the log says, and new ends.

The log is what is kept. Its ops are read when transactions begin in this process; from then on it
knows by itself, since nobody else writes any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.half_log import HALVES_COUNT, READ_BYTES_MAX, HalfLog
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import ServiceActor
from cometmq.actors.tables.transactions import (
    Ended,
    Halves,
    OpQueue,
    Outcome,
    first_of,
    last_of,
    op_of,
)
from cometmq.actors.writer.derived import DerivedWrites
from cometmq.protocol.commands import (
    BeginTransactions,
    Derivation,
    GroupOffsets,
    Position,
)
from cometmq.protocol.errors import CometError
from cometmq.protocol.names import HALF_TOPIC, OP_TOPIC
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.kernel.store import HalfEnds
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.store_reader import ReadLimits

log = logging.getLogger(__name__)

NAME: Final = "transactions"  # of the deriver
OPS_BACK: Final = 4_096  # ops that are read again at a start, so that repeated ends are known
SLICE_S: Final = 0.005  # then whoever sends is heard
SPAN_LOOK: Final = 1 << 22  # halves that are remembered, before it is looked which are gone
_LIMITS: Final = ReadLimits(
    hot_bytes=READ_BYTES_MAX, hot_count=HALVES_COUNT,
    cold_bytes=READ_BYTES_MAX, cold_count=HALVES_COUNT, skip_removed=False,
)  # fmt: skip


class HalfBook:
    """Part of the desk.

    Args:
        derived: lays down an op and what comes of it, in one piece.
        append_ends: lays down a mark, and behind it what ends that were picked come to; the mark's
            physical offset, and the op's queue offset.
        on_ready: called once it is known what is pending; with an error, where that cannot be told
            now: it begins again when it is told to.
    """

    def __init__(
        self,
        actor: ServiceActor,
        family: Family,
        derived: DerivedWrites,
        append_ends: Callable[[HalfEnds, bytes], tuple[int, int]],
        on_ready: Callable[[CometError | None], None],
    ) -> None:
        self._actor = actor
        self.halves = Halves()
        self.is_ready = False
        self.reader = family.store_reader(_LIMITS)
        self._ops = OpQueue()
        self._log = HalfLog(self.reader)
        self._derived = derived
        self._append_ends = append_ends
        self._on_ready = on_ready
        self._dispatched = Dispatched(family)
        self._wrote = family.control.read(Counter.WROTE)
        self._address = family.addresses["coordinator"]
        # Opened when it is needed first: a service's writer may come to its end without `close`.
        self._coordinator: Channel | None = None
        self._has_begun = False
        self._loading: Iterator[object] | None = None
        self._wanted = 0  # physical offset up to which the dispatcher has to come before

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        self.reader.close()

    # --- the beginning ---

    def begin(self) -> None:
        """Find out what is pending, unless that has begun."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._coordinator is None:
            self._coordinator = Channel(self._address, "the coordinator")

        def heard(done: Pending) -> None:
            self._actor.call_soon(lambda: self._told(done))

        self._coordinator.request(BeginTransactions(), on_done=heard)

    def _told(self, done: Pending) -> None:
        """The coordinator's word of where pending ones begin."""
        try:
            answer, _ = done.result()
        except CometError as error:
            self._cannot(error)
            return
        assert isinstance(answer, GroupOffsets)
        half, op = (max(each.queue_offset, 0) for each in answer.offsets)
        self._wanted = self._wrote.value
        self._loading = self._load(half, op)
        self.go_on()

    def _cannot(self, error: CometError) -> None:
        self._has_begun, self._loading = False, None
        self._on_ready(error)

    def go_on(self) -> None:
        """Read for a slice of time, once the dispatcher has come to where the log ended."""
        if self._loading is None or self._is_ahead():
            return
        stop = time.monotonic() + SLICE_S
        try:
            while time.monotonic() < stop:
                next(self._loading)
        except StopIteration:
            self._loading = None
            self.is_ready = True
            self._on_ready(None)
        except Exception as caught:
            self._cannot(explained(caught, "which transactions are pending"))
        else:
            self._actor.call_soon(self.go_on)

    def _is_ahead(self) -> bool:
        """Whether the dispatcher has yet to come there; then it rings."""
        if self._dispatched.value >= self._wanted:
            return False
        self._dispatched.arm()
        return self._dispatched.value < self._wanted

    def _load(self, half_begin: int, op_begin: int) -> Iterator[object]:
        """Steps are short."""
        halves = Halves(max(half_begin, self._log.range_of(HALF_TOPIC)[0]))
        op_first = self._log.range_of(OP_TOPIC)[0]
        op_begin = max(op_begin, op_first)
        ops = OpQueue(op_begin)
        yield from self._log.take_ops(max(op_first, op_begin - OPS_BACK), op_begin, halves, ops)
        for message in self._log.pending(halves):
            if message is not None:
                first = first_of(message.properties, message.queue_offset)
                if first != message.queue_offset:
                    halves.copies[first] = message.queue_offset
            yield None
        self.halves, self._ops = halves, ops

    # --- ends ---

    def write(self, records: InnerRecords, ended: Sequence[Ended]) -> memoryview:
        """Lay down records, and that these halves have ended so: both or neither.

        Returns queue offset and physical offset of each record. Raises what appending raises; then
        nothing is stored.
        """
        body, properties = op_of(ended)
        records.encoder.add(records.queue(OP_TOPIC, 0), body, properties)
        command, payload = records.take()
        places = self._derived.write(self._next(), command.queues, payload[0], command.count)
        assert places is not None, "nobody else has the position"
        found = memoryview(places).cast("q")
        self.halves.take(ended)
        self._has_laid(found[-2], last_of(ended))
        return found

    def write_ends(self, ends: HalfEnds) -> None:
        """`write` for ends that were picked, and what they commit."""
        append = partial(self._append_ends, ends)
        op = self._derived.write_behind(self._next(), ends.committed + 1, append)
        assert op is not None, "nobody else has the position"
        self.halves.take_ends(ends)
        self._has_laid(op, ends.last)

    def _next(self) -> Derivation:
        known = self._derived.find(NAME)
        before = Position() if known is None else known.position
        return Derivation(NAME, before, Position(before.epoch, before.number + 1))

    def _has_laid(self, op: int, last: int) -> None:
        """An op with that queue offset; the last half that it names."""
        self._ops.take(op, last, self.halves)
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Halves that were deleted with the log hold up what is remembered of later ones."""
        if self.halves.span > SPAN_LOOK:
            begin, end = self._log.range_of(HALF_TOPIC)
            gone = range(self.halves.low, min(begin, end))
            self.halves.take((each, Outcome.GIVEN_UP) for each in gone)
