"""Which store a directory is: a random name that it got when a broker first opened it.

Positions that somebody keeps outside, such as a Spark checkpoint, mean nothing in another store.
The supervisor alone writes the file. A store that only RocketMQ had open has none.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.files import sync_folder

IDENTITY_FILE: Final = "cometmq.store"
UNKNOWN: Final = "-"
_BYTES_MAX: Final = 4096


class Identity(msgspec.Struct, frozen=True):
    store_id: str = UNKNOWN
    broker: str = ""  # the name of the broker that opened it last


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


def keep_identity(store: Path, broker: str) -> Identity:
    """What it was, or a new one for a store without; under this broker's name from now on.

    Killed at any line, the file holds what it held before or what it is to hold.
    """
    found = read_identity(store)
    store_id = secrets.token_hex(16) if found.store_id == UNKNOWN else found.store_id
    kept = Identity(store_id, broker)
    if kept != found:
        made = store / f"{IDENTITY_FILE}.new"
        with made.open("wb") as file:
            file.write(msgspec.json.encode(kept))
            file.flush()
            os.fsync(file.fileno())
        made.replace(store / IDENTITY_FILE)
        sync_folder(store)
    return kept
