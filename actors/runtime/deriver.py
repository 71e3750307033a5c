"""A deriver: whoever reads something and has records stored that come of it, once (derived writes).

What it needs to outlive any kill is its name. The log knows how far it has come.
"""

from __future__ import annotations

from typing import Final

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.protocol.commands import (
    Cover,
    Derivation,
    DerivedPosition,
    GetDerived,
    Position,
    RecordsAppended,
)
from cometmq.protocol.errors import NotConfirmed
from cometmq.protocol.wire.channel import Channel

TIMEOUT_S: Final = 5.0


class Deriver:
    """One deriver's side of derived writes: where it is, and its next write.

        deriver = Deriver(channel, "delays.3", begin=Position(0, 0))
        at = deriver.position()                     # read what comes from there on ...
        deriver.write(records, Position(0, at.number + 17))

    After any error, and at a start, `position` says anew where it is; whoever reads again from
    there repeats what is not stored, and nothing that is. Calls wait for their answer, so an actor
    that serves others has a thread for it. One thread uses it.

    Args:
        commitlog: to the commitlog process, by the family's address.
        name: of this deriver in its broker, for ever.
        begin: where it is when it has written nothing.
        timeout_s: for an answer; then nobody knows, and it is asked anew where it is.
    """

    def __init__(
        self,
        commitlog: Channel,
        name: str,
        begin: Position | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.name = name
        self.note = b""  # as its last write left it, once `position` was asked
        self._commitlog = commitlog
        self._begin = begin or Position()
        self._timeout_s = timeout_s
        self._at: Position | None = None  # None: it has to be asked

    def position(self) -> Position:
        """How far it has come. Raises NotConfirmed, NotReachable: ask again."""
        if self._at is None:
            answer, _ = self._commitlog.ask(GetDerived(self.name), timeout_s=self._timeout_s)
            assert isinstance(answer, DerivedPosition)
            self._at = answer.position if answer.is_known else self._begin
            self.note = answer.note
        return self._at

    def write(
        self,
        records: InnerRecords,
        after: Position,
        *,
        note: bytes | None = None,
        cover: int = Cover.POLICY,
    ) -> None:
        """Have the records stored, with `after` as the new position: both or neither.

        Raises what AppendRecords raises; NotConfirmed where it may be stored.
        """
        before = self.position()
        self._at = None  # until it is known what has become of it
        derived = Derivation(self.name, before, after, note)
        answer, _ = self._commitlog.ask(*records.take(cover, derived), timeout_s=self._timeout_s)
        assert isinstance(answer, RecordsAppended)
        if not answer.is_kept:
            raise NotConfirmed(f"{self.name} has come to {after}, but: {answer.text}")
        self._at = after
        if note is not None:
            self.note = note
