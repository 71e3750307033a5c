"""When what waits was stored, by a clock that nobody sets: CLOCK_BOOTTIME of one boot of a machine.

It stands in the record, as a property. So whoever delivers it knows how long it has waited,
whatever has become of the wall clock or of processes meanwhile; another machine, or one that was
booted anew, does not, and goes by the wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

NAME: Final = "COMETMQ_UP"
CLOCK_DIGITS: Final = 8  # hexadecimal
MS_DIGITS: Final = 12  # decimal
BYTES_MAX: Final = len(NAME) + 3 + CLOCK_DIGITS + 2 * (MS_DIGITS + 1)  # of the property
AHEAD_MS: Final = 1_000  # what is later than now by more is of a clock that has run back


class Uptime(NamedTuple):
    """A moment.

    `clock` names boot and machine; `ms` are since that boot. Of a copy, `first_ms` is when the
    first of all was stored, if that is known.
    """

    clock: str
    ms: int
    first_ms: int | None = None

    def since(self, clock: str, ms: int | None) -> int | None:
        """How many ms have passed; None: nobody knows."""
        if ms is None or clock != self.clock or ms > self.ms + AHEAD_MS:
            return None
        return self.ms - ms

    def as_property(self) -> bytes:
        """As it stands in a record, with the separator behind it."""
        text = f"{NAME}\1{self.clock}-{self.ms:0{MS_DIGITS}d}"
        if self.first_ms is not None:
            text += f"-{self.first_ms:0{MS_DIGITS}d}"
        return text.encode() + b"\2"


def uptime_of(properties: Mapping[str, str]) -> Uptime | None:
    """When a record was stored; None: it does not say."""
    parts = properties.get(NAME, "").split("-")
    if not 2 <= len(parts) <= 3 or len(parts[0]) != CLOCK_DIGITS:
        return None
    if not all(len(each) == MS_DIGITS and each.isascii() and each.isdigit() for each in parts[1:]):
        return None
    return Uptime(parts[0], *map(int, parts[1:]))


def without_uptime(raw_properties: bytes) -> bytes:
    """Properties as they stand in a record, for one that is stored anew."""
    name = NAME.encode() + b"\1"
    kept = [each for each in raw_properties.split(b"\2") if each and not each.startswith(name)]
    return b"".join(each + b"\2" for each in kept)
