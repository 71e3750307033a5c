"""Derivers: how far each has come, and which of its writes counts. Pure: no I/O, time is handed in.

A write names the position before it and the one after it. So one that comes again, because its
answer was lost, is recognized, and one that was judged by an old position is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from cometmq.protocol.commands import Position
from cometmq.protocol.derived import (
    DERIVER_MAX,
    KNOWN_HEAD_MAX,
    Forgotten,
    Known,
    Mark,
    Snapshot,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    MessageTooLarge,
    OffsetIllegal,
    SystemBusy,
)


class Derivers:
    """The positions, as the marks tell them.

    Args:
        bytes_max: of a snapshot of all that is known.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._known: dict[str, Known] = {}
        self.bytes = 0  # a snapshot has no more

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known.values())

    def find(self, deriver: str) -> Known | None:
        return self._known.get(deriver)

    # --- a write ---

    def is_new(self, deriver: str, before: Position, after: Position) -> bool:
        """Whether the write is to be stored; False: it is there already.

        Of a deriver that nothing is known of, any position counts. Raises ArgumentIllegal;
        OffsetIllegal for a write that follows on something else than what is there.
        """
        if not 0 < len(deriver) <= DERIVER_MAX:
            raise ArgumentIllegal(
                f"deriver = {deriver!r:.80}: a name of 1 to {DERIVER_MAX} characters is wanted"
            )
        if not before < after:
            raise ArgumentIllegal(f"deriver {deriver} goes from {before} to {after}: not onward")
        known = self._known.get(deriver)
        if known is None or known.position == before:
            return True
        if known.position >= after:
            return False
        raise OffsetIllegal(
            f"deriver {deriver} writes from {before} to {after}, but has come to {known.position}: "
            "ask GetDerived, and go on from there"
        )

    def check_room(self, deriver: str, note: bytes | None) -> None:
        """Raises MessageTooLarge for a note, SystemBusy for a deriver more, with which a snapshot
        would not be one record any more."""
        known = self._known.get(deriver)
        if known is not None and note is None:
            return  # as it is
        before = 0 if known is None else _bytes_of(deriver, known.note)
        kept = b"" if known is None else known.note
        wanted = self.bytes - before + _bytes_of(deriver, kept if note is None else note)
        if wanted <= self._bytes_max or wanted <= self.bytes:
            return
        if note:
            raise MessageTooLarge(
                f"a note of {len(note)} bytes of deriver {deriver}: with it {wanted} bytes would "
                f"be known of all derivers, at most {self._bytes_max}"
            )
        raise SystemBusy(
            f"deriver {deriver} would be one more than the {len(self._known)} of which "
            f"{self._bytes_max} bytes can tell: forget one"
        )

    # --- what the marks tell ---

    def take(self, mark: Mark | Snapshot | Forgotten, at_ms: int) -> bool:
        """Go on by a mark that is in the log; False if it does not follow on the one before, so
        that one is missing. It counts all the same.

        Args:
            at_ms: its store time.
        """
        follows = True
        if isinstance(mark, Snapshot):
            self._known = {known.deriver: known for known in mark.known}
            self.bytes = sum(_bytes_of(known.deriver, known.note) for known in mark.known)
        elif isinstance(mark, Forgotten):
            self._drop(mark.deriver)
        else:
            known = self._drop(mark.deriver)
            follows = known is None or known.position == mark.before
            note = mark.note if mark.note is not None else known.note if known else b""
            self._known[mark.deriver] = Known(mark.deriver, mark.after, note, at_ms)
            self.bytes += _bytes_of(mark.deriver, note)
        return follows

    def _drop(self, deriver: str) -> Known | None:
        known = self._known.pop(deriver, None)
        if known is not None:
            self.bytes -= _bytes_of(deriver, known.note)
        return known

    def snapshot(self) -> Snapshot:
        return Snapshot(list(self._known.values()))


def _bytes_of(deriver: str, note: bytes) -> int:
    return len(deriver.encode()) + len(note) + KNOWN_HEAD_MAX
