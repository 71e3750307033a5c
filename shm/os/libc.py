"""System calls of the C library that Python's `os` does not have: one declaration each.

Every function raises OSError with the system's errno; none of them retries. Offsets and counts are
bytes, 64 bits wide.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

ZERO_RANGE: Final = 0x10 | 0x01  # FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE
PUNCH_HOLE: Final = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
WRITE_RANGE: Final = 2  # SYNC_FILE_RANGE_WRITE
WRITE_RANGE_AND_WAIT: Final = 1 | 2 | 4  # ..._WAIT_BEFORE, ..._WRITE, ..._WAIT_AFTER

_PR_SET_TIMERSLACK: Final = 29
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_AT_FDCWD: Final = -100
_STATX_MNT_ID_UNIQUE: Final = 0x4000  # Linux 6.8: never given twice while the machine runs
_STATX_BYTES: Final = 256
_MNT_ID_AT: Final = 144

_library: Final = ctypes.CDLL(None, use_errno=True)


def _declare(name: str, *kinds: Any) -> Callable[..., int]:
    """A function that returns an int, and below 0 with an errno where it fails."""
    function = getattr(_library, name, None)
    if function is None:  # a C library without it

        def missing(*_: object) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)

        return missing

    def fails(result: int, _function: object, _arguments: object) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    function.argtypes = kinds
    function.restype = ctypes.c_int
    function.errcheck = fails
    return function  # type: ignore[no-any-return]


_int, _uint, _long, _offset = ctypes.c_int, ctypes.c_uint, ctypes.c_ulong, ctypes.c_int64
_fallocate: Final = _declare("fallocate", _int, _int, _offset, _offset)
_sync_file_range: Final = _declare("sync_file_range", _int, _offset, _offset, _uint)
_syncfs: Final = _declare("syncfs", _int)
_prctl: Final = _declare("prctl", _int, _long, _long, _long, _long)
_statx: Final = _declare("statx", _int, ctypes.c_char_p, _int, _uint, ctypes.c_void_p)
_mallopt: Final = _declare("mallopt", _int, _int)
_getsockopt: Final = _declare(
    "getsockopt", _int, _int, _int, ctypes.c_void_p, ctypes.POINTER(_uint)
)


def fallocate(descriptor: int, mode: int, start: int, count: int) -> None:
    """Change what space a file has; mode 0 takes it. EOPNOTSUPP where the file system cannot.

    Unlike os.posix_fallocate it never falls back to writing.
    """
    _fallocate(descriptor, mode, start, count)


def sync_file_range(descriptor: int, start: int, count: int, flags: int) -> None:
    """Begin, or wait for, the writing of a range's dirty pages. The device is not told to flush."""
    _sync_file_range(descriptor, start, count, flags)


def syncfs(descriptor: int) -> None:
    """Everything of the file system that the descriptor is on is on the disk."""
    _syncfs(descriptor)


def name_thread(name: str) -> None:
    """What `ps` and `top` show, of the calling thread: 15 bytes. The main thread's is the
    process's. Where there is no /proc it goes without.

    Not by prctl: what a first call through ctypes looks at is 0.1 MB of each fork's own.
    """
    try:
        descriptor = os.open("/proc/thread-self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    os.write(descriptor, name.encode()[:15])
    os.close(descriptor)


def set_timer_slack(nanoseconds: int) -> None:
    """How late the system may end a sleep of the calling thread; 50,000 unless set, 1 at least."""
    _prctl(_PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


def keep_freed(own_mapping_bytes: int, freed_bytes: int) -> None:
    """For a process that takes and frees large pieces all the time: freed memory stays with it, and
    does not have to be cleared by the system for the next one.

    Args:
        own_mapping_bytes: from there on a piece goes back to the system as soon as it is freed.
        freed_bytes: of each of the library's arenas (each thread has one) stay.
    """
    with suppress(OSError):  # a C library that has its own ways
        _mallopt(_M_MMAP_THRESHOLD, own_mapping_bytes)
        _mallopt(_M_TRIM_THRESHOLD, freed_bytes)


def mount_id(path: Path) -> int | None:
    """Names the mount that a path is on, while this machine runs; None where the system is too old
    to tell mounts apart for good, or there is no such path."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        _statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_MNT_ID_UNIQUE, found)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=I", found)
    if not mask & _STATX_MNT_ID_UNIQUE:
        return None
    (mount,) = struct.unpack_from("=Q", found, _MNT_ID_AT)
    return int(mount)


def socket_option(descriptor: int, level: int, option: int, most_bytes: int) -> bytes:
    """The value of a socket's option, of a descriptor that no socket object has."""
    buffer = ctypes.create_string_buffer(most_bytes)
    size = _uint(most_bytes)
    _getsockopt(descriptor, level, option, buffer, ctypes.byref(size))
    return buffer.raw[: size.value]
