"""A disk whose power can be cut: a file system of its own, in a file, behind a loop device.

    with Disk(tmp_path, "ext4") as disk:
        broker = RunningBroker(disk.folder / "store", log_path=tmp_path / "broker.log")
        ...
        disk.cut()             # from here on nothing reaches the disk any more
        broker.kill_all()
        disk.power_on()        # what was synced is there, and perhaps some of the rest

The cut is the ioctl FS_IOC_SHUTDOWN without a flush of the journal: dirty pages, also those of
shared mappings, stay in memory and are thrown away by the unmount, as they are by a real loss of
power. What it does not do is tear a sector or reorder what the device itself holds back.

Needs root, a loop device and mkfs; `trouble` says in words what is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
from patience import patient

FS_IOC_SHUTDOWN: Final = 0x8004587D  # _IOR('X', 125, __u32)
NO_LOG_FLUSH: Final = struct.pack("I", 2)
FILE_SYSTEMS: Final = ("ext4", "xfs")
MIN_BYTES: Final = {"ext4": 8 << 20, "xfs": 300 << 20}  # mkfs.xfs refuses less
_MKFS: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,nodiscard"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
}
_ENDING: Final = (psutil.STATUS_ZOMBIE, psutil.STATUS_DISK_SLEEP, psutil.STATUS_DEAD)
UNMOUNT_TIMEOUT_S: Final = patient(
    60
)  # a slow process may still hold descriptors that a killed one sent


class DiskTrouble(Exception):
    """The rig itself does not work."""


class Disk:
    """A mounted file system in the file `<name>.image` below `place`.

    Args:
        space_bytes: the size of the whole file system; the image is sparse.
    """

    def __init__(
        self, place: Path, kind: str = "ext4", *, space_bytes: int = 512 << 20, name: str = "disk"
    ) -> None:
        self.kind = kind
        self.image = place / f"{name}.image"
        self.folder = place / name
        self.cuts = 0
        self.folder.mkdir(parents=True)
        with self.image.open("wb") as image:
            image.truncate(max(space_bytes, MIN_BYTES[kind]))
        _run(*_MKFS[kind], str(self.image))
        self._device = _run("losetup", "--find", "--show", str(self.image)).strip()
        self._mounted = False
        try:
            self._mount()
        except BaseException:
            self.close()
            raise

    def _mount(self) -> None:
        _run("mount", "-t", self.kind, self._device, str(self.folder))
        self._mounted = True

    def _unmount(self) -> None:
        """Who was killed may take a moment to let go of its files."""
        deadline = time.monotonic() + UNMOUNT_TIMEOUT_S
        while True:
            try:
                _run("umount", str(self.folder))
                break
            except DiskTrouble as error:
                if "busy" not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise DiskTrouble(
                        f"{error} Held by: {', '.join(holders(self.folder))}"
                    ) from error
                time.sleep(0.01)  # nothing tells when the mount is let go of
        self._mounted = False

    def cut(self) -> None:
        """The power goes: no write, no fsync and no allocation succeeds until `power_on`."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, NO_LOG_FLUSH)
        finally:
            os.close(descriptor)
        self.cuts += 1

    def power_on(self) -> None:
        """Mount again, as after a boot. All who used the disk must be gone."""
        self._unmount()
        self._mount()

    def check(self) -> None:
        """Have the file system's own checker look at it; it has to be whole after any cut."""
        self._unmount()
        command = ("e2fsck", "-fn") if self.kind == "ext4" else ("xfs_repair", "-n")
        _run(*command, self._device)
        self._mount()

    def close(self, *, lazily: bool = False) -> None:
        """`lazily`: whoever still holds a file keeps it until it lets go."""
        if self._mounted and lazily:
            _run("umount", "--lazy", str(self.folder))
        elif self._mounted:
            self._unmount()
        _run("losetup", "--detach", self._device)
        self.image.unlink()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(lazily=kind is not None)


def holders(folder: Path) -> list[str]:
    """The threads that have a file below `folder` open or mapped, or work there; with what. Each
    is looked at: a process that was killed has threads that end later than its first one."""
    found = []
    for of in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or closed a file
            maps = of.parents[1] / "map_files"
            for link in (of / "cwd", *(of / "fd").iterdir(), *maps.iterdir()):
                if os.readlink(link).startswith(str(folder)):
                    status = (of / "stat").read_text().rpartition(")")[0] + ")"
                    found.append(f"{status} by {link}")
                    break
    ending = [each for each in psutil.process_iter(["name"]) if each.status() in _ENDING]
    return found or [f"nobody who can be seen; on their way: {ending}"]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DiskTrouble(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@functools.cache
def trouble(kind: str) -> str:
    """Why there can be no such disk here; empty if there can. Tried, not guessed."""
    if os.geteuid() != 0:
        return "only root may mount a file system"
    for command in ("mount", "umount", "losetup", _MKFS[kind][0]):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    try:
        with tempfile.TemporaryDirectory() as folder, Disk(Path(folder), kind) as disk:
            if keeps(disk):
                return "a file that was never synced outlived the cut: this is no power cut"
    except (OSError, DiskTrouble) as error:
        return str(error)
    return ""


def keeps(disk: Disk) -> bool:
    """Whether an unsynced file is still there after a cut."""
    (disk.folder / "unsynced").write_bytes(b"x")
    disk.cut()
    disk.power_on()
    return (disk.folder / "unsynced").exists()


def need(kind: str, what: str) -> None:
    """For tests: skip, which the end of the run says, where there is no such disk."""
    import pytest

    reason = trouble(kind)
    if reason:
        pytest.skip(f"{what} on {kind}: {reason}")


@contextlib.contextmanager
def small_disk(place: Path, space_bytes: int) -> Iterator[Disk]:
    """An ext4 that is soon full; root's reserve is given up, or root would not notice."""
    with Disk(place, "ext4", space_bytes=space_bytes) as disk:
        _run("tune2fs", "-m", "0", disk._device)
        disk.power_on()
        yield disk
