"""Books that come from another store: how they are put in the place of a store's own.

The books (topics, groups, offsets ...) are what the ledger says, and the ledger lies in the log. A
replica whose log begins where the master's begins has nothing of what was said before that; so it
is given a copy of the master's files, and goes on from there. The copy is made by
actors/replication/group/state_copy.py; this module puts it into the store of the replica.

    cometmq.books.making/   the copy is written and synced: by whoever has got it
    cometmq.books.new/      the same under another name: it is whole
    ----------------------- from here on no process of a run is at work
    cometmq.books           goes: what is in config/ is not known to be the group's any more
    cometmq.ledger          goes
    config/                 is moved aside: the store has no books
    cometmq.ledger          comes
    config/                 comes, by one rename: the store has all of them
    cometmq.books           comes, and what was moved aside goes

Every step is on the disk before the next is begun. Killed at any line of it, or cut off from power,
a store has no books or all of them; `needs_books` says which: without cometmq.books the copy is
asked for again.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Annotated, Final

import msgspec

from cometmq.protocol.errors import StoreError
from cometmq.protocol.integers import INT64_MAX
from cometmq.shm.os.durable import (
    no_room_is_disk_full,
    put_in_place,
    replace_file,
    sync_folder,
)
from cometmq.shm.os.files import CONFIG_DIR
from cometmq.shm.state.holds import OLD_HOLDS_FILE
from cometmq.shm.state.ledger_mark import LEDGER_FILE

log = logging.getLogger(__name__)

BOOKS_FILE: Final = "cometmq.books"
MAKING_DIR: Final = "cometmq.books.making"
STAGED_DIR: Final = "cometmq.books.new"
ASIDE_DIR: Final = "cometmq.books.old"
FORMAT: Final = 1
_BYTES_MAX: Final = 4096


class LaidBooks(msgspec.Struct, frozen=True):
    """What cometmq.books says: the books in config/ are the group's.

    Args:
        log_begin: physical offset. They know what the ledger says before it, so a log that begins
            there, or before, has the rest.
    """

    log_begin: Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
    format: int = FORMAT


_decode: Final = msgspec.json.Decoder(LaidBooks).decode


def needs_books(store: Path, begin_at: int) -> bool:
    """Whether a log that is to begin there would lack what the ledger said before.

    To be asked of a store whose log is empty, or is to be dropped: one that has a log of its own
    has the books that belong to it, with cometmq.books or without.
    """
    laid = _read(store / BOOKS_FILE)
    return laid is None or laid.log_begin < begin_at


def stage_books(store: Path, files: dict[str, bytes], mark: bytes, log_begin: int) -> None:
    """Put a copy beside the books of a store, durably; `place_books` puts it in their place.

    What was staged before goes. The processes of a run may be at work, no other one stages.

    Args:
        files: the contents of files in config/, checked.
        mark: the content of cometmq.ledger.

    Raises DiskFull, OSError: nothing is staged then.
    """
    making, staged = store / MAKING_DIR, store / STAGED_DIR
    for left in (making, staged):
        _remove(left)
    try:
        with no_room_is_disk_full(making):
            making.mkdir()
            (making / CONFIG_DIR).mkdir()
            for name, content in files.items():
                replace_file(making / CONFIG_DIR / name, content)
            sync_folder(making / CONFIG_DIR)
            replace_file(making / LEDGER_FILE, mark)
            replace_file(making / BOOKS_FILE, msgspec.json.encode(LaidBooks(log_begin)))
            put_in_place(making, staged)
    except BaseException:
        _remove(making)
        raise


def place_books(store: Path, begin_at: int) -> None:
    """Put the staged books in the place of a store's own, durably.

    For a store on which no process is at work, before its log is begun anew: a log that has
    anything in it has its books.

    Args:
        begin_at: physical offset that the log is about to begin at.

    Raises StoreError where none are staged, or they do not know all that was said before
    `begin_at`: then nothing is changed. DiskFull, OSError: then they are needed still.
    """
    staged, config, aside = store / STAGED_DIR, store / CONFIG_DIR, store / ASIDE_DIR
    laid = _read(staged / BOOKS_FILE)
    if laid is None:
        raise StoreError(f"{staged}: no books are there: ask the master for them")
    if laid.log_begin < begin_at:
        raise StoreError(
            f"{staged}: the log is to begin at {begin_at}, and these books go with one that begins "
            f"at {laid.log_begin} or before: ask the master for newer ones"
        )
    for path in (store / BOOKS_FILE, staged / BOOKS_FILE, store / LEDGER_FILE):
        path.unlink(missing_ok=True)
        sync_folder(path.parent)
    _remove(aside)
    if config.is_symlink() or config.exists():
        put_in_place(config, aside)
    (store / OLD_HOLDS_FILE).unlink(missing_ok=True)
    put_in_place(staged / LEDGER_FILE, store / LEDGER_FILE)
    put_in_place(staged / CONFIG_DIR, config)
    replace_file(store / BOOKS_FILE, msgspec.json.encode(laid))
    for left in (staged, aside):
        _remove(left)
    log.info("the master's topics, groups and offsets are laid down in %s", store)


def _read(path: Path) -> LaidBooks | None:
    """None for what is not there, or says nothing: the copy is asked for again."""
    try:
        with path.open("rb") as file:
            found = _decode(file.read(_BYTES_MAX))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.error("%s: %s", path, error)
        return None
    return found if found.format == FORMAT else None


def _remove(path: Path) -> None:
    """A folder with all that is in it, or whatever has its name; no link is followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
