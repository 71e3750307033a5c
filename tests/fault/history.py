"""What clients saw, one operation a line, written by the client processes themselves.

    history = History.create(folder / "producer-3.jsonl", "producer-3")
    history.invoke("send", topic="a", queue=2, value="3-17-0badcafe")
    ...
    history.end("ok", "send", topic="a", queue=2, offset=44, value="3-17-0badcafe")
    ops = read_histories(folder)            # of all processes, by time

`invoke` is written before the operation begins, `ok`, `fail` or `info` after it has ended: so the
time between the two lines covers it. `fail` = surely not done. `info` = unknown, and so is an
invoke without an end: it is never counted as lost, and may appear.

The clock is CLOCK_MONOTONIC_RAW, one for all processes of the machine, never set. A line is one
write, so a kill -9 of its process loses nothing that was written; a torn last line is passed over.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

End = Literal["ok", "fail", "info"]


class Op(msgspec.Struct, omit_defaults=True, gc=False):
    """One line.

    f: "send"; "poll" (an invoke a call, an ok a message), "committed" (a look at
    a group's progress; offset: the next one wanted); "read" (a message read past the groups);
    "join", "leave", "assign"; "fault", "power_cut" (value: what was done to whom), "dark" (nobody
    is left of a broker without power), "healed" (it serves again), "away" and "stall" (from
    since_ns on: the broker did not answer, the process did not run). See consuming_clients.py and
    timed_clients.py for what they add.

    attempt: how often the message was given back before. epoch: of the ownership that it was
    handed out under. due_ms: a time of the system's clock, since 1970. since_ns: as t_ns.
    """

    p: str
    type: Literal["invoke", "ok", "fail", "info"]
    f: str
    t_ns: int
    topic: str = ""
    queue: int = -1
    offset: int = -1
    value: str = ""
    group: str = ""
    msg_id: str = ""
    note: str = ""
    attempt: int = -1
    epoch: int = -1
    due_ms: int = 0
    since_ns: int = 0


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Op).decode


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


class History:
    """The end that one process, or one thread of it, writes to."""

    def __init__(self, descriptor: int, p: str) -> None:
        self._descriptor, self.p = descriptor, p

    @classmethod
    def create(cls, path: Path, p: str) -> Self:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return cls(os.open(path, flags, 0o644), p)

    def write(self, ops: Iterable[Op]) -> None:
        os.write(self._descriptor, b"".join([_encode(op) + b"\n" for op in ops]))

    def invoke(self, f: str, **fields: str | int) -> None:
        self.write([self.op("invoke", f, **fields)])

    def end(self, type_: End, f: str, **fields: str | int) -> None:
        self.write([self.op(type_, f, **fields)])

    def op(self, type_: Literal["invoke", "ok", "fail", "info"], f: str, **fields: str | int) -> Op:
        return Op(self.p, type_, f, now_ns(), **fields)  # type: ignore[arg-type]

    def close(self) -> None:
        os.close(self._descriptor)


def read_history(path: Path) -> list[Op]:
    """Raises msgspec.DecodeError for a line that is none; the last one may be torn."""
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_decode(line) for line in lines]


def read_part(path: Path, begin: int) -> tuple[list[Op], int]:
    """The whole lines from that byte on, and where the next one begins."""
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read()
    end = text.rfind(b"\n") + 1
    return [_decode(line) for line in text[:end].splitlines()], begin + end


def read_histories(folder: Path) -> list[Op]:
    """Of all files there, by time. The sort is stable: one process's lines keep their order."""
    ops = [op for path in sorted(folder.glob("*.jsonl")) for op in read_history(path)]
    ops.sort(key=lambda op: op.t_ns)
    return ops


# --- bodies ---------------------------------------------------------------------------------------

_HEAD: Final = struct.Struct(">2sIII")  # mark, producer, sequence, CRC of what stands before
_MARK: Final = b"CM"
BODY_BYTES_MIN: Final = _HEAD.size


def make_body(producer: int, sequence: int, size: int, filler: bytes) -> bytes:
    """A body of `size` bytes, at least BODY_BYTES_MIN, that says whose it is."""
    rest = memoryview(filler)[sequence % 251 :][: max(0, size - _HEAD.size)]
    head = _HEAD.pack(_MARK, producer, sequence, 0)[:-4]
    return head + zlib.crc32(rest, zlib.crc32(head)).to_bytes(4) + rest


def value_of(body: bytes | memoryview) -> str:
    """What stands for a body in the history: producer, sequence, CRC of all of it.

    A body that does not hold its own CRC gets a value that nobody can have sent.
    """
    crc = zlib.crc32(body)
    if len(body) < _HEAD.size:
        return f"none-{len(body)}-{crc:08x}"
    mark, producer, sequence, said = _HEAD.unpack_from(body)
    is_whole = said == zlib.crc32(body[_HEAD.size :], zlib.crc32(body[: _HEAD.size - 4]))
    return f"{'' if mark == _MARK and is_whole else 'damaged-'}{producer}-{sequence}-{crc:08x}"
