"""Java's habits that RocketMQ's files depend on: string hashes, and the order of a HashMap."""

from __future__ import annotations

from collections.abc import Iterable


def java_string_hash(text: str) -> int:
    """Java's String.hashCode: over UTF-16 code units, a signed 32-bit number.

    RocketMQ uses it for tag codes, index slots and the order of properties.
    """
    units = text.encode("utf-16-be", "surrogatepass")
    code = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        code = (31 * code + (high << 8 | low)) & 0xFFFF_FFFF
    return code - (1 << 32) if code >> 31 else code


def java_hash_map_order(keys: Iterable[str], table_size: int) -> list[str]:
    """The keys, put into a Java HashMap in the order given, in the order it iterates over them.

    `table_size` is the map's initial capacity, a power of two; like the map's own it doubles
    whenever more than three quarters are in use. A key given twice keeps its first place.
    Not followed: Java turns a bucket of more than eight keys into a tree, whose root comes first.
    """
    if table_size < 1 or table_size & (table_size - 1):
        raise ValueError(f"table size {table_size}: must be a power of two")
    unique = list(dict.fromkeys(keys))
    while len(unique) > 0.75 * table_size:
        table_size *= 2

    def bucket(key: str) -> int:
        code = java_string_hash(key) & 0xFFFF_FFFF
        return (code ^ code >> 16) & (table_size - 1)

    # Growing keeps the order within a bucket, as does a stable sort.
    return sorted(unique, key=bucket)
