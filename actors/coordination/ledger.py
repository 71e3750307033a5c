"""The ledger's writer: changes on their way to the log, and who waits for them to be there."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import ServiceActor, Timer
from cometmq.actors.tables.book import Book
from cometmq.protocol import frames
from cometmq.protocol.commands import Command, Cover, Failed, RecordsAppended
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    DiskFull,
    InSyncReplicasNotEnough,
    MessageIllegal,
    NotConfirmed,
    NotMaster,
    ServiceNotAvailable,
    ShuttingDown,
    SystemBusy,
    from_code,
)
from cometmq.protocol.ledger import (
    ENTRY_BYTES_MAX,
    LEDGER_QUEUE,
    LEDGER_TOPIC,
    Change,
    Place,
    entry_of,
    pack_change,
)

log = logging.getLogger(__name__)

RESEND_S: Final = 0.5  # without an answer: the process may have been started again
PATIENCE_S: Final = 2.5  # below the 3 s that a client waits, so that it hears the reason
WAITING_ENTRIES_MAX: Final = 16  # that are gathered; whoever wants more is told to try again
# With these nothing is stored, ...
REFUSALS: Final = (
    DiskFull, InSyncReplicasNotEnough, MessageIllegal, NotMaster, ServiceNotAvailable, ShuttingDown,
    SystemBusy,
)  # fmt: skip
# ... and with these it will not be soon.
LASTING: Final = (DiskFull, ServiceNotAvailable, ShuttingDown)

Action = Callable[[CometError | None], None]


class _Batch:
    """The changes of one entry, and what is to be done when it is known what became of it."""

    __slots__ = ("actions", "bytes", "cover", "packed", "undos")

    def __init__(self) -> None:
        self.packed: list[bytes] = []
        self.bytes = 0
        self.cover = Cover.POLICY
        self.undos: list[tuple[Book, Any]] = []
        self.actions: list[Action] = []


class _Flight:
    """An entry that is under way."""

    __slots__ = ("batch", "body", "is_unsure", "number", "since", "stored_at", "timer")

    def __init__(self, batch: _Batch, number: int, body: bytes) -> None:
        self.batch = batch
        self.number = number
        self.body = body
        self.is_unsure = False  # it was sent before, and nobody knows what became of it
        self.stored_at = -1  # its queue offset, once it is in the log
        self.since = time.monotonic()
        self.timer: Timer | None = None

    def has_stored(self, places: bytes) -> None:
        """Note that the entry is in the log.

        Args:
            places: as answered; empty if the request only asked for the acks of a stored entry.
        """
        if places:
            self.stored_at, _ = memoryview(places).cast("q")


class Ledger:
    """Has changes appended to the log, one entry after the other.

    One entry is under way at a time; what changes meanwhile becomes the next one. Changes are
    applied to the books as they are made, so that the next one is judged by them. What is told to
    anybody waits until they are in the log (`then`). If the log refuses them they are taken back,
    and whoever waits hears why. If it is not known whether an entry is stored, it is sent again
    until it is: its place makes sure that it counts once.

    All of it runs in the actor's thread, and nothing here blocks.

    Args:
        endpoint: where the commitlog process takes AppendRecords.
        last: the place of the last entry that counts.
        position: the queue offset behind the last entry.
        keep: writes a snapshot of what the log does not take, for as long as it takes nothing.
            Raises ServiceNotAvailable.
        entry_bytes_max: of an entry's changes; less than a segment holds.
        slave_wait_s: how long the answer may wait for slaves, before it is thought lost.
        is_alone: nobody else has to know the changes. In a group they are the next master's too:
            what the log does not take is not kept.
    """

    def __init__(
        self,
        actor: ServiceActor,
        endpoint: str,
        *,
        last: Place,
        position: int,
        keep: Callable[[], None],
        entry_bytes_max: int = ENTRY_BYTES_MAX,
        slave_wait_s: float = 0.0,
        is_alone: bool = True,
    ) -> None:
        self._actor = actor
        self._endpoint = endpoint
        self._keep = keep
        self._is_alone = is_alone
        self._entry_bytes_max = entry_bytes_max
        self._resend_s = RESEND_S + slave_wait_s
        # Above any epoch before, also when the clock has gone back.
        self.covered = Place(max(time.time_ns() // 1_000_000, last.epoch + 1), 0)
        self._numbers = 0  # given in this epoch
        self.position = position  # behind the last entry that is covered
        self.undone = 0  # how often changes were taken back
        self.entries = 0
        self._gathered: deque[_Batch] = deque()
        self._flight: _Flight | None = None
        self._request_id = 0
        self._socket = self._connect()

    # --- changing, and waiting for it ---

    @property
    def is_settled(self) -> bool:
        """Whether every change that was made is in the log."""
        return self._flight is None and not self._gathered

    @property
    def epoch(self) -> int:
        """Of this life of the coordinator: above those of all that were before it."""
        return self.covered.epoch

    @property
    def given(self) -> Place:
        """The last place of an entry whose changes may be in a snapshot that is made now."""
        return Place(self.covered.epoch, self._numbers) if self._is_alone else self.covered

    def check_room(self) -> None:
        """Raises SystemBusy while so much waits for the log that no more is taken."""
        if len(self._gathered) > WAITING_ENTRIES_MAX:
            raise SystemBusy(
                f"{len(self._gathered)} entries of the ledger wait for the commitlog process: "
                "try again"
            )

    def add(self, change: Change, books: Sequence[Book], *, on_disk: bool = False) -> None:
        """Make a change of these books; `send` sends it. If it is refused they take it back, the
        last change first. Raises BadRequest for one that no entry has room for: then it is not
        made.

        Args:
            on_disk: its entry counts as stored once it is on the disk, whatever the policy.
        """
        packed = pack_change(change)
        if len(packed) > ENTRY_BYTES_MAX:
            raise BadRequest(
                f"a {type(change).__name__} of {len(packed)} bytes: the ledger takes at most "
                f"{ENTRY_BYTES_MAX}"
            )
        if not self._gathered or self._gathered[-1].bytes + len(packed) > self._entry_bytes_max:
            self._gathered.append(_Batch())
        batch = self._gathered[-1]
        for book in books:
            batch.undos.append((book, book.apply(change)))
        batch.packed.append(packed)
        batch.bytes += len(packed)
        if on_disk:
            batch.cover = Cover.FLUSHED

    def then(self, action: Action) -> None:
        """Call it with None once all that was changed until now is in the log, which may be now;
        or with the error, if it is not, or not within some seconds."""
        if self._gathered:
            self._gathered[-1].actions.append(action)
        elif self._flight is not None:
            self._flight.batch.actions.append(action)
        else:
            action(None)

    def send(self) -> None:
        """Send what was gathered, unless an entry is under way: then it follows that one."""
        if self._flight is not None or not self._gathered:
            return
        batch = self._gathered.popleft()
        self._numbers += 1
        place = Place(self.covered.epoch, self._numbers)
        self._flight = _Flight(batch, self._numbers, entry_of(place, batch.packed))
        self._hand_over(self._flight)

    # --- the commitlog process ---

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        self._actor.inbox.listen_to(socket)
        return socket

    def _hand_over(self, flight: _Flight) -> None:
        records = InnerRecords(size_max=2 * ENTRY_BYTES_MAX)
        if flight.stored_at < 0:
            records.encoder.add(records.queue(LEDGER_TOPIC, LEDGER_QUEUE), flight.body, b"")
        # Else no record: the request only asks for the acks of the log, which has the entry.
        command, payload = records.take(flight.batch.cover)
        self._request_id += 1
        head = frames.pack(self._request_id, command)
        try:
            self._socket.send_multipart([head, *payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("an entry of the ledger was not sent: %s", error)
        flight.timer = self._actor.after(self._resend_s, self._send_again)

    def _send_again(self) -> None:
        """No answer: by a new connection, so that nothing which waits in the old one is sent."""
        flight = self._flight
        if flight is None:
            return
        flight.is_unsure = True
        self._actor.inbox.forget(self._socket)
        self._socket.close()
        self._socket = self._connect()
        self._hand_over(flight)
        if time.monotonic() - flight.since > PATIENCE_S:
            self._lose_patience()

    def _lose_patience(self) -> None:
        """Whoever waits is told that nothing is known; the entry is still sent until it is."""
        error = NotConfirmed("the commitlog process has not confirmed the change; it may be kept")
        for batch in self._waiting():
            actions, batch.actions = batch.actions, []
            for action in actions:
                action(error)

    def _waiting(self) -> list[_Batch]:
        """Whatever is not in the log, oldest first."""
        return [*([self._flight.batch] if self._flight else ()), *self._gathered]

    def on_readable(self) -> None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request_id, answer = frames.unpack(parts[0])
            if self._flight is not None and request_id == self._request_id:
                self._heard(self._flight, answer, parts[1:])

    def _heard(self, flight: _Flight, answer: Command, payload: list[bytes]) -> None:
        if isinstance(answer, RecordsAppended):
            flight.has_stored(payload[0])
            if answer.is_kept:
                self._succeed(flight, flight.stored_at)
                return
        error = _error_of(answer)
        if isinstance(error, LASTING) and self._is_alone:
            self.keep_otherwise(error)
        elif isinstance(error, REFUSALS) and not flight.is_unsure:
            self._refuse(error)
        else:  # it may be stored: the timer sends it again
            flight.is_unsure = True
            log.warning("an entry of the ledger is not confirmed: %s", error)

    def _succeed(self, flight: _Flight, queue_offset: int) -> None:
        self._stop_timer(flight)
        self._flight = None
        self.covered = Place(self.covered.epoch, flight.number)
        self.position = max(self.position, queue_offset + 1)
        self.entries += 1
        self.send()  # before the answers: the log works meanwhile
        for action in flight.batch.actions:
            action(None)

    def _refuse(self, error: CometError) -> None:
        """Nothing is stored. What was judged by it is taken back as well."""
        refused = self._take_waiting()
        self.undone += 1
        for batch in reversed(refused):
            for book, undo in reversed(batch.undos):
                book.undo(undo)
        for batch in refused:
            for action in batch.actions:
                action(error)

    def _take_waiting(self) -> list[_Batch]:
        waiting = self._waiting()
        if self._flight is not None:
            self._stop_timer(self._flight)
        self._flight = None
        self._gathered.clear()
        return waiting

    @staticmethod
    def _stop_timer(flight: _Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()

    # --- without the log ---

    def keep_otherwise(self, error: CometError) -> None:
        """The log takes nothing: its disk is full, or it has ended. So all that waits for it is
        kept by a snapshot, which it costs to write; if that fails too, it is taken back.

        Args:
            error: why the log does not take it.
        """
        if self.is_settled:
            return
        if not self._is_alone:  # what may be stored is made again by whoever goes on with the log
            self._refuse(error)
            return
        try:
            self._keep()
        except ServiceNotAvailable as problem:
            log.error("changes are not kept: %s, and %s", error, problem)
            if self._flight is None or not self._flight.is_unsure:
                self._refuse(problem)
            return  # else it may be stored: it is sent again
        done = self._take_waiting()
        self.covered = self.given
        for batch in done:
            for action in batch.actions:
                action(None)

    # --- the end ---

    def close(self) -> None:
        self._actor.inbox.forget(self._socket)
        self._socket.close()


def _error_of(answer: Command) -> CometError:
    if isinstance(answer, Failed):
        return from_code(answer.code, answer.text)
    if isinstance(answer, RecordsAppended):
        return from_code(answer.code, answer.text)
    return BadRequest(f"{type(answer).__name__} is no answer to AppendRecords")
