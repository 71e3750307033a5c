"""From where in the ledger a start goes on: `cometmq.ledger`, durable, written by the coordinator.

It names contents of RocketMQ's files in config/ by their digest, and says of each which entries of
the ledger are in it. A content that it does not name was written by somebody else: a RocketMQ that
had the store open, or a person. That one is newer, and nothing older is replayed over it.

Before a file is replaced the mark names its old and its new content, so that it is right before
and after; once it is replaced, the new one alone, and the old one as that of the `.bak`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.ledger import Place
from cometmq.shm.os.durable import replace_file

LEDGER_FILE: Final = "cometmq.ledger"
NO_CONTENT: Final = ""  # the digest of a file that is missing or empty
DIGEST_BYTES: Final = 16
FORMAT: Final = 1


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A content of a file: its digest, the queue offset of the first entry of the ledger that is
    not in it, and the place of the last one that is."""

    digest: str
    position: int
    last: Place


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """One file of config/: the contents that it may have, the newest last, and that of its `.bak`,
    which is used when the file itself is missing or damaged."""

    contents: list[Snapshot] = []
    previous: list[Snapshot] = []


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    format: int = FORMAT
    files: dict[str, Marked] = {}  # by name in config/

    def of(self, name: str, digest: str) -> Snapshot | None:
        """The snapshot that has this digest; None if it is not ours."""
        marked = self.files.get(name, Marked())
        found = [each for each in (*marked.previous, *marked.contents) if each.digest == digest]
        return found[-1] if found else None

    def with_file(self, name: str, marked: Marked) -> Mark:
        return Mark(files={**self.files, name: marked})

    def newest(self) -> Place:
        """The last entry that any snapshot has."""
        return max((each.last for each in self._snapshots()), default=Place())

    def needed_from(self) -> int | None:
        """The first entry that a start may need; None: it needs none."""
        return min((each.position for each in self._snapshots()), default=None)

    def _snapshots(self) -> Iterator[Snapshot]:
        for marked in self.files.values():
            yield from marked.contents


_decode: Final = msgspec.json.Decoder(Mark).decode


def digest_of(content: bytes) -> str:
    """What a mark calls a content."""
    return new_digest(content).hexdigest() if content else NO_CONTENT


def new_digest(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES)


def read_mark(store: Path) -> Mark:
    """Empty, where there is none. Raises StoreDamaged."""
    path = store / LEDGER_FILE
    try:
        mark = _decode(path.read_bytes())
    except FileNotFoundError:
        return Mark()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(
            f"{path}: {error}; remove it, to go on from the files in config/ as they are"
        ) from None
    if mark.format != FORMAT:
        raise StoreDamaged(f"{path}: format {mark.format}, this version knows {FORMAT}")
    return mark


def write_mark(store: Path, mark: Mark) -> None:
    """Durably. Raises OSError, DiskFull."""
    replace_file(store / LEDGER_FILE, mark_text(mark))


def mark_text(mark: Mark) -> bytes:
    """What the file has of it."""
    return msgspec.json.encode(mark) + b"\n"
