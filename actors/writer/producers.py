"""Producers with a name, at the desk: a newer process of a name fences the one before it."""

from __future__ import annotations

import logging
import time
from typing import Final

from cometmq.actors.tables.producers import (
    KEPT_BYTES,
    PREFIX,
    check_sender,
    deriver_of,
    epoch_for,
    is_overdone,
    note_of,
)
from cometmq.actors.writer.derived import DerivedWrites
from cometmq.protocol.commands import Derivation, OpenProducer, Position, SendMessages
from cometmq.protocol.names import check_producer_id

log = logging.getLogger(__name__)

PRODUCERS_MAX: Final = 16_384  # names that are remembered; then that which was opened first goes


class Producers:
    """Who has which name. Whatever is laid down here is published by the caller.

    A name that is forgotten is no harm to its producer, which opens it again (ProducerUnknown); an
    older one that still lives could come back first, until then.

    Args:
        bytes_max: of a snapshot of all derivers; names of producers take half of it at most.
    """

    def __init__(self, derived: DerivedWrites, bytes_max: int) -> None:
        self._derived = derived
        self._bytes_max = bytes_max // 2
        self._sizes: dict[str, int] = {}  # by name, in the order in which they were opened
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def load(self) -> None:
        """Once the derivers are."""
        for known in self._derived.book:
            if known.deriver.startswith(PREFIX):
                self._note(known.deriver.removeprefix(PREFIX))

    def open(self, command: OpenProducer) -> int:
        """The sender's epoch. Raises ProducerFenced, NameIllegal, and what appending raises."""
        name = command.producer_id
        check_producer_id(name)
        deriver = deriver_of(name)
        known = self._derived.find(deriver)
        now_ms = int(time.time() * 1000)
        if is_overdone(known, now_ms):
            log.warning("producer %s: epoch %d is dropped, as no broker assigned it", name,
                        0 if known is None else known.position.epoch)  # fmt: skip
            self._forget(name)
            known = None
        epoch = epoch_for(command, known, now_ms)
        before = Position() if known is None else known.position
        if epoch > before.epoch:
            if known is None:
                self._make_room(name)
            note = note_of(command.sender)
            self._derived.write(Derivation(deriver, before, Position(epoch), note), (), b"", 0)
            self._note(name)
            log.info("producer %s is in epoch %d; before: %d", name, epoch, before.epoch)
        return epoch

    def check(self, command: SendMessages) -> None:
        """Raises ProducerFenced or ProducerUnknown unless its sender has its name now."""
        check_sender(command, self._derived.find(deriver_of(command.producer_id)))

    def _make_room(self, name: str) -> None:
        wanted = len(name) + KEPT_BYTES
        while self._sizes and (
            len(self._sizes) >= PRODUCERS_MAX or self._bytes + wanted > self._bytes_max
        ):
            self._forget(next(iter(self._sizes)))

    def _forget(self, name: str) -> None:
        self._derived.forget(deriver_of(name))
        self._bytes -= self._sizes.pop(name)

    def _note(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)
        self._sizes[name] = len(name) + KEPT_BYTES
        self._bytes += self._sizes[name]
