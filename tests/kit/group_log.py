"""Logs of a replica, made record by record in plain Python, with what is known of them. No tests.

built = build([40, [10, 20], 300], segment_bytes=1_000)     # a record, a derived write, a record
built.write(store)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import reference

from cometmq.protocol.derived import DERIVED_TOPIC, Mark, pack_mark

Write = int | Sequence[int]  # bytes of a body; or of those of a derived write
FIRST_MS = 1_000_000


@dataclass(frozen=True)
class Unit:
    """A record, or the blank at a segment's end."""

    begin: int
    end: int
    timestamp: int  # store time, ms; 0 of a blank


@dataclass
class Built:
    segment_bytes: int
    begin: int
    content: bytearray = field(default_factory=bytearray)
    units: list[Unit] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)  # what no frame is cut in

    @property
    def end(self) -> int:
        return self.begin + len(self.content)

    @property
    def starts(self) -> range:
        return range(self.begin, max(self.end, self.begin + 1), self.segment_bytes)

    def bytes_of(self, begin: int, end: int) -> bytes:
        return bytes(self.content[begin - self.begin : end - self.begin])

    def last_timestamp(self, end: int) -> int:
        """Of the last record of the segment that ends there; 0 without one."""
        start = max(0, end - 1) // self.segment_bytes * self.segment_bytes
        times = [each.timestamp for each in self.units if start <= each.begin < end]
        return max(times, default=0)

    def write(self, store: Path, *, more_segments: int = 0) -> None:
        """As a writer would have left it, with segments that were made ahead."""
        folder = store / "commitlog"
        folder.mkdir(parents=True, exist_ok=True)
        size = self.segment_bytes
        for number in range(len(self.starts) + more_segments):
            at = number * size
            segment = bytes(self.content[at : at + size]).ljust(size, b"\0")
            (folder / f"{self.begin + at:020d}").write_bytes(segment)


def build(writes: Sequence[Write], segment_bytes: int, *, begin: int = 0) -> Built:
    """One write behind the other; each lies in one segment."""
    built = Built(segment_bytes, begin)
    for number, write in enumerate(writes):
        bodies: list[tuple[str, bytes]] = []
        if isinstance(write, int):
            bodies.append(("orders", bytes([number % 251]) * write))
        else:
            mark = Mark("d", (number,), (number + 1,), len(write))
            bodies.append((DERIVED_TOPIC, pack_mark(mark)))
            bodies += [("derived", bytes([number % 251]) * size) for size in write]
        size = sum(len(_record(topic, body, 0, 0)) for topic, body in bodies)
        left = segment_bytes - len(built.content) % segment_bytes
        assert size == segment_bytes or size + reference.BLANK_BYTES <= segment_bytes
        if size != left and size + reference.BLANK_BYTES > left:
            _add(built, reference.encode_blank(left).ljust(left, b"\0"), 0)
            built.pieces.append((built.units[-1].begin, built.end))
        start = built.end
        for topic, body in bodies:
            ms = FIRST_MS + 10 * len(built.units)
            _add(built, _record(topic, body, built.end, ms), ms)
        built.pieces.append((start, built.end))
    return built


def _add(built: Built, content: bytes, timestamp: int) -> None:
    begin = built.end
    built.content += content
    built.units.append(Unit(begin, built.end, timestamp))


def _record(topic: str, body: bytes, at: int, ms: int) -> bytes:
    return reference.encode_record(topic=topic, body=body, physical_offset=at, store_timestamp=ms)
