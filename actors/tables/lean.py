"""Which properties a copy can go without where there is no room for all. Pure: no I/O.

A user's own are never among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CRC: Final = b"__CRC32#"  # of the record that it stands in, which no copy has

_UP: Final = b"COMETMQ_UP"
_NOTES: Final = (CRC, b"TIMER_ROLL_TIMES", b"TIMER_ENQUEUE_MS", b"TIMER_DEQUEUE_MS", b"WAIT")
_TIMES: Final = (
    b"TIMER_DELAY_LEVEL", b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_OUT_MS",
    b"TIMER_DELIVER_MS", b"TRAN_MSG",
)  # fmt: skip

# Of what waits on. Without the last one its delay goes by the wall clock.
WAITING: Final = (*_NOTES, _UP)
# Of what comes again at a level's end, and may have waited before.
AGAIN: Final = (*_NOTES, *_TIMES, _UP)
# Of what has waited: also where it was meant for, which is where it is now.
DELIVERED: Final = (_UP, *_NOTES, *_TIMES, b"DELAY", b"REAL_QID", b"REAL_TOPIC")


def lean(properties: bytes, spare: Sequence[bytes], bytes_max: int) -> bytes:
    """Properties without as many of these, first ones first, as have to go so that they have no
    more bytes; without all, if that is not enough."""
    if len(properties) <= bytes_max:
        return properties
    kept = [each for each in properties.split(b"\2") if each]
    left = list(spare)
    while left and sum(map(len, kept)) + len(kept) > bytes_max:
        name = left.pop(0) + b"\1"
        kept = [each for each in kept if not each.startswith(name)]
    return b"".join(each + b"\2" for each in kept)
