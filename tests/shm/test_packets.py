"""Packets of a Unix socket, several with one system call."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from cometmq.shm.kernel._kernel import PacketReader, send_packets

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        yield here, there


def take_all(reader: PacketReader, end: socket.socket, at_once: int) -> list[bytes]:
    found: list[bytes] = []
    while packets := reader.take(end.fileno(), at_once):
        assert len(packets) <= min(at_once, 64)
        found += packets
        if not packets[-1]:
            break
    return found


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 128, 129, 200])
@pytest.mark.parametrize("at_once", [1, 63, 64, 65, 1_000])
def test_they_come_as_they_were_sent(ends: Ends, count: int, at_once: int) -> None:
    rng = random.Random(count)
    packets = [rng.randbytes(rng.choice((1, 2, 47, 99, 100))) for _ in range(count)]
    send_packets(ends[0].fileno(), tuple(packets))
    assert take_all(PacketReader(100), ends[1], at_once) == packets


def test_nothing_is_taken_where_nothing_lies(ends: Ends) -> None:
    assert PacketReader(100).take(ends[1].fileno(), 64) == []
    send_packets(ends[0].fileno(), ())
    send_packets(ends[0].fileno(), (b"x",))
    assert PacketReader(100).take(ends[1].fileno(), 0) == []
    assert PacketReader(100).take(ends[1].fileno(), -1) == []
    assert PacketReader(100).take(ends[1].fileno(), 1) == [b"x"]


def test_the_end_comes_last_and_once(ends: Ends) -> None:
    send_packets(ends[0].fileno(), (b"a", b"b"))
    ends[0].close()
    reader = PacketReader(100)
    assert reader.take(ends[1].fileno(), 64) == [b"a", b"b", b""]
    assert reader.take(ends[1].fileno(), 64) == [b""]


def test_what_is_too_long_is_cut_off(ends: Ends) -> None:
    send_packets(ends[0].fileno(), (bytes(65_536), b"x" * 100, b"y" * 99))
    assert take_all(PacketReader(100), ends[1], 64) == [bytes(100), b"x" * 100, b"y" * 99]


def test_who_does_not_read_and_who_is_gone(ends: Ends) -> None:
    with pytest.raises(BlockingIOError):
        send_packets(ends[0].fileno(), (bytes(60_000),) * 100)
    arrived = take_all(PacketReader(65_537), ends[1], 64)
    assert arrived  # the first ones
    assert set(arrived) == {bytes(60_000)}
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        send_packets(ends[0].fileno(), (b"x",))
    with pytest.raises(OSError, match="Bad file descriptor"):
        send_packets(-1, (b"x",))
    with pytest.raises(OSError, match="Bad file descriptor"):
        PacketReader(100).take(-1, 1)


def test_what_is_no_packet_is_refused(ends: Ends) -> None:
    for wrong in ("text", bytearray(b"x"), None, 1):
        with pytest.raises(TypeError):
            send_packets(ends[0].fileno(), (b"x", wrong))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        send_packets(ends[0].fileno(), [b"x"])  # type: ignore[arg-type]
