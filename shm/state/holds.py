"""Named holds on the disk: `config/holds.json`.

A hold says from which physical offset on nothing may go: an archive that is being written, a
backup, a slave that is behind. It ends when it is dropped, or with its lease. The ledger has them;
the file is the coordinator's snapshot, some seconds old at times. Before 0.2.0 they stood in
`cometmq.holds`, which counts while there is no holds.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from cometmq.protocol.commands import Hold
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.integers import INT64_MAX
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import CONFIG_DIR
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.json_text import dumps

HOLDS_FILE: Final = "holds.json"
OLD_HOLDS_FILE: Final = "cometmq.holds"
ARCHIVE_HOLD: Final = "archive"  # everything below it is in the archive

_Number = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


class HeldFrom(msgspec.Struct, frozen=True, rename="camel"):
    physical_offset: _Number
    expires_ms: _Number = 0  # milliseconds since 1970; 0 = never


class HoldTable(msgspec.Struct, kw_only=True):
    """What holds.json has, which RocketMQ does not have."""

    holds: dict[str, HeldFrom] = {}


_decode_old: Final = msgspec.json.Decoder(list[tuple[str, _Number, _Number]]).decode


def holds_text(holds: Iterable[Hold]) -> str:
    """The text of holds.json."""
    return dumps(
        HoldTable(
            holds={hold.name: HeldFrom(hold.physical_offset, hold.expires_ms) for hold in holds}
        )
    )


def holds_file(store: Path) -> ConfigFile[HoldTable]:
    return ConfigFile(store / CONFIG_DIR / HOLDS_FILE, HoldTable)


def load_holds(store: Path, file: ConfigFile[HoldTable]) -> dict[str, Hold]:
    """By name, also those whose lease has ended. Raises StoreDamaged, OSError.

    Args:
        file: `holds_file`; where it has nothing the file of before 0.2.0 counts, if there is one.
    """
    table = file.load()
    if table is not None:
        return {
            name: Hold(name, held.physical_offset, held.expires_ms)
            for name, held in table.holds.items()
        }
    path = store / OLD_HOLDS_FILE
    try:
        return {hold[0]: Hold(*hold) for hold in _decode_old(path.read_bytes())}
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(
            f"{path}: {error}; what it protected is not known. Remove it to clean without holds"
        ) from None


def has_old_holds(store: Path) -> bool:
    return (store / OLD_HOLDS_FILE).exists()


def forget_old_holds(store: Path) -> None:
    """There is a holds.json: what stood in its place goes, once that is on the disk for certain."""
    if has_old_holds(store):
        sync_folder(store / CONFIG_DIR)
        (store / OLD_HOLDS_FILE).unlink()


def read_holds(store: Path) -> list[Hold]:
    """As the last snapshot has them, those whose lease has not ended, by name.

    Raises StoreDamaged, OSError.
    """
    holds = load_holds(store, holds_file(store)).values()
    now_ms = time.time_ns() // 1_000_000
    return sorted((hold for hold in holds if hold.is_live(now_ms)), key=lambda hold: hold.name)
