"""The rig itself: what a cut keeps and what it takes."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
from fault.disk import FILE_SYSTEMS, Disk, need

from cometmq.shm.os.durable import sync_folder

WORDS = 4096
PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_what_a_power_cut_takes(kind: str, tmp_path: Path) -> None:
    """Of two halves of a shared mapping the synced one stays; what was never synced is gone."""
    need(kind, "power cuts")
    with Disk(tmp_path, kind) as disk:
        synced, unsynced = disk.folder / "synced", disk.folder / "unsynced"
        with synced.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * WORDS * 8)
            os.fsync(file.fileno())
            memory = mmap.mmap(file.fileno(), 2 * WORDS * 8)
        sync_folder(disk.folder)
        half = WORDS * 8
        memory[:half] = b"survives" * WORDS
        memory.flush(0, half)
        memory[half:] = b"perishes" * WORDS
        unsynced.write_bytes(b"never synced")
        os.rename(unsynced, disk.folder / "renamed")

        disk.cut()

        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            memory.flush()
        memory.close()
        disk.power_on()
        assert [path.name for path in disk.folder.iterdir() if path.is_file()] == ["synced"]
        content = synced.read_bytes()
        assert content[:half] == b"survives" * WORDS
        assert content[half:] == bytes(half)
        disk.check()


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_the_same_disk_is_cut_again_and_again(kind: str, tmp_path: Path) -> None:
    need(kind, "power cuts")
    with Disk(tmp_path, kind) as disk:
        for number in range(5):
            with (disk.folder / f"{number}").open("wb") as file:
                file.write(b"synced")
                file.flush()
                os.fsync(file.fileno())
                file.write(b" and more")
            disk.cut()
            disk.power_on()
        for number in range(5):
            assert (disk.folder / f"{number}").read_bytes() == b"synced"
