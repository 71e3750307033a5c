"""Compression of bodies: RocketMQ's three formats, and what they may unfold to.

ZLIB is a zlib stream, LZ4 an LZ4 frame of independent blocks (others Java's reader refuses), ZSTD a
zstd frame. LZ4 and ZSTD are extras: who needs one that is not installed is told its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from cometmq.protocol.errors import ArgumentIllegal, BodyIllegal, CodecMissing

BODY_BYTES_MAX: Final = 64 * 1_048_576  # that a body may unfold to
STEP_BYTES_MIN: Final = 65_536  # room for what an LZ4 frame unfolds to grows from this
ZSTD_FEED_BYTES: Final = 2_048  # which unfold to 64 MiB at most: a block of 4 bytes to 128 KiB

Compress = Callable[[Any], bytes]


class _Codec(NamedTuple):
    number: int  # in sys_flag, RocketMQ CompressionType
    module: str
    level: int  # unless another one is asked for
    level_max: int


CODECS: Final[Mapping[str, _Codec]] = {
    "lz4": _Codec(1, "lz4.frame", 1, 12),
    "zstd": _Codec(2, "zstandard", 3, 22),
    "zlib": _Codec(3, "zlib", 5, 9),  # RocketMQ's own level
}
_NAMES: Final = {0: "zlib"} | {codec.number: name for name, codec in CODECS.items()}


def _module(name: str) -> Any:
    try:
        return import_module(CODECS[name].module)
    except ImportError:
        raise CodecMissing(
            f"bodies compressed by {name.upper()} need a package: pip install 'cometmq[{name}]'"
        ) from None


def compressor(name: str, level: int | None = None) -> Compress:
    """What makes a body of that format. Raises ArgumentIllegal, CodecMissing."""
    if name not in CODECS:
        raise ArgumentIllegal(f"compress={name!r}: {', '.join(map(repr, CODECS))} or None")
    codec = CODECS[name]
    if level is None:
        level = codec.level
    if not 1 <= level <= codec.level_max:
        raise ArgumentIllegal(
            f"compress_level={level}: of {name} it is from 1 to {codec.level_max}"
        )
    module = _module(name)
    if name == "zlib":
        return lambda body: zlib.compress(body, level)
    if name == "lz4":
        return lambda body: bytes(
            module.compress(body, compression_level=level, block_linked=False)
        )
    # One compressor must not be used by two threads; making one costs little beside its work.
    return lambda body: bytes(module.ZstdCompressor(level=level).compress(body))


def unfold(body: bytes, number: int) -> bytes:
    """The plain body of one that is compressed in the format of that number; 0 is ZLIB too.

    Raises BodyIllegal if it is damaged or unfolds to more than BODY_BYTES_MAX, CodecMissing.
    """
    name = _NAMES.get(number)
    if name is None:
        raise BodyIllegal(f"it is compressed by type {number}, which is unknown")
    module = _module(name)
    try:
        plain = _UNFOLD[name](module, body)
    except (zlib.error, RuntimeError, getattr(module, "ZstdError", zlib.error)) as error:
        raise BodyIllegal(f"it is not {name.upper()}, as its flags say: {error}") from None
    if plain is None:
        raise BodyIllegal(f"it is cut off ({name.upper()})")
    return plain


def _too_large() -> BodyIllegal:
    return BodyIllegal(f"it unfolds to more than {BODY_BYTES_MAX} bytes")


def _unfold_zlib(module: Any, body: bytes) -> bytes | None:
    unpacker = module.decompressobj()
    plain = unpacker.decompress(body, BODY_BYTES_MAX)
    if unpacker.unconsumed_tail:
        raise _too_large()
    return plain if unpacker.eof else None


def _unfold_lz4(module: Any, body: bytes) -> bytes | None:
    unpacker = module.LZ4FrameDecompressor()
    parts: list[bytes] = []
    size = 0
    while not unpacker.eof:
        step = min(max(STEP_BYTES_MIN, 4 * len(body), size), BODY_BYTES_MAX + 1 - size)
        parts.append(unpacker.decompress(body if not parts else b"", step))
        size += len(parts[-1])
        if size > BODY_BYTES_MAX:
            raise _too_large()
        if not unpacker.eof and (unpacker.needs_input or not parts[-1]):
            return None
    return b"".join(parts)


def _unfold_zstd(module: Any, body: bytes) -> bytes | None:
    if module.frame_content_size(body) > BODY_BYTES_MAX:  # -1: it does not say
        raise _too_large()
    unpacker = module.ZstdDecompressor().decompressobj()
    parts: list[bytes] = []
    size = 0
    for start in range(0, len(body), ZSTD_FEED_BYTES):
        parts.append(unpacker.decompress(body[start : start + ZSTD_FEED_BYTES]))
        size += len(parts[-1])
        if size > BODY_BYTES_MAX:
            raise _too_large()
        if unpacker.eof:
            return b"".join(parts)
    return None


_UNFOLD: Final[Mapping[str, Callable[[Any, bytes], bytes | None]]] = {
    "zlib": _unfold_zlib,
    "lz4": _unfold_lz4,
    "zstd": _unfold_zstd,
}
