"""Compression of the bodies that a producer sends.

What is compressed, and how, stands in the flags of a whole batch: a batch has bodies that are
compressed, or bodies that are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from cometmq.client.sending.outgoing import Body
from cometmq.protocol.compression import BODY_BYTES_MAX, CODECS, compressor
from cometmq.protocol.errors import ArgumentIllegal
from cometmq.shm.kernel.layout import SYS_COMPRESSED, SYS_COMPRESSION_SHIFT


class Compression:
    """See `Producer`. Threads may share it.

    Args:
        name: "zlib", "lz4" or "zstd".
        over: bodies of so many bytes and more.
        level: None = the format's own default.
    """

    def __init__(self, name: str, over: int, level: int | None) -> None:
        self._compress = compressor(name, level)
        self._over = over
        self._sys_flag = SYS_COMPRESSED | CODECS[name].number << SYS_COMPRESSION_SHIFT

    def fold(self, body: Body) -> tuple[Body, int]:
        """The body as it travels, and its flags."""
        try:
            plain = body if isinstance(body, bytes) else memoryview(body).tobytes()
        except TypeError:  # no bytes: the encoder refuses it in words
            return body, 0
        if self._over <= len(plain) <= BODY_BYTES_MAX:  # nobody would unfold a larger one
            folded = self._compress(plain)
            if len(folded) < len(plain):
                return folded, self._sys_flag
        return body, 0

    def runs(self, bodies: Sequence[Body]) -> Iterator[tuple[list[Body], int]]:
        """The bodies as they travel, in their order, by the flags that neighbours share."""
        for sys_flag, run in groupby(map(self.fold, bodies), lambda folded: folded[1]):
            yield [body for body, _ in run], sys_flag


def compression(name: str | None, over: int, level: int | None) -> Compression | None:
    """What the arguments of a producer mean. Raises ArgumentIllegal, CodecMissing."""
    if over < 1:
        raise ArgumentIllegal(f"compress_over={over}: at least 1")
    if name is not None:
        return Compression(name, over, level)
    if level is not None:
        raise ArgumentIllegal(f"compress_level={level}: of nothing, as compress is None")
    return None
