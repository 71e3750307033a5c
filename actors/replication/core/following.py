"""A follower: one session with the master (rules 3, 4 and 5 of docs/replication.md)."""

from __future__ import annotations

from enum import Enum, auto

from cometmq.actors.replication.core.actions import Send, Why
from cometmq.actors.replication.core.frames import (
    MARKS_MAX,
    Ack,
    Agreed,
    AnyFrame,
    Apart,
    Beat,
    Bytes,
    Hello,
    Mark,
    Marks,
    Welcome,
)
from cometmq.actors.replication.core.link import EngineLink
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.promises import EpochStart, common_ends, is_table_of


class Stage(Enum):
    NONE = auto()  # no session
    HELLO = auto()  # the master's table is awaited
    MARKS = auto()  # how far the logs agree is awaited
    STREAM = auto()  # bytes are taken and acknowledged


class Following:
    """One session at a time; a new one has a new nonce, and frames of any other are refused."""

    def __init__(self, local: Local, link: EngineLink) -> None:
        self._local = local
        self._link = link
        self._stage = Stage.NONE
        self._master = ""
        self._nonce = 0
        self._epoch = 0  # of the session, once it is welcome
        self._epochs: tuple[EpochStart, ...] = ()  # the master's
        self._ends: set[int] = set()  # of the marks that were sent
        self._heard_at = 0.0
        self._acked = 0
        self._beat = 0

    def follow(self, master: str, epoch: int) -> None:
        """Whom the record names; "": nobody. Another mastership ends the session."""
        if master != self._master or 0 < self._epoch < epoch:
            self.leave()
            self._master = master
            if master:
                self._say_hello()

    def leave(self) -> None:
        """No session, and nothing is taken any more."""
        self._stage, self._master = Stage.NONE, ""

    def tick(self) -> None:
        settings = self._local.settings
        patience = settings.silence_s if self._stage is Stage.STREAM else settings.retry_s
        if self._master and self._local.now >= self._heard_at + patience:
            self._say_hello()

    def _say_hello(self) -> None:
        local = self._local
        self._stage, self._nonce, self._heard_at = Stage.HELLO, local.new_nonce(), local.now
        self._epoch = self._acked = self._beat = 0
        promises = local.promises
        self._send(
            Hello(
                promises.group,
                promises.promised_epoch,
                self._nonce,
                promises.store_uuid,
                promises.incarnation,
            )
        )

    def _send(self, frame: AnyFrame) -> None:
        self._local.do(Send(self._master, frame))

    def _is_of_session(self, sender: str, frame: AnyFrame, stage: Stage) -> bool:
        """Whether a frame follows the handshake of this session; if not, that is said."""
        what = type(frame).__name__
        promised = self._local.promises.promised_epoch
        if frame.epoch < promised:
            self._local.refuse(sender, what, Why.OLD_EPOCH, promised, frame.epoch)
        elif (
            sender != self._master
            or frame.nonce != self._nonce
            or self._stage is not stage
            or (stage is not Stage.HELLO and frame.epoch != self._epoch)
        ):
            self._local.refuse(sender, what, Why.OTHER_SESSION, self._nonce, frame.nonce)
        else:
            self._heard_at = self._local.now
            return True
        return False

    # --- the handshake ---

    def on_welcome(self, sender: str, frame: Welcome) -> None:
        """Promise the master's epoch, and say where the logs may be the same."""
        if not self._is_of_session(sender, frame, Stage.HELLO):
            return
        record = self._link.record
        assert record is not None, "it has named the master"
        if frame.epoch < record.epoch:
            self._local.refuse(sender, "Welcome", Why.NOT_THE_MASTER, record.epoch, frame.epoch)
            return
        if not is_table_of(frame.epochs, frame.epoch, frame.begin, frame.end):
            self._local.refuse(sender, "Welcome", Why.BAD_TABLE, frame.epoch, frame.end)
            return
        if frame.epoch > self._local.promises.promised_epoch:
            self._local.keep(promised_epoch=frame.epoch)
        self._epoch, self._epochs, self._stage = frame.epoch, frame.epochs, Stage.MARKS
        marks = self._marks(frame)
        self._ends = {mark.end for mark in marks}
        self._send(Marks(frame.group, frame.epoch, frame.nonce, marks))

    def _marks(self, welcome: Welcome) -> tuple[Mark, ...]:
        """The last record before each end that both logs may have, the furthest first."""
        local = self._local
        ends = common_ends(local.promises.epochs, local.end, welcome.epochs, welcome.end)
        found = []
        for end in ends[:MARKS_MAX]:
            if end > local.begin:
                mark = local.log.last_record(end)
                if mark is not None:
                    found.append(mark)
            elif end == local.begin:
                found.append(Mark(end, end, 0))  # no record to compare: the tables alone tell
        return tuple(found)

    def on_agreed(self, sender: str, frame: Agreed) -> None:
        """Cut what is not the master's."""
        if not self._is_of_session(sender, frame, Stage.MARKS):
            return
        local, to = self._local, frame.offset
        if to not in self._ends:
            local.refuse(sender, "Agreed", Why.NOT_MARKED, local.end, to)
        elif to == local.end:
            self._stream()
        elif self._is_current():
            local.refuse(sender, "Agreed", Why.CURRENT_EPOCH, local.end, to)
        elif to < local.confirm:
            self._stop(f"only what lies below {to} in common with")
        else:
            local.cut(to)
            self._stream()

    def on_apart(self, sender: str, frame: Apart) -> None:
        """Begin anew where the master's log does, if nothing that is here was ever confirmed."""
        if not self._is_of_session(sender, frame, Stage.MARKS):
            return
        local = self._local
        if self._is_current() and frame.offset < local.end:
            # Of the present epoch it can have deleted what is old, and nothing else.
            local.refuse(sender, "Apart", Why.CURRENT_EPOCH, local.end, frame.offset)
        elif local.confirm > local.begin:
            self._stop(f"nothing in common from {frame.offset} on with")
        else:
            local.start_over(frame.offset)
            self._stream()

    def _stop(self, what: str) -> None:
        """Confirmed bytes are never cut (rule 4)."""
        local = self._local
        local.stop(
            f"the log from {local.begin} to {local.end}, confirmed up to {local.confirm}, has "
            f"{what} that of the master {self._master} of epoch {self._epoch}: confirmed bytes are "
            "not cut; replace this store by an empty one once it is known why"
        )

    def _stream(self) -> None:
        """Take over the master's table, and bytes from here on.

        After the cut: a table that tells of more than there is, is put right by a start.
        """
        self._local.keep(epochs=self._epochs)
        self._stage = Stage.STREAM
        self._ack()

    def _is_current(self) -> bool:
        """Whether the log's end was written in the epoch of this very session: then it came from
        this master, which has it as well, whatever an old frame says."""
        epochs = self._local.promises.epochs
        return (
            bool(epochs) and epochs[-1].epoch == self._epoch and self._local.end > epochs[-1].start
        )

    # --- the stream ---

    def on_bytes(self, sender: str, frame: Bytes, length: int, crc: int) -> None:
        """
        Args:
            length, crc: of the bytes that came with the frame.
        """
        local = self._local
        if not self._is_of_session(sender, frame, Stage.STREAM):
            return
        if length != frame.length or not length:
            local.refuse(sender, "Bytes", Why.WRONG_LENGTH, length, frame.length)
            self._say_hello()
        elif crc != frame.crc:
            local.refuse(sender, "Bytes", Why.WRONG_CRC, crc, frame.crc)
            self._say_hello()
        elif frame.offset != local.end:
            self._out_of_place(sender, "Bytes", frame.offset)
        else:
            local.append(length)
            local.confirm_to(frame.confirm)
            if not local.settings.sync_flush:
                self._ack()

    def on_beat(self, sender: str, frame: Beat) -> None:
        if not self._is_of_session(sender, frame, Stage.STREAM):
            return
        if frame.offset > self._local.end:
            self._out_of_place(sender, "Beat", frame.offset)
            return
        self._beat = max(self._beat, frame.number)
        self._local.confirm_to(frame.confirm)
        self._ack()

    def _out_of_place(self, sender: str, what: str, offset: int) -> None:
        """What came before is here already, and comes twice; what is missing was lost."""
        end = self._local.end
        is_gap = offset > end
        self._local.refuse(sender, what, Why.GAP if is_gap else Why.OVERLAP, end, offset)
        if is_gap:
            self._say_hello()

    def flushed(self) -> None:
        """More is on the disk."""
        if self._stage is Stage.STREAM and self._local.held() > self._acked:
            self._ack()

    def _ack(self) -> None:
        self._acked = self._local.held()
        group = self._local.promises.group
        self._send(Ack(group, self._epoch, self._nonce, self._acked, self._beat))
