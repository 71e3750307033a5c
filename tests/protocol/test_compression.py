"""Compressed bodies: what is read of them, and what is refused."""

from __future__ import annotations

import contextlib
import random
import sys
import tracemalloc
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol import compression
from cometmq.protocol.compression import BODY_BYTES_MAX, CODECS, compressor, unfold
from cometmq.protocol.errors import ArgumentIllegal, BodyIllegal, CodecMissing
from cometmq.shm.kernel.codec import decompress

NAMES = tuple(CODECS)
LINES = b"".join(b"line %d of some length\n" % number for number in range(3_000))
SEED = 20_261_123


def told(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(body)


def untold(body: bytes) -> bytes:
    """A zstd frame that does not say how long it is, as Java's streams write it."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize("name", NAMES)
@given(body=st.binary(min_size=1, max_size=5_000), level=st.integers(1, 9))
def test_what_is_compressed_unfolds_again(name: str, body: bytes, level: int) -> None:
    assert unfold(compressor(name, level)(body), CODECS[name].number) == body


@pytest.mark.parametrize(
    ("flags", "name"), [(0x001, "zlib"), (0x301, "zlib"), (0x101, "lz4"), (0x201, "zstd")]
)
def test_flags_say_the_format(flags: int, name: str) -> None:
    assert decompress(compressor(name)(LINES), flags) == LINES


def test_formats_are_what_java_reads() -> None:
    frame = compressor("lz4")(LINES * 4)
    assert not lz4.frame.get_frame_info(frame)["block_linked"]
    assert zlib.decompress(compressor("zlib")(LINES)) == LINES
    assert zstandard.ZstdDecompressor().decompress(compressor("zstd")(LINES)) == LINES
    assert unfold(untold(LINES * 9), 2) == LINES * 9


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_a_typed_error_or_seen_by_nobody(name: str) -> None:
    """Cut anywhere, or with a bit turned: never another kind of error, never more than allowed."""
    chance = random.Random(SEED)
    whole, number = compressor(name)(LINES), CODECS[name].number
    for _ in range(300):
        with pytest.raises(BodyIllegal):
            unfold(whole[: chance.randrange(len(whole) - 12)], number)
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(BodyIllegal):
            assert len(unfold(bytes(damaged), number)) <= BODY_BYTES_MAX
    for junk in (b"", b"x", LINES):
        with pytest.raises(BodyIllegal):
            unfold(junk, number)
    with pytest.raises(BodyIllegal, match="type 5"):
        unfold(whole, 5)


@pytest.mark.parametrize("make", [zlib.compress, lz4.frame.compress, told, untold])
@pytest.mark.slow
def test_a_bomb_is_given_up_at_the_limit(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "BODY_BYTES_MAX", 1 << 20)
    number = {zlib.compress: 3, lz4.frame.compress: 1}.get(make, 2)  # type: ignore[call-overload]
    assert unfold(make(bytes(1 << 20)), number) == bytes(1 << 20)  # type: ignore[operator]
    with pytest.raises(BodyIllegal, match="more than 1048576 bytes"):
        unfold(make(bytes((1 << 20) + 1)), number)  # type: ignore[operator]
    bomb = make(bytes(256 << 20))  # type: ignore[operator]
    tracemalloc.start()
    try:
        with pytest.raises(BodyIllegal, match="more than 1048576 bytes"):
            unfold(bomb, number)
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_a_missing_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = compressor(name)(LINES)
    monkeypatch.setitem(sys.modules, CODECS[name].module, None)
    for use in (lambda: compressor(name), lambda: unfold(folded, CODECS[name].number)):
        with pytest.raises(CodecMissing, match=rf"pip install 'cometmq\[{name}\]'"):
            use()


@pytest.mark.parametrize(
    ("name", "level"), [("gzip", None), ("zlib", 0), ("zlib", 10), ("lz4", 13), ("zstd", 23)]
)
def test_arguments(name: str, level: int | None) -> None:
    with pytest.raises(ArgumentIllegal):
        compressor(name, level)
