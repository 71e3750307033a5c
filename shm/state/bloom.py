"""Where a group and a topic stand in RocketMQ's bloom filter: without it no file of filters counts.

Source: RocketMQ BloomFilter (20 % of errors among 32 consumers, its defaults) over Guava's
murmur3_128, of which it takes the first 64 bits.
"""

from __future__ import annotations

from typing import Final

BIT_COUNT: Final = 112
HASH_COUNT: Final = 3
_MASK: Final = (1 << 64) - 1
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


def bit_positions(group: str, topic: str) -> tuple[int, ...]:
    """Its bits, in RocketMQ's order."""
    hashed = _murmur3(f"{group}#{topic}".encode())
    first, step = _int32(hashed), _int32(hashed >> 32)
    sums = (_int32(first + number * step) for number in range(1, HASH_COUNT + 1))
    return tuple((~each if each < 0 else each) % BIT_COUNT for each in sums)


def _murmur3(data: bytes) -> int:
    """The first 64 bits of MurmurHash3_x64_128 with seed 0."""
    h1 = h2 = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        h1 ^= _mixed(data[at : at + 8], _C1, 31, _C2)
        h1 = ((_rotated(h1, 27) + h2) * 5 + 0x52DCE729) & _MASK
        h2 ^= _mixed(data[at + 8 : at + 16], _C2, 33, _C1)
        h2 = ((_rotated(h2, 31) + h1) * 5 + 0x38495AB5) & _MASK
    h1 ^= _mixed(data[whole : whole + 8], _C1, 31, _C2) ^ len(data)
    h2 ^= _mixed(data[whole + 8 :], _C2, 33, _C1) ^ len(data)
    h1 = (h1 + h2) & _MASK
    h2 = (h2 + h1) & _MASK
    return (_finished(h1) + _finished(h2)) & _MASK


def _mixed(eight: bytes, before: int, bits: int, after: int) -> int:
    """Of up to 8 bytes."""
    word = int.from_bytes(eight, "little") * before & _MASK
    return _rotated(word, bits) * after & _MASK


def _finished(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _MASK
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return word ^ word >> 33


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 64 - bits) & _MASK


def _int32(word: int) -> int:
    """As Java casts it."""
    word &= 0xFFFF_FFFF
    return word - (1 << 32) if word >> 31 else word
