"""What must hold in every schedule, whatever happens: the checker.

It sees what clients see (acknowledgements, and what can be read on any replica) and what is done to
logs. A value is a record; records are numbered, so two records are never the same by chance.
"""

from __future__ import annotations

from collections.abc import Sequence


class Violation(Exception):
    """One of the promises is broken. The first word names it."""


class Truth:
    """All that clients were ever told."""

    def __init__(self) -> None:
        self.read: dict[int, int] = {}  # offset -> the record that could be read there first
        self.acked: dict[int, int] = {}  # offset -> the record that was acknowledged
        self._queue: dict[int, int] = {}  # queue offset -> the record acknowledged with it
        self._ackers: dict[int, object] = {}  # epoch -> which life of which replica

    def readable(self, who: str, begin: int, records: Sequence[int]) -> None:
        """Records from an offset on can be read on a replica now."""
        for offset, record in enumerate(records, begin):
            if self.read.setdefault(offset, record) != record:
                raise Violation(
                    f"changed: {who} shows {record} at {offset}, {self.read[offset]} was read there"
                )

    def acknowledged(
        self, who: object, epoch: int, offset: int, record: int, queue_offset: int
    ) -> None:
        """A client is told that its record is stored."""
        if self._ackers.setdefault(epoch, who) != who:
            raise Violation(f"two masters: {who} and {self._ackers[epoch]} ack in epoch {epoch}")
        if self.acked.setdefault(offset, record) != record:
            raise Violation(
                f"offset twice: {record} is acked at {offset}, {self.acked[offset]} was before"
            )
        if record % 2 == 0 and self._queue.setdefault(queue_offset, record) != record:
            raise Violation(
                f"queue offset twice: {record} is acked with {queue_offset}, "
                f"{self._queue[queue_offset]} was before"
            )

    def cut(self, who: str, to: int, confirm: int) -> None:
        """A replica loses all from `to` on; it had told its readers of `confirm`."""
        if to < confirm:
            raise Violation(f"cut: {who} is cut to {to}, below its own confirm offset {confirm}")

    def final(self, begin: int, log: Sequence[int], counts: dict[int, int]) -> None:
        """At the end: the log of the one master.

        Args:
            counts: of each record, how many of its queue there are up to it.
        """
        end = begin + len(log)
        for offset, record in self.acked.items():
            if offset >= begin and (offset >= end or log[offset - begin] != record):
                found = log[offset - begin] if offset < end else "nothing"
                raise Violation(f"lost: {record} was acked at {offset}, now {found} is there")
        for offset, record in self.read.items():
            if offset >= begin and (offset >= end or log[offset - begin] != record):
                raise Violation(f"changed: {record} was read at {offset}, and is not there")
        last = counts[log[0]] - (log[0] % 2 == 0) if log else 0
        for record in log:
            last += record % 2 == 0
            if counts[record] != last:
                raise Violation(f"queue: {record} is number {counts[record]}, not {last}")
