"""The desk at the log: batches of clients and records of actors, appended and published."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.inner import properties_max
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.derivers import Derivers
from cometmq.actors.tables.transactions import END_LETTERS, OP_HEAD
from cometmq.actors.writer.admission import Admission
from cometmq.actors.writer.answers import SLOW_S, Answers
from cometmq.actors.writer.batches import NOTHING_FOUND, Batches, Found, Stored
from cometmq.actors.writer.cursors import Cursors
from cometmq.actors.writer.derived import DerivedWrites
from cometmq.actors.writer.half_book import HalfBook
from cometmq.actors.writer.half_writes import queue_of
from cometmq.actors.writer.keyed import Keyed
from cometmq.actors.writer.opening import tell_of_step_back
from cometmq.actors.writer.producers import Producers
from cometmq.actors.writer.transactions import Enders, Transactions
from cometmq.conf import FlushDiskType
from cometmq.protocol.commands import (
    AppendRecords,
    Cover,
    OpenProducer,
    ProducerOpened,
    QueueKey,
    RecordsAppended,
    Section,
    SendMessages,
)
from cometmq.protocol.derived import (
    DERIVED_QUEUE,
    DERIVED_TOPIC,
    MARK_BYTES_MAX,
    WRITE_BYTES_MAX,
    snapshot_bytes_max,
)
from cometmq.protocol.errors import (
    BadRequest,
    FlushDiskTimeout,
    MessageIllegal,
    MessageTooLarge,
    NotConfirmed,
    ServiceNotAvailable,
)
from cometmq.protocol.frames import failed
from cometmq.protocol.names import HIDDEN_TOPICS, OP_TOPIC
from cometmq.shm.kernel.live import OwnedCell, ReadCell
from cometmq.shm.kernel.store import EndsBatch, HalfEnds
from cometmq.shm.live.control import Counter
from cometmq.shm.log.commit_log import CommitLog

log = logging.getLogger(__name__)

STORED = SendMessages, AppendRecords, OpenProducer, Enders  # what the desk takes


class Desk:
    """Appends to the log, for the holder of the put lock. Whatever is stored comes by here, or
    natively by an Appender of this process, which asks here when it cannot go on alone.

    Nothing is visible before `publish`, and nobody is woken before `wake`.

    Args:
        flushed, synced: the counter, and this process's word of it.
        on_failed_sync: nobody knows any more what is on the disk.
        store: the actor's, for commands that have to be held.
    """

    def __init__(
        self,
        actor: ServiceActor,
        family: Family,
        commit_log: CommitLog,
        cursors: Cursors,
        admission: Admission,
        answers: Answers,
        *,
        flushed: ReadCell,
        synced: OwnedCell,
        on_failed_sync: Callable[[OSError], None],
        store: Callable[[list[Request]], None],
    ) -> None:
        self.is_over = False  # out of service, for ever
        self.blocked: ServiceNotAvailable | None = None  # see Staging
        self._log = commit_log
        self._cursors = cursors
        self._admission = admission
        self._answers = answers
        settings = family.settings
        self._family = family
        self._flush_timeout_s = settings.sync_flush_timeout_ms / 1000
        self._slave_timeout_s = settings.slave_timeout_ms / 1000
        self._sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._flushed = flushed
        self._synced = synced
        self._on_failed_sync = on_failed_sync
        self.own_records = 0  # of the broker's own, which are nobody's messages
        segment_bytes = settings.mapped_file_size_commit_log_bytes
        bytes_max = snapshot_bytes_max(segment_bytes, settings.max_message_size)
        self.derived = DerivedWrites(
            Derivers(bytes_max),
            partial(self.append_records, size_max=WRITE_BYTES_MAX, has_waited=True),
            segment_start=lambda: commit_log.appender.segment_start,
            flushed=lambda: flushed.value,
            tell_needed=family.control.own(Counter.MARKS_FROM).reset,
        )
        self.producers = Producers(self.derived, bytes_max)
        self.keyed = Keyed(family)
        self.batches = Batches(
            settings,
            commit_log,
            cursors,
            check_admitted=self._check_admitted,
            cover=answers.policy,
            check_producer=self.producers.check,
            keyed=self.keyed,
        )
        self.transactions = Transactions(
            HalfBook(
                actor,
                family,
                self.derived,
                self._append_ends,
                lambda error: self.transactions.is_ready(error),
            ),
            segment_bytes=segment_bytes,
            properties_max=properties_max(settings),
            cover=answers.policy,
            check_admitted=self._check_admitted,
            store=store,
        )

    # --- commands ---

    def store(self, request: Request, found: Found = NOTHING_FOUND) -> Stored:
        """Append what a command brings, but for what is `found` to be there (Repeats)."""
        command = request.command
        if isinstance(command, SendMessages):
            return self.batches.store(request, command, found)
        if isinstance(command, OpenProducer):
            return self._open_producer(command)
        if isinstance(command, Enders):
            return self.transactions.take(command)
        assert isinstance(command, AppendRecords)
        return self._store_records(request, command)

    def _open_producer(self, command: OpenProducer) -> Stored:
        try:
            self._check_admitted()
            epoch = self.producers.open(command)
        except Exception as caught:
            error = explained(caught, "producer %.140r could not be opened", command.producer_id)
            return Stored(failed(error))
        return Stored(ProducerOpened(0, epoch), self._answers.policy)

    def _store_records(self, request: Request, command: AppendRecords) -> Stored:
        """Append an actor's records, or say why not: all or none."""
        try:
            if len(request.payload) != 1:
                raise BadRequest(f"{len(request.payload)} payload frames, one is wanted")
            cover = self._answers.cover_of(command.cover)
            places = self._place(command, request.payload[0].buffer)
        except Exception as caught:
            error = explained(caught, "%d records of an actor failed", command.count)
            return Stored(failed(error))
        answer = RecordsAppended(0, self._log.last_store_timestamp, already=places is None)
        return Stored(answer, cover, [places or b""])

    def _place(self, command: AppendRecords, payload: memoryview) -> bytes | None:
        """Where the records lie now; None: they were there already, which is said at any time."""
        what = command.derived
        if what is None and not command.count:
            return b""  # the command only asks for acks
        if what is None:
            self._check_admitted()
            return self.append_records(command.queues, payload, command.count)
        if self.derived.book.is_new(what.deriver, what.before, what.after):
            self._check_admitted()
        return self.derived.write(what, command.queues, payload, command.count)

    def _check_admitted(self) -> None:
        waiting = self._answers
        self._admission.check(waiting.waiting_bytes(self._log.physical_offset) if waiting else 0)
        if self.blocked is not None:
            raise self.blocked

    def check_lasting(self, waiting_bytes: int) -> None:
        """Raises why nothing is stored now, to a thread that is in no group of sends."""
        self._admission.check_lasting(waiting_bytes)
        if self.blocked is not None:
            raise self.blocked

    # --- appending ---

    def append_records(
        self,
        queues: Sequence[QueueKey],
        payload: bytes | memoryview,
        count: int,
        size_max: int = sys.maxsize,
        has_waited: bool = False,
    ) -> bytes:
        """Append an actor's records, all or none; see CommitLog.append_inner. For `has_waited` see
        Cursors.for_record."""
        find = partial(self._cursors.for_record, has_waited=has_waited)
        cursors = [find(key.topic, key.queue_id) for key in queues]
        places = self._log.append_inner(cursors, payload, count, size_max=size_max)
        own = sum(key.topic in HIDDEN_TOPICS for key in queues)
        # Either all of them, or one mark with others' messages behind it.
        self.own_records += count if own == len(queues) else own
        return places

    def _append_ends(self, ends: HalfEnds, mark: bytes) -> tuple[int, int]:
        """Lay down a mark, and behind it what these come to, all or none: where the mark lies, and
        the op's queue offset."""
        of = partial(self._cursors.for_record, has_waited=True)
        queues = [of(*queue_of(topic, queue_id)) for topic, queue_id in ends.queues]
        derived, ops = of(DERIVED_TOPIC, DERIVED_QUEUE), of(OP_TOPIC, 0)
        batch = self._log.checked(
            lambda log: EndsBatch(log, ends, queues, derived, mark, ops, OP_HEAD, END_LETTERS)
        )
        if batch.size > WRITE_BYTES_MAX:
            raise MessageTooLarge(f"ends of {batch.size} bytes, at most {WRITE_BYTES_MAX}")
        places = self._log.append_checked(batch.append)
        self.own_records += 1  # the mark
        return places

    @property
    def unflushed_bytes(self) -> int:
        """What was appended and is not confirmed by the disk."""
        return self._log.physical_offset - self._flushed.value

    # --- publishing ---

    def publish(self) -> None:
        """Whatever was appended may be seen."""
        self._log.publish()
        tell_of_step_back(self._log)

    def wake_readers(self) -> None:
        """Whoever waits for messages of the queues that were published."""
        self._log.appender.wake_queues()

    def wake(self) -> None:
        """Whoever sleeps on what was published."""
        self._log.wake()
        self._synced.wake_moved()

    def make_durable(self, *, here: bool) -> bool:
        """Whether what was published is on the disk now; else it will be soon.

        Args:
            here: sync it in this process, if it is little and the disk is fast: there is nothing
                else to do before the answer.
        """
        if here and not self._answers.is_slow:
            began = time.monotonic()
            try:
                end = self._log.sync()
            except OSError as error:
                self._on_failed_sync(error)
                return False
            if end:
                self._answers.is_slow = time.monotonic() - began > SLOW_S
                self._synced.raise_to(end)
                return True
        self._log.appender.want()
        return False

    # --- what nothing else may come into ---

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing of another thread enters the log meanwhile."""
        with self._log.gate:
            try:
                yield
            finally:
                self.bar_if_refused()

    def bar_if_refused(self) -> None:
        """Appenders ask before they append, as long as there is something to be told."""
        self._log.gate.bar(self._admission.is_closed or self.blocked is not None)
        if self.is_over:  # another thread may have said so meanwhile
            self._log.gate.bar()

    def end(self) -> None:
        """Nothing is appended any more, by any thread."""
        self.is_over = True
        self._log.gate.bar()

    # --- stages ---

    def check_staged(self, section: Section, batch: memoryview, born_host: bytes) -> None:
        if section.sys_flag:
            raise MessageIllegal(f"staged messages with system flags ({section.sys_flag})")
        queue = self._cursors.writable(section.topic, section.queue_id)
        self._log.check_batch(queue, batch, section.count, born_host, beside=MARK_BYTES_MAX)

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        return self._cursors.of(topic, queue_id).next_offset  # 0: nothing has reached the log

    def publish_and_wake(self) -> None:
        self.publish()
        if self._sync:
            self._log.appender.want()
        self.wake()

    def wait_covered(self) -> None:
        """Nobody else is served meanwhile: what they send has to wait for the same disk. Slaves
        that are late are not an error: what is stored stays, and is sent to them."""
        if self._family.settings.is_in_group:
            self._wait_group()
            return
        self._wait_flushed()
        if self._answers.policy & Cover.REPLICATED and not self.why_no_slave():
            with suppress(ServiceNotAvailable):
                self._family.wait_for(
                    Counter.REPLICATED, self._log.physical_offset, self._slave_timeout_s
                )
            self._answers.release()

    def _wait_group(self) -> None:
        try:
            self._family.wait_for(
                Counter.REPLICATED, self._log.physical_offset, self._slave_timeout_s
            )
        except ServiceNotAvailable as error:
            raise NotConfirmed(f"stored, but not confirmed by the group: {error}") from None
        finally:
            self._answers.release()

    def why_no_slave(self) -> str:
        slaves = self._answers.slaves
        return slaves.why_missing() if slaves is not None else ""

    def _wait_flushed(self) -> None:
        if self._sync:
            try:
                self._family.wait_for(
                    Counter.FLUSHED, self._log.physical_offset, self._flush_timeout_s
                )
            except ServiceNotAvailable as error:
                raise FlushDiskTimeout(str(error)) from None
            finally:
                self._answers.release()  # the doorbell rang for them too
