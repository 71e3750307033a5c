"""Named holds: what somebody still needs of the log, kept over restarts in `cometmq.holds`.

A hold says from which physical offset on nothing may go: an archive that is being written, a
backup, a slave that is behind. It ends when it is dropped, or with its lease. The cleaner alone
writes the file; anybody may read it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.commands import Hold
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.os.durable import replace_file

HOLDS_FILE: Final = "cometmq.holds"
ARCHIVE_HOLD: Final = "archive"  # everything below it is in the archive

_decode: Final = msgspec.json.Decoder(list[Hold]).decode


def read_holds(store: Path) -> list[Hold]:
    """Those whose lease has not ended, by name. Raises StoreDamaged."""
    path = store / HOLDS_FILE
    try:
        holds = _decode(path.read_bytes())
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise StoreDamaged(
            f"{path}: {error}; what it protected is not known. Remove it to clean without holds"
        ) from None
    return sorted(filter(is_live, holds), key=lambda hold: hold.name)


def is_live(hold: Hold) -> bool:
    return not hold.expires_ms or hold.expires_ms > time.time() * 1000


def write_holds(store: Path, holds: Iterable[Hold]) -> None:
    """Durably. Raises OSError, DiskFull."""
    replace_file(store / HOLDS_FILE, msgspec.json.encode(list(holds)) + b"\n")
