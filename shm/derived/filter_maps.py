"""Filter maps: which messages an SQL92 expression surely does not want, a bit for each.

What a tag filter has in the ConsumeQueue an SQL92 filter has here: whoever reads a queue passes
over a message whose bit is 0, and looks at the records of the others, as it would without a map
(RocketMQ: the bit map of ConsumeQueueExt). So only a wrong 0 could do harm:

- A bit is 1 until the record of that queue offset was found whole, at its place, and the expression
  was not TRUE of it.
- A block of bits is believed by who reads it if its CRC holds, and if it names this run, these maps
  of it, the topic, the queue and the expression.
- The maps are one run's. They are of what is dispatched, which no run takes back: neither a power
  cut nor the group, whose cuts are made between two runs. Where the dispatcher builds its queues
  anew, which no queue offset should show, it begins other maps.

The dispatcher process writes them (actors/keepers/filtering.py), for the expressions that the
coordinator has registered, in blocks of 4 KiB:

    cometmq.filters                              topic -> expressions
    cometmq.filtermaps/DIGEST/QUEUE.NUMBER       64 blocks of a queue, beginning with block NUMBER
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import DiskFull
from cometmq.shm.kernel._kernel import FilterBlock
from cometmq.shm.kernel.layout import FILTER_BLOCK_ENTRIES, FILTER_BLOCK_SIZE
from cometmq.shm.os.durable import no_room_is_disk_full, put_in_place, write_beside
from cometmq.shm.os.files import FILTER_MAPS_DIR, FILTERS_FILE

log = logging.getLogger(__name__)

BLOCKS_A_FILE: Final = 64
ROOM_BYTES: Final = 64 * 1_048_576  # of the disk are left to others


# --- what is wanted ---

_decode_filters: Final = msgspec.json.Decoder(dict[str, list[str]]).decode


def write_filters(store: Path, filters: Mapping[str, list[str]]) -> None:
    """Topic -> expressions, for the dispatcher. Raises OSError."""
    path = store / FILTERS_FILE
    made = write_beside(path, msgspec.json.encode(filters), durable=False)
    put_in_place(made, path, durable=False)


def read_filters(store: Path) -> dict[str, list[str]]:
    """Nothing where they cannot be read: then there are no maps."""
    try:
        return _decode_filters((store / FILTERS_FILE).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("%s: %s: no maps of filters are made", store / FILTERS_FILE, error)
        return {}


# --- names ---


def map_folder(store: Path, topic: str, expression: str) -> Path:
    name = "\0".join((topic, expression))
    return store / FILTER_MAPS_DIR / blake2b(_utf8(name), digest_size=16).hexdigest()


def identity_of(run: str, maps: int, topic: str, queue_id: int, expression: str) -> bytes:
    """What each block of a map names.

    Args:
        run: the nonce of its control file.
        maps: the counter FILTER_MAPS.
    """
    name = "\0".join((run, str(maps), topic, str(queue_id), expression))
    return blake2b(_utf8(name), digest_size=16).digest()


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def block_place(folder: Path, queue_id: int, number: int) -> tuple[Path, int]:
    """The file of a block, and where it begins in it."""
    first = number // BLOCKS_A_FILE * BLOCKS_A_FILE
    return folder / f"{queue_id}.{first}", (number - first) * FILTER_BLOCK_SIZE


def read_block(folder: Path, queue_id: int, number: int) -> bytes:
    """As it stands there, whole or not; nothing where there is none."""
    path, at = block_place(folder, queue_id, number)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, FILTER_BLOCK_SIZE, at)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def remove_maps(store: Path) -> None:
    """All of them. Raises OSError."""
    if (store / FILTER_MAPS_DIR).is_dir():
        shutil.rmtree(store / FILTER_MAPS_DIR)


class QueueMap:
    """The map of one queue and expression, in the hands of who makes it.

    Args:
        begin: the first queue offset that may be read.
    """

    def __init__(self, folder: Path, queue_id: int, identity: bytes, begin: int) -> None:
        self.queue_id = queue_id
        self._folder = folder
        self._identity = identity
        self._first = begin // FILTER_BLOCK_ENTRIES  # the first block that there may be a file of
        self._kept = begin  # up to there the file tells
        self.block = FilterBlock(identity, self._first)
        self.block.pass_over(begin)

    @property
    def next_offset(self) -> int:
        """The queue offset that comes next."""
        return self.block.next_offset

    @property
    def is_kept(self) -> bool:
        """Whether its file tells all that was calculated."""
        return self.block.next_offset == self._kept

    @property
    def blocks(self) -> int:
        """So many its files may have."""
        return self.block.number + 1 - self._first

    def keep(self) -> None:
        """Write what was calculated; where that fills a block, go on with the next one.

        Raises DiskFull, OSError.
        """
        path, at = block_place(self._folder, self.queue_id, self.block.number)
        with no_room_is_disk_full(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(path, at)
        self._kept = self.block.next_offset
        if self._kept == self.block.end:
            self.block = FilterBlock(self._identity, self.block.number + 1)

    def _write(self, path: Path, at: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            disk = os.fstatvfs(descriptor)
            if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
                raise DiskFull(f"{path}: the disk has less than {ROOM_BYTES >> 20} MiB left")
            if os.pwrite(descriptor, self.block.sealed(), at) < FILTER_BLOCK_SIZE:
                raise DiskFull(f"{path}: no room for a block")
        finally:
            os.close(descriptor)

    def follow_queue(self, begin: int) -> None:
        """The queue begins there now: remove what is below. Raises OSError."""
        wanted = begin // FILTER_BLOCK_ENTRIES
        there = self._first // BLOCKS_A_FILE, self.block.number // BLOCKS_A_FILE
        for number in range(there[0], min(wanted // BLOCKS_A_FILE, there[1] + 1)):
            path, _ = block_place(self._folder, self.queue_id, number * BLOCKS_A_FILE)
            path.unlink(missing_ok=True)
            self._first = (number + 1) * BLOCKS_A_FILE
        if wanted > self.block.number:
            self.block = FilterBlock(self._identity, wanted)
            self._first = max(self._first, wanted // BLOCKS_A_FILE * BLOCKS_A_FILE)
        if begin > self.block.next_offset:
            self.block.pass_over(begin)
            self._kept = begin
