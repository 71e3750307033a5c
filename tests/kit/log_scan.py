"""Every record of a log, in its order."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.kernel.layout import MAGIC_BLANK
from cometmq.shm.reading.store_reader import StoreReader


def scan_log(reader: StoreReader) -> Iterator[Message]:
    at = reader.positions.log_range()[0]
    while place := reader.place_of(at):
        memory, begin, _ = place
        size, magic = struct.unpack_from(">iI", memory, begin)
        if magic != MAGIC_BLANK:
            (message,) = decode(memory[begin : begin + size], None, False)
            yield message
        at += size
