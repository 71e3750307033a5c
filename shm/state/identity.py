"""Identity of a store: a random name that it got when a broker first opened it.

Positions that are stored outside, such as a Spark checkpoint, are invalid in another store. Only
the supervisor writes the file. A store that only RocketMQ has opened has none.

It also records the state of the file `lock`. If that differs now, another program (RocketMQ) has
opened the store since, and files that describe the last run of CometMQ are out of date.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.os.durable import replace_file
from cometmq.shm.os.locks import lock_state

IDENTITY_FILE: Final = "cometmq.store"
UNKNOWN: Final = "-"
_BYTES_MAX: Final = 65_536  # fits a path of 4,096 bytes, escaped


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    store_id: str = UNKNOWN
    broker: str = ""  # the name of the broker that opened it last
    segment_bytes: int = 0  # of its log, and of its queues; 0: an older broker did not say
    queue_segment_bytes: int = 0
    lock: str = ""  # `lock_state` at that time; empty: an older broker did not write it
    name: str = ""  # of the broker that created the store; "": an older one, which wrote `broker`
    folder: str = ""  # last path of the store; in a copy: path of the original, while that exists

    @property
    def created_as(self) -> str:
        """The name by which clients know the store's broker; "": no CometMQ broker opened it."""
        return self.name or self.broker


def read_identity(store: Path) -> Identity:
    """Raises StoreDamaged."""
    path = store / IDENTITY_FILE
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX)
    except FileNotFoundError:
        return Identity()
    try:
        return msgspec.json.decode(content, type=Identity)
    except msgspec.DecodeError as error:
        raise StoreDamaged(f"{path}: {error}") from None


def keep_identity(
    store: Path, broker: str, segment_bytes: int = 0, queue_segment_bytes: int = 0
) -> Identity:
    """Return the store's identity, or create one. Store in it this broker's name and sizes, and the
    current state of `lock`. The caller holds the store's lock.

    The name of the broker that created the store does not change.

    Raises StoreDamaged, DiskFull, OSError.
    """
    found = read_identity(store)
    store_id = os.urandom(16).hex() if found.store_id == UNKNOWN else found.store_id
    folder = found.folder if original_of(store, found) else _path_of(store)
    kept = Identity(
        store_id, broker, segment_bytes, queue_segment_bytes, lock_state(store),
        found.created_as or broker, folder,
    )  # fmt: skip
    if kept != found:
        replace_file(store / IDENTITY_FILE, msgspec.json.encode(kept))
    return kept


def _path_of(store: Path) -> str:
    """Return the store's real path; empty if it is not UTF-8, which JSON cannot hold."""
    path = str(store.resolve())
    return path if path.isascii() or not any("\ud800" <= each <= "\udfff" for each in path) else ""


def was_opened_by_others(store: Path) -> bool:
    """Return whether another program may have opened the store since a CometMQ broker did.

    Raises StoreDamaged.
    """
    noted = read_identity(store).lock
    return not noted or noted != lock_state(store)


def original_of(store: Path, identity: Identity) -> Path | None:
    """Return the store that this one is a copy of, if that still exists at its path; None: this
    store is not a copy, or was moved or mounted elsewhere."""
    if not identity.folder or identity.store_id == UNKNOWN:
        return None
    original = Path(identity.folder)
    try:
        if original == store.resolve() or original.samefile(store):
            return None
        return original if read_identity(original).store_id == identity.store_id else None
    except (OSError, StoreDamaged):
        return None
