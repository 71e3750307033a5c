"""Files with secrets: nobody else may read them, or they keep none."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import ConfigError

NOBODY: Final = 0o077  # which others may do nothing with it
OF_GROUP: Final = 0o007  # its group may


def read_private(key: str, path: Path, bytes_max: int, *, others: int = NOBODY) -> bytes:
    """Its content; of one that is longer, one byte more than that.

    Args:
        key: the setting that names it.
        others: the rights that nobody but its owner may have.

    Raises ConfigError with the setting, the file, and what is wrong with it.
    """
    try:
        # Not to wait, where it is a pipe.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {path}: it cannot be read: {_reason(error)}") from None
    try:
        fault = _fault_of(os.fstat(file), others)
        content = b"" if fault else os.read(file, bytes_max + 1)
    except OSError as error:
        fault, content = f"it cannot be read: {error.strerror}", b""
    finally:
        os.close(file)
    if fault:
        raise ConfigError(f"{key} = {path}: {fault}")
    return content


def _reason(error: OSError | ValueError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


def _fault_of(found: os.stat_result, others: int) -> str:
    """Why such a file keeps no secret; "" if it may."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, not to root nor to user {os.geteuid()}"
    if found.st_mode & others:
        mode = stat.S_IMODE(found.st_mode)
        return f"its mode is {mode:04o}, so others may use it; `chmod 600` it, or draw a new one"
    return ""
