"""Where the small state goes on: a snapshot, and what the ledger has changed since."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cometmq.protocol.ledger import Change, Fold, LedgerDamaged, Place, decode_entry
from cometmq.protocol.offsets import OffsetTable, change_offsets
from cometmq.shm.os.files import CONFIG_DIR
from cometmq.shm.reading.ledger_log import LedgerLog
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.ledger_mark import (
    NO_CONTENT,
    Mark,
    Marked,
    Snapshot,
    digest_of,
    read_mark,
    write_mark,
)
from cometmq.shm.state.tables import ConsumerOffsetTable

log = logging.getLogger(__name__)

Apply = Callable[[Change], object]


class Resumed(NamedTuple):
    mark: Mark
    last: Place  # no later entry counts already
    common: Place  # up to there every book has all
    changes: int  # that were replayed


class _Part:
    """One file, and the book that goes on from it."""

    def __init__(self, file: ConfigFile[Any], apply: Apply, digest: str, found: Snapshot) -> None:
        self.name = file.path.name
        self.digest = digest
        self.found = found
        self.fold = Fold(found.last)
        self.changes = 0
        self._apply = apply

    def take(self, queue_offset: int, place: Place, changes: list[Change]) -> bool:
        """Whether the entry counts for it."""
        if queue_offset < self.found.position or not self.fold.admit(place):
            return False
        self.changes += sum(bool(self._apply(change)) for change in changes)
        return True

    def snapshot(self, end: int) -> Snapshot:
        """What its content has: where nothing was changed, nothing behind it is needed."""
        return self.found if self.changes else Snapshot(self.digest, end, self.fold.last)


def resume(
    store: Path, books: Sequence[tuple[ConfigFile[Any], Apply]], ledger: LedgerLog
) -> Resumed:
    """Apply to each book what the ledger has changed since its file was written, and leave a mark
    that is right for these contents.

    Before anything is changed by this run, that mark is on the disk: an entry that a client was
    told of is never taken for older than a file.

    Args:
        books: each with the file that it was loaded from; false is what did not change it.

    Raises StoreDamaged for a mark that cannot be read; OSError.
    """
    began = time.monotonic()
    mark = read_mark(store)
    parts = _replayed(mark, books, ledger)
    for part in parts:
        if part.changes:
            log.info("%d changes of the ledger are made again, on top of %s, in %.2f s",
                     part.changes, part.name, time.monotonic() - began)  # fmt: skip
        snapshot = part.snapshot(ledger.end)
        if mark.files.get(part.name, Marked()).contents != [snapshot]:
            mark = mark.with_file(part.name, Marked(contents=[snapshot]))
    if mark != read_mark(store):
        write_mark(store, mark)
    lasts = [part.fold.last for part in parts] or [Place()]
    changes = sum(part.changes for part in parts)
    return Resumed(mark, max(*lasts, mark.newest()), min(lasts), changes)


def committed_offsets(store: Path) -> OffsetTable:
    """How far each group has come in a store that nobody serves: the file, and what the ledger has
    beyond it. Changes nothing. Raises StoreDamaged, OSError."""
    file = ConfigFile(store / CONFIG_DIR / "consumerOffset.json", ConsumerOffsetTable)
    table = (file.load() or ConsumerOffsetTable()).offset_table
    with closing(LedgerLog(StoreReader.open_closed(store))) as ledger:
        _replayed(read_mark(store), [(file, partial(change_offsets, table))], ledger)
    return table


def _replayed(
    mark: Mark, books: Sequence[tuple[ConfigFile[Any], Apply]], ledger: LedgerLog
) -> list[_Part]:
    loaded = [file.loaded_from for file, _ in books]
    digests = [NO_CONTENT if path is None else digest_of(path.read_bytes()) for path in loaded]
    # No file, and no mark: whoever was to follow the ledger in this copy of a log has not come to.
    has_none = not mark.files and not any(digests)
    parts = []
    for (file, apply), digest in zip(books, digests, strict=True):
        found = (
            Snapshot(digest, 0, Place())
            if has_none
            else _snapshot(mark, file.path.name, digest, ledger)
        )
        parts.append(_Part(file, apply, digest, found))
    _replay(parts, ledger)
    return parts


def _replay(parts: Sequence[_Part], ledger: LedgerLog) -> None:
    unknown = 0
    position = min((part.found.position for part in parts), default=ledger.end)
    begin = max(position, ledger.begin)
    known = min((part.found.last for part in parts), default=Place())
    is_missing = begin > position
    for queue_offset, body in ledger.entries(begin):
        try:
            place, changes, more = decode_entry(body)
        except LedgerDamaged as error:
            log.error("%s; what it changed is not known", error)
            continue
        # Places grow: where this one counts already, or is the next one, no other was before it.
        if is_missing and place > Place(known.epoch, known.number + 1):
            _say_what_is_missing(position, begin)
        is_missing = False
        taken = [part.take(queue_offset, place, changes) for part in parts]
        unknown += more if any(taken) else 0
    if is_missing:
        _say_what_is_missing(position, begin)
    if unknown:
        log.error("%d changes of the ledger are of a kind that this version does not know", unknown)


def _say_what_is_missing(position: int, begin: int) -> None:
    log.error(
        "the ledger begins at record %d: what records %d to %d changed is not known any more",
        begin, position, begin - 1,
    )  # fmt: skip


def replace_content(store: Path, resumed: Resumed, file: ConfigFile[Any], value: Any) -> None:
    """Write the file of a store that nobody serves anew, so that it holds all of the ledger.

    Raises OSError.
    """
    name, text = file.path.name, dumps(value)
    old = resumed.mark.files[name].contents
    new = Snapshot(digest_of(text.encode()), old[-1].position, resumed.last)
    write_mark(store, resumed.mark.with_file(name, Marked(contents=[*old, new])))
    file.store_text(text, durable=True)
    write_mark(store, resumed.mark.with_file(name, Marked(contents=[new])))


def _snapshot(mark: Mark, name: str, digest: str, ledger: LedgerLog) -> Snapshot:
    """What the ledger has beyond this content."""
    found = mark.of(name, digest)
    if found is None:
        if ledger.end and (digest != NO_CONTENT or name in mark.files):  # else: never heard of
            log.warning(
                "%s was written by somebody else, and counts as it is: nothing of the ledger's %d "
                "records is made again", name, ledger.end,
            )  # fmt: skip
        return Snapshot(digest, ledger.end, mark.newest())
    if found.position > ledger.end:
        # A power cut has taken the end of the log. Which entries count is told by their places.
        return Snapshot(digest, ledger.begin, found.last)
    return found
