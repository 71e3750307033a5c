"""Signatures by Ed25519, as RFC 8032, 6 has them in Python.

The standard library speaks TLS and signs nothing by itself. What is signed here, once in a process,
is the certificate that it shows to the other replicas (certificate.py). Not in constant time.
"""

from __future__ import annotations

import hashlib
from typing import Final

_Point = tuple[int, int, int, int]  # extended coordinates: x / z, y / z, z, and x * y / z

_P: Final = 2**255 - 19
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_BASE_X: Final = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE_Y: Final = 4 * pow(5, -1, _P) % _P
_BASE: Final = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)
_NEUTRAL: Final = (0, 1, 1, 0)


def public_key(seed: bytes) -> bytes:
    """Of a private key of 32 bytes."""
    return _packed(_times_base(_expanded(seed)[0]))


def sign(seed: bytes, message: bytes) -> bytes:
    """The signature, 64 bytes; always the same one."""
    secret, prefix = _expanded(seed)
    drawn = _number(prefix, message) % _ORDER
    point = _packed(_times_base(drawn))
    challenge = _number(point, _packed(_times_base(secret)), message)
    return point + ((drawn + challenge * secret) % _ORDER).to_bytes(32, "little")


def _expanded(seed: bytes) -> tuple[int, bytes]:
    assert len(seed) == 32, len(seed)
    found = hashlib.sha512(seed).digest()
    secret = int.from_bytes(found[:32], "little") & (1 << 254) - 8
    return secret | 1 << 254, found[32:]


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def _plus(one: _Point, other: _Point) -> _Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times_base(factor: int) -> _Point:
    found, point = _NEUTRAL, _BASE
    while factor:
        if factor & 1:
            found = _plus(found, point)
        point = _plus(point, point)
        factor >>= 1
    return found


def _packed(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")
