"""The last run: facts about its store that the counters of a killed broker still prove.

kill -9 ends processes, but does not drop the page cache: while the machine stays up and the store
stays mounted, all written data is there, and the remaining control file has its extent. If the boot
or the mount has changed, another program has opened the store since, or the log contradicts the
counters, the counters are ignored, and recovery begins at the checkpoint.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreError
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase
from cometmq.shm.os.libc import mount_id
from cometmq.shm.os.processes import boot_id
from cometmq.shm.state.identity import was_opened_by_others

log = logging.getLogger(__name__)


class LastRun(msgspec.Struct, frozen=True):
    """The counters of the run before, from a control file that this machine has kept alive.

    Physical offsets, each the first byte that is not covered; see Counter.
    """

    wrote: int
    wrote_timestamp: int  # ms
    flushed: int
    dispatched: int
    indexed: int
    max_message_bytes: int

    @property
    def redo_from(self) -> int:
        """Everything below is in its queue, and log and queues have once been flushed."""
        return min(self.flushed, self.dispatched)

    def going_on_from(self, before: LastRun) -> LastRun:
        """Of a run that itself went on from such counters, and may have ended before it had told
        how far everything is: what was flushed and dispatched before, is."""
        wrote = self.wrote
        return msgspec.structs.replace(
            self,
            flushed=min(wrote, max(self.flushed, before.redo_from)),
            dispatched=min(wrote, max(self.dispatched, before.redo_from)),
        )

    @classmethod
    def read(cls, store: Path, segment_bytes: int) -> LastRun | None:
        """None where nothing is left, or where what is left is of another life or another shape."""
        try:
            control = ControlFile.open(store / CONTROL_FILE, writable=False)
            meta = control.meta
            if was_opened_by_others(store):
                return None
        except (StoreError, OSError):
            return None
        values = control.values()
        life = life_of(store)
        if life is None or meta.get("life") != life or meta.get("segment_bytes") != segment_bytes:
            return None
        try:
            found = cls(
                **{name: values[name] for name in _COUNTERS},
                max_message_bytes=int(meta["max_message_bytes"]),
            )
        except (KeyError, TypeError, ValueError):
            return None
        began = values[Counter.PHASE.name.lower()] >= Phase.RECOVERED
        # Where the disk failed nobody knows what the system has dropped.
        failed = (
            values[Counter.FLUSH_ERRNO.name.lower()]
            or values[Counter.ALLOCATE_ERRNO.name.lower()] == errno.EIO
        )
        if not began or failed or max(found.flushed, found.dispatched) > found.wrote:
            return None
        return found

    def as_message(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, int] | None) -> LastRun | None:
        return None if message is None else cls(**message)


_COUNTERS: Final = ("wrote", "wrote_timestamp", "flushed", "dispatched", "indexed")


def life_of(store: Path) -> str | None:
    """Names this boot, this mount and this folder. None where the kernel cannot tell mounts apart.

    While it is the same, nothing that was stored through a mapping can have been lost. A store that
    was copied, or a file system that was mounted anew, has another one.
    """
    mount = mount_id(store)
    if mount is None:
        return None
    boot = boot_id()
    if not boot:
        return None
    folder = store.stat()
    return f"{boot}/{mount}/{folder.st_dev}/{folder.st_ino}"
