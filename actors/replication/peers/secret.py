"""The secret that the replicas of a group share.

Whoever has it can be any replica of the group (certificate.py), and there is nothing else to be
given out.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Final

from cometmq.actors.runtime.private_file import read_private
from cometmq.protocol.errors import ConfigError
from cometmq.shm.os.durable import PRIVATE, no_room_is_disk_full, sync_folder, write_beside

SECRET_BYTES: Final = 32

_DIGITS: Final = 2 * SECRET_BYTES
_TEXT: Final = re.compile(rb"[0-9a-fA-F]{%d}\n?" % _DIGITS)


def make_secret(path: Path) -> None:
    """Draw a new one into a new file, durably: it is there whole, or not at all.

    Raises ConfigError where there is such a file already, or none can be made; DiskFull.
    """
    text = secrets.token_hex(SECRET_BYTES).encode() + b"\n"
    try:
        with no_room_is_disk_full(path):
            made = write_beside(path, text, mode=PRIVATE, several=True)
            try:
                os.link(made, path)  # unlike a rename, it takes no other file's place
            finally:
                made.unlink()
            sync_folder(path.parent)
    except FileExistsError:
        raise ConfigError(f"{path}: there is a file already; a secret is never replaced") from None
    except OSError as error:
        raise ConfigError(f"{path}: the secret cannot be kept there: {error.strerror}") from None


def load_secret(path: Path) -> bytes:
    """What `make_secret` has drawn. Raises ConfigError with the file and what is wrong with it."""
    text = read_private("groupSecretFile", path, _DIGITS + 1)
    if not _TEXT.fullmatch(text):
        raise ConfigError(
            f"groupSecretFile = {path}: it has something else than {_DIGITS} hexadecimal digits in "
            "one line"
        )
    return bytes.fromhex(text.decode())
