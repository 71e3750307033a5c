"""Sets of settings by a name: what the default is not made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PROFILES: Final[Mapping[str, Mapping[str, object]]] = {
    # For the tests of a service: small in memory and on the disk, and quick to start. Nothing that
    # is promised changes, and a store of the default settings opens with it and the other way
    # round.
    "test": {
        "hotWindowBytes": 4 * 1_048_576,
        "hotWindowMaxBytes": 0,
        "mlockEnable": False,
        "maxHashSlotNum": 10_000,
        "maxIndexNum": 40_000,
        "diskFreeBytesMin": 64 * 1_048_576,
        "consumerSessionTimeout": 3_000,
    },
}
