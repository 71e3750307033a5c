"""What a replica has promised, in a file of its store: replaced whole, durably."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

from cometmq.actors.replication.core.promises import (
    PROMISES_BYTES_MAX,
    Promises,
    decode_promises,
    encode_promises,
)
from cometmq.protocol.errors import StoreDamaged, StoreError
from cometmq.shm.os.durable import PRIVATE, replace_file

PROMISES_FILE: Final = "cometmq.promises"


class PromisesFile:
    """The `ha` process alone reads and writes it."""

    def __init__(self, store: Path) -> None:
        self._path = store / PROMISES_FILE

    def load(self, group: str, replica: str) -> Promises:
        """What was kept last; of a store that was in no group before, nothing but a new name.

        Raises StoreDamaged, and StoreError where the store is another replica's.
        """
        try:
            with self._path.open("rb") as file:
                content = file.read(PROMISES_BYTES_MAX + 1)
        except FileNotFoundError:
            return Promises(group=group, replica=replica, store_uuid=str(uuid.uuid4()))
        try:
            promises = decode_promises(content)
        except StoreDamaged as error:
            raise StoreDamaged(
                f"{self._path}: {error}. Replace this store by an empty one; the group has what "
                "is missing"
            ) from None
        if (promises.group, promises.replica) != (group, replica):
            raise StoreError(
                f"{self._path}: the store is that of replica {promises.replica} of group "
                f"{promises.group}, this broker is {replica} of {group}"
            )
        return promises

    def keep(self, promises: Promises) -> None:
        """Raises DiskFull, OSError."""
        replace_file(self._path, encode_promises(promises), mode=PRIVATE)
