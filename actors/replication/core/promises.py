"""What a replica has promised and must know again after any crash. Pure: no I/O.

The *epoch table* says which epoch wrote which part of the log: (epoch, first offset of it). Epochs
are unique, so two logs that have the same epoch with the same start have the same bytes in front of
it, and one is a prefix of the other as far as both have that epoch.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

from cometmq.actors.replication.core.record import Incarnation, StoreUuid, Whole
from cometmq.conf.group import Id
from cometmq.protocol.errors import StoreDamaged

EPOCHS_MAX: Final = 1024  # of a table; older entries are left out
PROMISES_BYTES_MAX: Final = 64 << 10
FORMAT: Final = 1
_CRC_DIGITS: Final = 8


class EpochStart(NamedTuple):
    """An entry of the epoch table."""

    epoch: Whole
    start: Whole  # physical offset


Epochs = Annotated[tuple[EpochStart, ...], msgspec.Meta(max_length=EPOCHS_MAX)]


class Promises(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durable before anything is done that depends on it."""

    format: int = FORMAT
    group: Id
    replica: Id
    store_uuid: StoreUuid
    incarnation: Incarnation = 0
    promised_epoch: Whole = 0  # frames of a smaller one are refused
    epochs: Epochs = ()
    # All that was confirmed and is on this disk, as of some moment: a log that ends before it is
    # damaged.
    confirm_offset: Whole = 0
    # Of the last run that vouches for the log: the kernel's boot id, whether it ended in order, and
    # whether it flushed before it acknowledged.
    boot_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    clean: bool = True
    sync_flush: bool = True


_decode: Final = msgspec.json.Decoder(Promises).decode


def encode_promises(promises: Promises) -> bytes:
    """One line of JSON, one with its CRC."""
    content = msgspec.json.encode(promises)
    return b"%b\n%0*x\n" % (content, _CRC_DIGITS, zlib.crc32(content))


def decode_promises(content: bytes) -> Promises:
    """Raises StoreDamaged: a replica that does not know what it has promised may do nothing."""
    if len(content) > PROMISES_BYTES_MAX:
        raise StoreDamaged(f"the promises have {len(content)} bytes, at most {PROMISES_BYTES_MAX}")
    text, _, crc = content.removesuffix(b"\n").partition(b"\n")
    wanted = b"%0*x" % (_CRC_DIGITS, zlib.crc32(text))
    if crc != wanted:
        raise StoreDamaged(f"the promises have the CRC {crc!r:.24}, their text has {wanted!r}")
    try:
        promises = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(f"the promises cannot be read: {error}") from None
    if promises.format != FORMAT:
        raise StoreDamaged(f"promises of format {promises.format}, this version knows {FORMAT}")
    if not is_table(promises.epochs):
        raise StoreDamaged(f"the epoch table does not go onward: {promises.epochs!r:.200}")
    return promises


# --- the epoch table ------------------------------------------------------------------------------


def is_table(epochs: tuple[EpochStart, ...]) -> bool:
    """Epochs grow, and their starts do not go back."""
    return all(
        one.epoch < other.epoch and one.start <= other.start for one, other in pairwise(epochs)
    )


def is_table_of(epochs: tuple[EpochStart, ...], epoch: int, begin: int, end: int) -> bool:
    """Whether it may be the table of the master of an epoch, whose log has these ends."""
    if not epochs or not is_table(epochs):
        return False
    return epochs[-1].epoch == epoch and epochs[-1].start <= end and begin <= end


def within(epochs: tuple[EpochStart, ...], begin: int, end: int) -> tuple[EpochStart, ...]:
    """The entries that tell of a log from `begin` to `end`.

    One that starts beyond the end tells of bytes that are not there: a master's table is taken
    over before all of its log is here, and an unflushed tail may be gone.
    """
    first = 0
    for index, entry in enumerate(epochs):
        if entry.start <= begin:
            first = index
    return tuple(entry for entry in epochs[first:] if entry.start <= end)[-EPOCHS_MAX:]


def with_epoch(
    epochs: tuple[EpochStart, ...], epoch: int, begin: int, end: int
) -> tuple[EpochStart, ...]:
    """The table of a new master, whose epoch starts at the end of its whole log."""
    return (*within(epochs, begin, end), EpochStart(epoch, end))[-EPOCHS_MAX:]


def common_ends(
    own: tuple[EpochStart, ...], own_end: int, other: tuple[EpochStart, ...], other_end: int
) -> list[int]:
    """Up to where two logs may be the same, by their tables; the furthest first.

    The last epoch that both have from the same start decides; the others are for the case that
    the bytes there differ all the same.
    """
    stops = [*(each.start for each in other[1:]), other_end]
    ends_of_other = dict(zip(other, stops, strict=False))  # none, where there is no entry
    found = []
    end = own_end
    for entry in reversed(own):
        other_stop = ends_of_other.get(entry)
        if other_stop is not None:
            found.append(min(end, other_stop))
        end = min(end, entry.start)
    return found
