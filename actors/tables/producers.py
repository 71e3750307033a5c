"""Producers with a name: which process has it now. Pure: no I/O, time is handed in.

Who has a name is kept as a deriver without records (derivers.py): its position's epoch is the
producer's, its note the sender's number. So it lies in the log, in its order among the messages.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Final

from cometmq.protocol.commands import OpenProducer, SendMessages
from cometmq.protocol.derived import KNOWN_HEAD_MAX, Known
from cometmq.protocol.errors import ArgumentIllegal, ProducerFenced, ProducerUnknown

PREFIX: Final = "producer:"  # of the deriver's name
EPOCH_MAX: Final = (1 << 62) - 1
# How far above this broker's clock an epoch may be, since another broker may have assigned it by
# its own clock. The next producer that opens the name gets a higher epoch, however often.
AHEAD_MAX_MS: Final = 10 * 365 * 86_400_000
_SENDER: Final = struct.Struct(">q")
KEPT_BYTES: Final = len(PREFIX) + _SENDER.size + KNOWN_HEAD_MAX  # of each, beside its name


def deriver_of(producer_id: str) -> str:
    return PREFIX + producer_id


def note_of(sender: int) -> bytes:
    return _SENDER.pack(sender)


def epoch_for(command: OpenProducer, known: Known | None, now_ms: int) -> int:
    """The epoch in which its sender has the name from now on.

    A new one is the time, so that it is above those that a loss of power may have taken from the
    log; two that were given at one moment, or beside a clock that was set back, follow each other.
    An epoch that the sender states was assigned by a broker, so it cannot be later than the clocks
    of brokers can be. Raises ProducerFenced, ArgumentIllegal.
    """
    if not 0 <= command.epoch <= EPOCH_MAX:
        raise ArgumentIllegal(f"epoch = {command.epoch}: 0 to {EPOCH_MAX}")
    last = 0 if known is None else known.position.epoch
    if command.epoch > max(last, now_ms + AHEAD_MAX_MS):
        raise ArgumentIllegal(
            f"producer {command.producer_id!r:.140}: epoch = {command.epoch}"
            f"{_when(command.epoch)}, at most {now_ms + AHEAD_MAX_MS}: no broker has assigned it; "
            "set the brokers' clocks, or open the producer without an epoch"
        )
    if known is None:
        return command.epoch or max(1, now_ms)
    if known.note == note_of(command.sender):
        return max(last, command.epoch)
    if not command.epoch:
        return max(last + 1, now_ms)
    if command.epoch <= last:
        raise fenced(command.producer_id, command.epoch, last)
    return command.epoch


def is_overdone(known: Known | None, now_ms: int) -> bool:
    """Return whether no broker can have assigned the epoch. An older release let clients claim such
    epochs, above which there may be no other."""
    return known is not None and known.position.epoch > now_ms + 2 * AHEAD_MAX_MS


def check_sender(command: SendMessages, known: Known | None) -> None:
    """Raises ProducerFenced or ProducerUnknown unless the command's sender has its name now."""
    if known is not None and known.note == note_of(command.sender):
        if known.position.epoch == command.epoch:
            return
        last = known.position.epoch
    elif known is not None and command.epoch <= known.position.epoch:
        raise fenced(command.producer_id, command.epoch, known.position.epoch)
    else:
        last = 0 if known is None else known.position.epoch
    raise ProducerUnknown(
        f"producer {command.producer_id!r:.140}: epoch {command.epoch} is not known here, "
        + (f"but epoch {last}" if last else "and no other")
        + ": OpenProducer is wanted first"
    )


def fenced(producer_id: str, epoch: int, last: int) -> ProducerFenced:
    return ProducerFenced(
        f"producer {producer_id!r:.140}: epoch {epoch}{_when(epoch)} is fenced by epoch "
        f"{last}{_when(last)}: a producer that was started later has the same producer_id"
    )


def _when(epoch: int) -> str:
    """When it was opened, for people."""
    try:
        return f" ({datetime.fromtimestamp(epoch // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC)"
    except (ValueError, OverflowError, OSError):
        return ""
