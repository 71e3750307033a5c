"""The parts of the `ha` process, each alone."""

from __future__ import annotations

import math
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cometmq.actors.replication.slaves.pace import BURST_S, LEAST_S, REST_S, Pace
from cometmq.actors.replication.slaves.pieces import LogPieces
from cometmq.actors.replication.slaves.port import is_allowed
from cometmq.actors.replication.slaves.slave import HEADER, READ_BYTES, Slave, SlaveLost
from cometmq.actors.runtime import event_log
from cometmq.conf.replication import networks
from cometmq.shm.kernel.codec import BatchEncoder, whole_records
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog

SEGMENT = 65_536
SEED = random.randrange(1 << 32)


# --- who is let in ---


@pytest.mark.parametrize(
    ("peer", "here", "allowed", "let_in"),
    [
        ("127.0.0.1", "127.0.0.1", "", True),
        ("127.9.9.9", "127.0.0.1", "", True),
        ("10.0.0.5", "10.0.0.5", "", True),
        ("10.0.0.6", "10.0.0.5", "", False),
        ("::1", "::1", "", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", "", True),
        ("::ffff:10.0.0.6", "::ffff:10.0.0.5", "", False),
        ("fe80::1%eth0", "fe80::1%eth0", "", True),
        ("127.0.0.1", "127.0.0.1", "10.0.0.0/8", False),
        ("10.255.255.255", "10.0.0.5", "10.0.0.0/8", True),
        ("11.0.0.0", "10.0.0.5", "10.0.0.0/8", False),
        ("::ffff:10.1.1.1", "::1", "10.0.0.0/8", True),
        ("2001:db8::7", "::1", "10.0.0.0/8;2001:db8::/32", True),
        ("10.0.0.7", "10.0.0.1", "10.0.0.7", True),
        ("10.0.0.8", "10.0.0.1", "10.0.0.7", False),
    ],
)
def test_who_may_come(peer: str, here: str, allowed: str, let_in: bool) -> None:
    assert is_allowed(peer, here, networks(allowed)) is let_in


def test_the_log_is_told_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr(event_log.time, "monotonic", lambda: now[0])
    voice = event_log.EventLog()
    for number in range(1_000):
        voice.warn("a", "number %d", number)
    for number in range(10_000):
        voice.warn(number, "another one")
    assert len(caplog.messages) <= 1 + event_log.KEYS_MAX + 1
    caplog.clear()
    now[0] += event_log.AGAIN_S
    voice.warn("a", "number %d", 7)
    assert caplog.messages == ["number 7 (and 999 more like this since it was said last)"]


# --- reports ---


@pytest.fixture
def pair() -> Iterator[tuple[Slave, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Slave(ours, "there:1", "there"), theirs


def test_reports_come_in_any_pieces(pair: tuple[Slave, socket.socket]) -> None:
    slave, theirs = pair
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    wanted = [chance.randrange(-(1 << 63), 1 << 63) for _ in range(200)]
    data = struct.pack(f">{len(wanted)}q", *wanted)
    found: list[int] = []
    while data:
        count = chance.choice([1, 3, 7, 8, 9, 64])
        theirs.sendall(data[:count])
        data = data[count:]
        found += slave.read()
    assert found == wanted
    assert slave.read() == []
    theirs.close()
    with pytest.raises(SlaveLost, match="closed the connection"):
        slave.read()


def test_a_flood_of_reports_is_read_bit_by_bit(pair: tuple[Slave, socket.socket]) -> None:
    slave, theirs = pair
    theirs.setblocking(False)
    sent = theirs.send(bytes(READ_BYTES * 2 + 5))
    counts = []
    while found := slave.read():
        assert len(found) <= READ_BYTES // 8
        counts.append(len(found))
    assert sum(counts) == sent // 8


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([100, 150, 200], ""),
        ([100, 100], ""),
        ([201], "acknowledges 201, and was sent the log up to 200"),
        ([200, 201], "acknowledges 201"),
        ([201, 200], "reports 200, after 201"),  # a lie is no less one for being taken back
        ([99], "reports 99, after 100"),
        ([-1], "reports -1, after 100"),
        ([1 << 62, 150], "reports 150, after"),
    ],
)
def test_what_is_believed(pair: tuple[Slave, socket.socket], reports: list[int], why: str) -> None:
    slave, _ = pair
    slave.start(100, 100, 0)
    slave.sent = 200
    if why:
        with pytest.raises(SlaveLost, match=why) as lost:
            slave.take(reports)
        assert lost.value.is_fault
        assert slave.acknowledged == 0
    else:
        slave.take(reports)
        assert slave.acknowledged == (reports[-1] if reports[-1] > 100 else 0)


# --- pieces ---


def write_log(store: Path, sizes: list[int]) -> int:
    (store / "commitlog").mkdir(parents=True)
    log = CommitLog(
        store,
        segment_bytes=SEGMENT,
        physical_offset=0,
        store_host=bytes(8),
        max_message_bytes=SEGMENT,
    )
    log.open_segment()
    queue = QueueCursor("t", 0, 0)
    for size in sizes:
        encoder = BatchEncoder()
        encoder.add(b"x" * size)
        log.append_batch(
            queue, encoder.take(), 1, sys_flag=0, born_timestamp_ms=1, born_host=bytes(8)
        )
    end = log.physical_offset
    log.close()
    return end


def pieces_of(store: Path, piece_bytes: int) -> LogPieces:
    return LogPieces(store, SEGMENT, piece_bytes=piece_bytes, record_bytes=SEGMENT)


@pytest.mark.parametrize("piece_bytes", [1_024, 4_095, 4_096, 65_535, 65_536, 1 << 20])
def test_pieces_are_the_log_and_each_of_their_ends_is_found_again(
    tmp_path: Path, piece_bytes: int
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    end = write_log(tmp_path, [chance.choice([1, 100, 3_000, 20_000]) for _ in range(40)])
    pieces = pieces_of(tmp_path, piece_bytes)
    at, cut_until = 0, 0
    ends = []
    while at < end:
        to, cut_until = pieces.end_of(at, end, cut_until)
        assert at < to <= min(end, at + piece_bytes)
        assert pieces.start_of(at) == pieces.start_of(to - 1)
        at = to
        ends.append((to, cut_until))
    assert at == end
    for to, expected in ends:
        found = pieces.record_at(to, end)
        assert found is not None
        assert found in (0, expected)
        assert bool(found) == (to < expected)
    within = {to for to, _ in ends}
    for offset in chance.sample(range(1, end), 200):
        if offset not in within and pieces.record_at(offset, end) is not None:
            assert pieces.end_of(offset, end, 0)[0] > offset  # a record begins there
    pieces.close()


def test_a_damaged_log_is_sent_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = write_log(tmp_path, [1_000] * 40)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(0)
        file.write(b"\xff\xff\xff\xff")
    pieces = pieces_of(tmp_path, 4_096)
    at = 0
    while at < end:
        at, _ = pieces.end_of(at, end, 0)
    assert len([text for text in caplog.messages if "no record begins at 0" in text]) == 1
    pieces.close()


def test_whole_records_at_the_edges(tmp_path: Path) -> None:
    end = write_log(tmp_path, [100] * 10)
    memory = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
    size = end // 10
    assert whole_records(memory, 0, 0, end, end) == end
    assert whole_records(memory, 0, 0, end, end - 1) == end - size
    assert whole_records(memory, 0, 0, end, 1) == size
    assert whole_records(memory, 0, 0, end, 0) == size
    assert whole_records(memory, 0, 0, end, size + 1) == size
    assert whole_records(memory, 0, end, end, 100) == -1  # nothing is there
    assert whole_records(memory, 0, 1, end, 100) == -1
    assert whole_records(memory, 0, 0, size - 1, 100) == -1  # it is not whole
    assert whole_records(memory, 0, 0, 7, 100) == -1
    with pytest.raises(ValueError, match="not inside the segment"):
        whole_records(memory, 0, 0, len(memory) + 1, 1)
    with pytest.raises(ValueError, match="not inside the segment"):
        whole_records(memory, 100, 50, 200, 1)


def test_frames_on_the_wire(pair: tuple[Slave, socket.socket], tmp_path: Path) -> None:
    """Through a socket that takes little at a time."""
    end = write_log(tmp_path, [5_000] * 20)
    log = b"".join(path.read_bytes() for path in sorted((tmp_path / "commitlog").iterdir()))
    slave, theirs = pair
    slave.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    theirs.setblocking(False)
    pieces = pieces_of(tmp_path, 7_000)
    slave.start(0, 0, 0)
    came = bytearray()
    stalls = 0
    while slave.sent < end or slave.wants_room:
        slave.send(pieces, end)
        stalls += slave.wants_room
        try:
            came += theirs.recv(3_000)
        except BlockingIOError:
            continue
    slave.send_heartbeat()
    while True:
        try:
            came += theirs.recv(65_536)
        except BlockingIOError:
            break
    assert stalls
    copy, at = bytearray(), 0
    sizes = []
    while at < len(came):
        offset, size = HEADER.unpack_from(came, at)
        assert offset == len(copy)
        copy += came[at + HEADER.size : at + HEADER.size + size]
        at += HEADER.size + size
        sizes.append(size)
    assert copy == log[:end]
    assert sizes[-1] == 0
    pieces.close()


# --- how fast ---


@pytest.mark.parametrize("bytes_per_s", [1, 99, 100, 101, 65_537, 104_857_600, 1 << 40])
def test_no_more_goes_than_for_the_time_and_one_burst(bytes_per_s: int) -> None:
    print("seed", SEED)
    chance = random.Random(SEED + bytes_per_s)
    now = [1_000.0]
    pace = Pace(bytes_per_s, lambda: now[0])
    burst = math.ceil(bytes_per_s * BURST_S) + 1  # a byte may have been gathered in part before
    gone: list[tuple[float, int]] = []
    for _ in range(2_000):
        now[0] += chance.choice([0.0, 1e-7, 1e-4, REST_S, BURST_S, 1.0, 3.3])
        if left := pace.left():
            count = chance.randint(1, left)
            pace.took(count)
            gone.append((now[0], count))
        assert pace.left() >= 0
    assert gone
    since, total = gone[0][0], 0
    for at, count in gone:
        total += count
        assert total <= (at - since) * bytes_per_s + burst
    for first in range(0, len(gone), 97):  # in any time, not from the beginning alone
        part = gone[first : first + 50]
        passed_s = part[-1][0] - part[0][0]
        assert sum(count for _, count in part) <= passed_s * bytes_per_s + burst


def test_whoever_has_sent_all_that_may_go_rests() -> None:
    """And gets nothing meanwhile, however often it asks: not each report has a piece sent."""
    now = [50.0]
    pace = Pace(1_000_000, lambda: now[0])
    assert pace.left() == 10_000
    pace.took(9_999)
    assert pace.left() == 1
    pace.took(13)  # a header goes whole
    assert pace.rest_s() == pytest.approx(REST_S + 12e-6)
    until = now[0] + pace.rest_s()
    while now[0] < until - 1e-9:
        assert pace.left() == 0
        now[0] += 0.0005
    now[0] += 1e-6
    assert pace.rest_s() == LEAST_S, "who has asked a moment ago got nothing"
    assert 4_990 <= pace.left() <= 5_600


@pytest.mark.parametrize("bytes_per_s", [10, 1_000, 500_000, 10_000_000])
def test_whoever_has_more_to_send_always_knows_when(
    pair: tuple[Slave, socket.socket], tmp_path: Path, bytes_per_s: int
) -> None:
    """Time passes between any two looks at the clock, also at the end of a rest: either there is
    room to be waited for, or a rest, or all is sent. Nobody waits for what nobody tells."""
    print("seed", SEED)
    chance = random.Random(SEED + bytes_per_s)
    end = write_log(tmp_path, [700] * 5)
    now = 1_000.0

    def clock() -> float:
        nonlocal now
        now += chance.choice([0.0, 1e-6, LEAST_S, REST_S])
        return now

    connection, theirs = pair[0].connection, pair[1]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    slave = Slave(connection, "there:1", "there", Pace(bytes_per_s, clock))
    slave.start(0, 0, 0)
    pieces = pieces_of(tmp_path, 1_024)
    since = now
    while slave.sent < end:
        rest_s = slave.send(pieces, end)
        assert slave.sent == end or slave.wants_room or rest_s > 0
        assert not (slave.wants_room and rest_s)
        if slave.wants_room:
            assert theirs.recv(65_536)
        now += rest_s
    assert end <= (now - since) * bytes_per_s + bytes_per_s * BURST_S + 2
    pieces.close()
