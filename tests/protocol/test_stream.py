"""Messages on a stream: they come as they were sent, whatever the pieces; too large ones are
refused before memory is taken."""

from __future__ import annotations

import random
import socket
import struct
import sys
import tracemalloc
from array import array
from collections.abc import Iterator

import pytest

from cometmq.protocol.errors import BadRequest
from cometmq.protocol.frames import FRAME_MAX, MESSAGE_MAX
from cometmq.protocol.wire import stream
from cometmq.protocol.wire.stream import Message, StreamReader, StreamWriter, pack_lengths

Ends = tuple[socket.socket, socket.socket]
Plain = tuple[bytes, list[bytes]]
MORE = 1 << 31


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        yield here, there


def seeded(seed: int | None) -> random.Random:
    """Without a seed: by one that is printed."""
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def plain(messages: list[Message]) -> list[Plain]:
    return [(head, [bytes(each.buffer) for each in payload]) for head, payload in messages]


def drawn(rng: random.Random) -> Plain:
    sizes = (0, 1, 60, 300, stream.VIEW_BYTES, 70_000, 300_000)
    count = rng.choice((0, 0, 0, 1, 2, 5, 70))
    most = len(sizes) if count < 10 else 4
    return rng.randbytes(rng.choice(sizes[:4])), [
        rng.randbytes(rng.choice(sizes[:most])) for _ in range(count)
    ]


@pytest.mark.parametrize("seed", [*range(6), None])
def test_messages_come_as_they_were_sent(ends: Ends, seed: int | None) -> None:
    """The writer keeps what the socket does not take; the reader reads and takes as it likes."""
    rng = seeded(seed)
    writer, reader = StreamWriter(ends[0]), StreamReader(ends[1])
    sent = [drawn(rng) for _ in range(60)]
    waiting, found = list(sent), []
    while len(found) < len(sent):
        if waiting and rng.random() < 0.5:
            writer.send(*waiting.pop(0))
        if rng.random() < 0.7:
            writer.flush()
        if rng.random() < 0.7:
            reader.fill()
        found += plain(reader.messages(rng.choice((1, 3, sys.maxsize))))
    assert found == sent
    assert writer.unsent_bytes == 0
    assert not reader.has_more


def test_a_memoryview_is_sent_by_its_bytes(ends: Ends) -> None:
    """Its length counts items; a view that does not lie in one piece leaves nothing behind."""
    writer, reader = StreamWriter(ends[0]), StreamReader(ends[1])
    items, large = memoryview(array("I", [1, 2, 3])), memoryview(bytes(2 * stream.JOIN_BYTES))
    with pytest.raises(TypeError):
        writer.send(b"head", [large, large[::2]])
    writer.send(b"head", [items])
    assert reader.fill()
    assert plain(reader.messages(9)) == [(b"head", [items.tobytes()])]


def test_a_message_is_limited_where_it_is_received(ends: Ends) -> None:
    writer, reader = StreamWriter(ends[0]), StreamReader(ends[1], 1_000)
    writer.send(b"head", [bytes(1_000)])
    assert reader.fill()
    with pytest.raises(BadRequest, match="at most 1000"):
        reader.messages(1)


@pytest.mark.parametrize("seed", [*range(6), None])
def test_any_bytes_are_read_or_refused(ends: Ends, seed: int | None) -> None:
    """In any pieces: the same messages, and the same end."""
    rng = seeded(seed)
    data = bytearray(b"".join(b"".join(pack_lengths(*drawn(rng))) for _ in range(3)))
    for _ in range(rng.choice((0, 1, 5))):
        data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
    data += rng.randbytes(rng.choice((0, 3, 50)))
    by_pieces, at = StreamReader(ends[1]), 0
    found, refused = [], False
    while not refused:
        at += ends[0].send(data[at : at + rng.choice((1, 2, 5, 1_000, 100_000))])
        if not by_pieces.fill():
            break
        try:
            while messages := by_pieces.messages(rng.choice((1, 50))):
                found += plain(messages)
        except BadRequest:
            refused = True
    assert found == list(parsed(bytes(data), refused=refused))


def parsed(data: bytes, *, refused: bool) -> Iterator[Plain]:
    """The same in the simplest way."""
    parts: list[bytes] = []
    while len(data) >= 4:
        (length,) = struct.unpack(">I", data[:4])
        size = length % MORE
        if size > FRAME_MAX:
            assert refused
            return
        if len(data) < 4 + size:
            break
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
        if length < MORE:
            yield parts[0], parts[1:]
            parts = []
    assert not refused


def test_nothing_lies_there_and_the_end(ends: Ends) -> None:
    reader = StreamReader(ends[1])
    assert not reader.fill()
    assert reader.messages(1) == []
    StreamWriter(ends[0]).send(b"last")
    ends[0].close()
    assert reader.fill()
    assert plain(reader.messages(1)) == [(b"last", [])]
    with pytest.raises(EOFError):
        reader.fill()


@pytest.mark.parametrize("length", [FRAME_MAX + 1, MORE | (FRAME_MAX + 1), MORE - 1])
def test_a_frame_that_is_too_large_is_refused_by_its_length(ends: Ends, length: int) -> None:
    """After the messages before it."""
    reader = StreamReader(ends[1])
    StreamWriter(ends[0]).send(b"before")
    ends[0].sendall(struct.pack(">I", length))
    reader.fill()
    assert plain(reader.messages(9)) == [(b"before", [])]
    assert reader.has_more
    with pytest.raises(BadRequest, match=f"a frame of {length % MORE} bytes, at most {FRAME_MAX}"):
        reader.messages(9)


def test_a_length_alone_takes_no_memory(ends: Ends) -> None:
    ends[0].sendall(struct.pack(">I", FRAME_MAX) + b"x")
    reader = StreamReader(ends[1])
    tracemalloc.start()
    try:
        reader.fill()
        assert reader.messages(1) == []
        assert not reader.fill()
        assert tracemalloc.get_traced_memory()[1] < 2 * stream.LARGE_READ_BYTES
    finally:
        tracemalloc.stop()


def test_frames_without_content_are_counted(ends: Ends) -> None:
    """A message of nothing but lengths costs memory as well."""
    assert MESSAGE_MAX > FRAME_MAX
    ends[0].sendall(struct.pack(">I", MORE) * 1_001)
    reader = StreamReader(ends[1], 1_000 * stream.FRAME_COST)
    reader.fill()
    with pytest.raises(BadRequest, match="in a message of"):
        reader.messages(1)


def test_a_writer_whose_reader_is_gone_says_so(ends: Ends) -> None:
    writer = StreamWriter(ends[0])
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        writer.send(b"x")
    with pytest.raises(BrokenPipeError):
        writer.send(b"x", [bytes(1_000_000)])
    writer.drop()
    assert writer.unsent_bytes == 0
