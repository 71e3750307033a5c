"""An epoch of stages on its way into the log, as one derived write or several.

A sink's position is (epoch, ALL) once all of the epoch is there. In between, of an epoch that takes
several writes, it is (epoch, base + messages so far), with the plan in the note.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.writer.derived import DerivedWrites
from cometmq.protocol.commands import Derivation, Position
from cometmq.protocol.derived import Known
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.state.staging import StagedHead

ALL: Final = (1 << 63) - 1  # above the number of any message


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """What is to become of an epoch: decided, and not finished."""

    stages: list[str]
    base: int = 1  # the number of a position where no message of it is written
    # (topic, queue id, messages): what an older release has written, which left no marks.
    there: list[tuple[str, int, int]] = []


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Plan).decode


def read_plan(note: bytes) -> Plan:
    """Raises StoreDamaged."""
    try:
        return _decode(note)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(f"a sink's note of {len(note)} bytes is no plan: {error}") from None


def give_up(derived: DerivedWrites, known: Known) -> None:
    """Nothing is decided any more of the epoch that the sink is in."""
    after = Position(known.position.epoch, known.position.number + 1)
    derived.write(Derivation(known.deriver, known.position, after, b""), (), b"", 0)


class EpochWrites:
    """Gathers the messages of an epoch, and writes them.

    Args:
        deriver: the sink's.
        position: where the sink is; the messages that it has of this epoch are to be passed over.
        write_bytes: of one write, about.
    """

    def __init__(
        self,
        derived: DerivedWrites,
        deriver: str,
        epoch: int,
        plan: Plan,
        position: Position,
        write_bytes: int,
    ) -> None:
        self.stored = 0  # messages
        self._derived = derived
        self._deriver = deriver
        self._epoch = epoch
        self._plan = plan
        self._at = position
        self._records = InnerRecords(size_max=write_bytes)
        self._number = max(plan.base, position.number) if self.is_begun else plan.base
        self._to_skip = self._number - plan.base

    @property
    def is_begun(self) -> bool:
        """Whether the log has anything of it: so it is decided."""
        return self._at >= Position(self._epoch, self._plan.base)

    def skip(self, count: int) -> int:
        """Of the next so many messages, how many are there already."""
        skipped = min(count, self._to_skip)
        self._to_skip -= skipped
        return skipped

    def add(self, head: StagedHead, batch: memoryview) -> None:
        """The next messages; those before them are written when there is no room."""
        at = 0
        while at < len(batch):
            at, _ = self._records.encoder.add_batch(
                self._records.queue(head.topic, head.queue_id),
                batch,
                at,
                sys_flag=head.sys_flag,
                born_timestamp=head.born_timestamp_ms,
                born_host=head.born_host,
            )
            if at < len(batch):
                self._write_some()

    def finish(self) -> None:
        """There are no more: write what is left, and that this was all."""
        self._write(Position(self._epoch, ALL), b"")

    def _write_some(self) -> None:
        if not self.is_begun:
            what = self._derivation(Position(self._epoch, self._plan.base), _encode(self._plan))
            self._derived.write(what, (), b"", 0)
            self._at = what.after
        self._number += self._records.encoder.count
        self._write(Position(self._epoch, self._number), None)

    def _write(self, after: Position, note: bytes | None) -> None:
        command, (payload,) = self._records.take()
        what = self._derivation(after, note)
        places = self._derived.write(what, command.queues, payload, command.count)
        assert places is not None, (self._deriver, what)
        self._at = after
        self.stored += command.count

    def _derivation(self, after: Position, note: bytes | None) -> Derivation:
        return Derivation(self._deriver, self._at, after, note)
