"""Programs of filters: postfix code on a stack, with the constants and names that it refers to."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

WORD: Final = struct.Struct("<BBHI")  # operation, whether negated, count, argument


class Op(IntEnum):
    """What a word of the code does; shm/kernel/filter.pxi has the same numbers.

    The first seven put a value on the stack; those from EQUAL on take two off, the rest one, and
    each puts its result there.
    """

    NULL = 0
    FALSE = 1
    TRUE = 2
    LONG = 3  # argument: its number
    DOUBLE = 4
    TEXT = 5
    PROPERTY = 6
    BOOLEAN = 7  # of what is no boolean: FALSE, and NULL of NULL
    NOT = 8
    NEGATE = 9
    IN = 10  # `count` texts from the argument on
    CONTAINS = 11
    STARTS = 12
    ENDS = 13
    SKIP_FALSE = 14  # if FALSE is on top, go on so many words farther
    SKIP_TRUE = 15
    EQUAL = 16
    GREATER = 17
    GREATER_EQUAL = 18
    LESS = 19
    LESS_EQUAL = 20
    AND = 21
    OR = 22


class Program(NamedTuple):
    """What the kernel's `Filter` takes, and verifies."""

    code: bytes  # of WORDs
    names: tuple[bytes, ...]
    texts: tuple[bytes, ...]
    longs: tuple[int, ...]
    doubles: tuple[float, ...]
