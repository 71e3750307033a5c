"""The integers that a command may carry: signed, of 64 or of 32 bits, and checked when it is read.

MessagePack has unsigned 64-bit integers as well, and Python's have no limit. A field of a command
is one of these instead, so that no number which fits no file and no native call goes any further.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

INT32_MIN: Final = -(1 << 31)
INT32_MAX: Final = (1 << 31) - 1
INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1

Int32 = Annotated[int, msgspec.Meta(ge=INT32_MIN, le=INT32_MAX)]
Int64 = Annotated[int, msgspec.Meta(le=INT64_MAX)]  # MessagePack itself has none below -2**63
UInt64 = Annotated[int, msgspec.Meta(ge=0)]  # what the system numbers: devices, inodes
