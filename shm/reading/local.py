"""A live broker's store, opened read-only by somebody who is not of its family.

The broker says where the store lies and which file its control file is; a path alone is never
believed. The folder is opened once, and everything else is opened relative to it: whatever is put
at that path later is not met by accident.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NoReturn

from cometmq.protocol.commands import LocalStore
from cometmq.protocol.errors import NotMapped, StoreDamaged, StoreError
from cometmq.shm.live.control import (
    CONTROL_FILE,
    IN_GROUP,
    SLEEPERS_FILE,
    ControlFile,
    Counter,
    open_sleepers,
    run_number,
)
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueTable
from cometmq.shm.reading.mapped_reader import MappedReader
from cometmq.shm.reading.positions import LivePositions


class MappedStore:
    """A live store as this process sees it, with the rights that it has.

    Args:
        found: what the broker says.
        foreign: take a store of another user too. Who owns a file can cut it, and that ends every
            process that has it mapped: by itself nobody takes that risk, root least of all.

    Raises NotMapped.
    """

    def __init__(self, found: LocalStore, *, foreign: bool) -> None:
        try:
            self._folder = os.open(found.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise NotMapped(f"{found.path}: {error}") from None
        try:
            self._open(found, foreign)
        except (OSError, StoreError, ValueError, KeyError) as error:
            os.close(self._folder)
            raise NotMapped(f"{found.path}: {error}") from None
        except BaseException:
            os.close(self._folder)
            raise

    def _open(self, found: LocalStore, foreign: bool) -> None:
        self.control = self._open_control(found, foreign)
        self.nonce = str(self.control.meta["nonce"])
        self.run = run_number(self.nonce)
        root = Path(f"/proc/self/fd/{self._folder}")
        self.control.wake_words = open_sleepers(root / SLEEPERS_FILE)
        self.is_silent = not self.control.wake_words.writable
        self.cover = Counter(found.cover)
        self.table = QueueTable.open(root / QUEUES_FILE, self.control.read(Counter.QUEUES))
        os.listdir(root / "commitlog")  # raises what opening a segment would
        self.reader = MappedReader(
            root,
            found.path,
            segment_bytes=found.segment_bytes,
            queue_segment_bytes=found.queue_segment_bytes,
            positions=LivePositions(self.control, self.table),
        )
        self.reader.read_tail(self.control, self.cover)
        if self.control.meta.get(IN_GROUP):
            self.reader.on_damage = _refuse  # its broker is asked then, and ends of it

    def _check_owner(self, found: LocalStore, owner: int, foreign: bool) -> None:
        if not foreign and owner not in (0, os.geteuid()):
            raise NotMapped(
                f"{found.path} belongs to user {owner}, who could cut what this process has "
                'mapped: only transport="mapped" accepts that'
            )

    def _open_control(self, found: LocalStore, foreign: bool) -> ControlFile:
        self._check_owner(found, os.fstat(self._folder).st_uid, foreign)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(CONTROL_FILE, flags, dir_fd=self._folder)
        try:
            is_there = os.fstat(descriptor)
            wanted = (found.control_device, found.control_inode)
            if not stat.S_ISREG(is_there.st_mode):
                raise NotMapped(f"{found.path}/{CONTROL_FILE} is no plain file")
            if (is_there.st_dev, is_there.st_ino) != wanted:
                raise NotMapped(
                    f"{found.path}/{CONTROL_FILE} is another file than the broker's: "
                    f"{is_there.st_dev}/{is_there.st_ino} here, {wanted[0]}/{wanted[1]} there"
                )
            self._check_owner(found, is_there.st_uid, foreign)
            return ControlFile.open(Path(f"/proc/self/fd/{descriptor}"), writable=False)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.reader.close()
        os.close(self._folder)


def _refuse(text: str) -> NoReturn:
    raise StoreDamaged(text)
