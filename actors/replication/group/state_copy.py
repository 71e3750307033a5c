"""A copy of a running master's books, for a replica that begins with an empty store.

Topics, groups and offsets are what the ledger says; the ledger lies in the log, and the master's
log begins later than 0 when old segments were deleted. What was said before is in the snapshots
alone: config/*.json and cometmq.ledger. `pack_books` reads them while the coordinator goes on
writing them, `lay_books` puts them into another store. There the coordinator makes what the ledger
says behind them as the log brings it, as a start of the master would.

In a group everything in a snapshot is confirmed: an entry counts as stored when the group has it,
and a snapshot takes its place when all that may be in it does. So no copy knows what a later master
does not.
"""

from __future__ import annotations

import time
import zlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from cometmq.actors.coordination.files import MemberTable, PopTable
from cometmq.protocol.errors import ServiceNotAvailable, StoreDamaged, StoreError
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import Place
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.os.files import CONFIG_DIR
from cometmq.shm.state.fastjson import FILE_BYTES_MAX, decode
from cometmq.shm.state.holds import HOLDS_FILE, HoldTable, has_old_holds
from cometmq.shm.state.laid_books import place_books, stage_books
from cometmq.shm.state.ledger_mark import (
    Mark,
    Marked,
    Snapshot,
    digest_of,
    mark_text,
    read_mark,
)
from cometmq.shm.state.tables import (
    ConsumerFilterTable,
    ConsumerOffsetTable,
    ConsumerOrderInfoTable,
    SubscriptionGroupTable,
    TopicTable,
)

VERSION: Final = 1
COPY_BYTES_MAX: Final = 256 << 20
CRC_BYTES: Final = 4
TRIES: Final = 40
PAUSE_S: Final = 0.05  # a snapshot takes its place in less, unless the disk hangs


class Fate(StrEnum):
    """What a replica that begins with an empty store does for a file of the master's store."""

    COPIED = "copied"  # by these functions
    LOG = "log"  # it comes with the log, or is made of it
    OWN = "own"  # each machine has its own, or does without


class _File(NamedTuple):
    fate: Fate
    why: str
    kind: type[Any] | None = None  # of the JSON in it


#: Everything that a store may have, and what becomes of it.
STORE_FILES: Final[dict[str, _File]] = {
    "config/topics.json": _File(Fate.COPIED, "a book of the ledger", TopicTable),
    "config/subscriptionGroup.json": _File(
        Fate.COPIED, "a book of the ledger", SubscriptionGroupTable
    ),
    "config/consumerOffset.json": _File(
        Fate.COPIED,
        "a book of the ledger; RocketMQ's progress in half messages and ops as well",
        ConsumerOffsetTable,
    ),
    "config/consumerMembers.json": _File(
        Fate.COPIED,
        "a book of the ledger: without it queues are given away that others still work on",
        MemberTable,
    ),
    "config/consumerFilter.json": _File(Fate.COPIED, "a book of the ledger", ConsumerFilterTable),
    "config/holds.json": _File(
        Fate.COPIED, "a book of the ledger: a hold is of the log, wherever that lies", HoldTable
    ),
    "config/popped.json": _File(
        Fate.COPIED, "a book of the ledger: what is out, and until when", PopTable
    ),
    "config/consumerOrderInfo.json": _File(
        Fate.COPIED, "a book of the ledger: what is out in order", ConsumerOrderInfoTable
    ),
    "cometmq.ledger": _File(Fate.COPIED, "says which entries are in the books"),
    "commitlog": _File(Fate.LOG, "the log itself"),
    "consumequeue": _File(Fate.LOG, "made of the log by the dispatcher"),
    "index": _File(Fate.LOG, "made of the log by the dispatcher"),
    "cometmq.indexed": _File(Fate.LOG, "how far this machine has made its index"),
    "cometmq.rebuild": _File(Fate.LOG, "this machine makes its queues anew"),
    "checkpoint": _File(Fate.OWN, "what this machine has on its disk"),
    "config/delayOffset.json": _File(
        Fate.LOG,
        "for RocketMQ; how far delay levels are delivered is in marks of derived writes. It may be "
        "ahead of what is confirmed, and would let messages go undelivered elsewhere",
    ),
    "config/timercheck": _File(
        Fate.LOG, "for RocketMQ; how far timers are delivered is in a mark. As delayOffset.json"
    ),
    "timerwheel": _File(Fate.LOG, "made anew of the topic of timers"),
    "timerlog": _File(Fate.LOG, "made anew of the topic of timers"),
    "cometmq.holds": _File(
        Fate.OWN, "of before 0.2.0; a running master has holds.json in its place"
    ),
    "cometmq.stages": _File(
        Fate.OWN, "what was staged and not committed stays where it was staged, and is sent again"
    ),
    "cometmq.store": _File(Fate.OWN, "who the store is; positions outside name it"),
    "cometmq.slave": _File(Fate.OWN, "what the last run on it was"),
    "cometmq.books": _File(Fate.OWN, "that books were laid down here"),
    "cometmq.books.making": _File(Fate.OWN, "books on their way to this store"),
    "cometmq.books.new": _File(Fate.OWN, "books on their way to this store"),
    "cometmq.books.old": _File(Fate.OWN, "books on their way out of this store"),
    "cometmq.cut": _File(Fate.OWN, "where the log of this machine is being cut"),
    "cometmq.promises": _File(Fate.OWN, "what this replica has promised, and who it is"),
    "cometmq.control": _File(Fate.OWN, "counters of one run"),
    "cometmq.queues": _File(Fate.OWN, "the queue table of one run"),
    "cometmq.queues.before": _File(Fate.OWN, "the queue table of the run before"),
    "cometmq.sleepers": _File(Fate.OWN, "who sleeps in one run"),
    "cometmq.filters": _File(Fate.OWN, "from releases that stored filter bitmaps"),
    "cometmq.filtermaps": _File(Fate.OWN, "from releases that stored filter bitmaps"),
    "cometmq.damaged": _File(Fate.OWN, "damage that was found on this machine's disk"),
    "cometmq.references": _File(Fate.OWN, "who maps segments on this machine"),
    "cometmq.ballast": _File(Fate.OWN, "room on this disk"),
    "cometmq.tmp": _File(Fate.OWN, "segments that are being made"),
    "cometmq.retired": _File(Fate.OWN, "segments that have left the log"),
    "lock": _File(Fate.OWN, "who is at work on this machine"),
    "abort": _File(Fate.OWN, "how the last run ended on this machine"),
}

_KINDS: Final[dict[str, type[Any]]] = {
    path.removeprefix(f"{CONFIG_DIR}/"): file.kind
    for path, file in STORE_FILES.items()
    if file.kind is not None
}


class CopyDamaged(StoreDamaged):
    """Bytes that are no copy of books."""


_Number = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


class _Named(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file of config/: its content (empty: there is none), and what the mark says of that."""

    name: str
    content: bytes
    position: _Number
    epoch: _Number
    number: _Number


class _Copy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is sent, before its CRC."""

    version: int
    log_begin: _Number
    files: list[_Named]


_encoder: Final = msgspec.msgpack.Encoder()
_decode: Final = msgspec.msgpack.Decoder(_Copy).decode


# --- of a running master ---


def pack_books(store: Path) -> bytes:
    """A copy of the books of a store whose broker is running; what `lay_books` takes.

    Reads alone, and asks nobody: for a thread of any process. Each file is read, and then the mark.
    The coordinator has the mark name a content before it puts that in place, and name it as the
    one before when it puts in the next. So the mark says which entries are in what was read, unless
    two others have come meanwhile: then it is read again. The files need not be of one moment: for
    each the ledger is made again from its own place on.

    Raises ServiceNotAvailable where that does not end, or there are no snapshots yet; StoreDamaged;
    StoreError for more than COPY_BYTES_MAX; OSError.
    """
    # Before the mark: what that needs of the ledger was not deleted at this moment.
    control = ControlFile.open(store / CONTROL_FILE, writable=False)
    log_begin = control.read(Counter.MIN_OFFSET).value
    files, total = [], 0
    for name in _KINDS:
        content, found = _stable(store, name)
        if found is None:
            continue
        total += len(content)
        _check_size(total, store)
        files.append(_Named(name, content, found.position, found.last.epoch, found.last.number))
    packed = bytearray()
    _encoder.encode_into(_Copy(VERSION, log_begin, files), packed)
    packed += zlib.crc32(packed).to_bytes(CRC_BYTES, "big")
    _check_size(len(packed), store)
    return bytes(packed)


def _stable(store: Path, name: str) -> tuple[bytes, Snapshot | None]:
    """A content of a file, and which entries of the ledger are in it; None where the coordinator
    has never had anything of that file."""
    path = store / CONFIG_DIR / name
    previous = path.with_name(f"{name}.bak")
    for tried in range(TRIES):
        if tried:
            time.sleep(PAUSE_S)  # a file tells nobody that it is replaced; in a thread of its own
        content = _read(path)
        mark = read_mark(store)
        if name == HOLDS_FILE and not content and has_old_holds(store):
            continue  # the first snapshot takes them over
        found = mark.of(name, digest_of(content))
        if found is not None or (not content and name not in mark.files):
            return content, found
        # A start goes on from the .bak of a file that is damaged.
        content = _read(previous)
        for each in mark.files.get(name, Marked()).contents:
            if content and each.digest == digest_of(content):
                return content, each
    raise ServiceNotAvailable(
        f"{path}: what is in it is not what cometmq.ledger says, {TRIES} times: the broker has "
        "just begun, cannot write its files, or somebody else has written this one"
    )


def _read(path: Path) -> bytes:
    """Empty, where there is none. Raises StoreError for what is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return b""
    if len(content) > FILE_BYTES_MAX:
        raise StoreError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    return content


def _check_size(size: int, store: Path) -> None:
    if size > COPY_BYTES_MAX:
        raise StoreError(
            f"{store}: the books have {size} bytes or more, at most {COPY_BYTES_MAX} are copied"
        )


# --- of who begins ---


def lay_books(store: Path, content: bytes | memoryview, begin_at: int) -> None:
    """Check a copy, and put it in the place of a store's own books, durably.

    Where that is done by two processes: `stage_copy` by whoever has got it, `place_books` once no
    process of a run is at work. What happens to the store, and what is there after a kill, is told
    in shm/state/laid_books.py.

    Args:
        begin_at: physical offset that the log of this store is about to begin at.

    Raises CopyDamaged, and StoreError where the copy does not know all that was said before
    `begin_at`: then nothing is changed. DiskFull, OSError.
    """
    stage_copy(store, content)
    place_books(store, begin_at)


def stage_copy(store: Path, content: bytes | memoryview) -> None:
    """Check a copy, and put it beside the books of a store, where `place_books` finds it.

    Raises CopyDamaged, before anything is written; DiskFull, OSError.
    """
    copy = _checked(content)
    marks = {each.name: Marked(contents=[_snapshot_of(each)], previous=[]) for each in copy.files}
    files = {each.name: each.content for each in copy.files if each.content}
    stage_books(store, files, mark_text(Mark(files=marks)), copy.log_begin)


def _snapshot_of(named: _Named) -> Snapshot:
    return Snapshot(digest_of(named.content), named.position, Place(named.epoch, named.number))


def _checked(content: bytes | memoryview) -> _Copy:
    """Raises CopyDamaged for what no `pack_books` has made."""
    size = len(content)
    if not CRC_BYTES < size <= COPY_BYTES_MAX:
        raise CopyDamaged(f"a copy of books has {size} bytes, at most {COPY_BYTES_MAX}")
    body = memoryview(content)[:-CRC_BYTES]
    said, found = int.from_bytes(content[-CRC_BYTES:], "big"), zlib.crc32(body)
    if said != found:
        raise CopyDamaged(f"a copy of books has CRC {found:08x}, and says {said:08x}")
    try:
        copy = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CopyDamaged(f"what came is no copy of books: {error}") from None
    if copy.version != VERSION:
        raise CopyDamaged(f"a copy of books of version {copy.version}, this one knows {VERSION}")
    names = [each.name for each in copy.files]
    if len(set(names)) < len(names) or not _KINDS.keys() >= set(names):
        raise CopyDamaged(f"a copy of books has the files {', '.join(names)!r:.500}")
    for each in copy.files:
        _check_file(each)
    return copy


def _check_file(named: _Named) -> None:
    if not named.content:
        return
    try:
        decode(named.content, _KINDS[named.name], name=named.name)
    except StoreDamaged as error:
        raise CopyDamaged(f"in a copy of books: {error}") from None
