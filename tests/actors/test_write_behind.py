"""Under ASYNC_FLUSH the system begins to write long before the flush interval is over."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

import pytest
from allocator_child import SEGMENT, begin_run
from family import RunningBroker

from cometmq.actors.maintenance import flush
from cometmq.actors.maintenance.flush import FlushActor
from cometmq.shm.live.control import ControlFile, Counter
from cometmq.shm.os.files import Checkpoint

FIEMAP = 0xC020660B
UNWRITTEN = 0x800
EXTENTS_MAX = 512


def written_bytes(path: Path) -> int:
    """How much of a file has been written to its blocks; the rest is only reserved."""
    request = bytearray(struct.pack("=QQIIII", 0, 2**63, 0, 0, EXTENTS_MAX, 0))
    request += bytes(56 * EXTENTS_MAX)
    with path.open("rb") as file:
        try:
            fcntl.ioctl(file.fileno(), FIEMAP, request)
        except OSError as error:
            pytest.skip(f"FIEMAP is not known here: {error}")
    (count,) = struct.unpack_from("=I", request, 20)
    written = 0
    for number in range(count):
        size, flags = struct.unpack_from("=16xQ16xI", request, 32 + 56 * number)
        written += 0 if flags & UNWRITTEN else size
    return written


def test_pages_are_written_before_the_interval_is_over(tmp_path: Path) -> None:
    never = 10 * 60_000
    settings = {
        "mappedFileSizeCommitLog": 64 << 20,
        "flushIntervalCommitLog": never,
        "flushCommitLogThoroughInterval": never,
        "flushConsumeQueueThoroughInterval": never,
    }
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        segment = broker.store / "commitlog" / f"{0:020d}"
        before = written_bytes(segment)
        for _ in range(30):
            broker.send("t", 0, [bytes(100_000)] * 10)
        waited = threading.Event()
        for _ in range(200):  # nothing tells when the device is done
            if (found := written_bytes(segment) - before) >= 24 << 20:
                break
            waited.wait(0.05)
        assert found >= 24 << 20
        assert broker.statistics("flush")["behind_bytes"] > 24 << 20


@pytest.mark.alone  # another's sync writes what is dirty
def test_pages_made_ready_are_not_written_by_a_flush(tmp_path: Path) -> None:
    """They are dirty, and most will soon be written with messages in them."""
    settings = {"mappedFileSizeCommitLog": 64 << 20, "flushIntervalCommitLog": 10}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        broker.send("t", 0, [bytes(100_000)] * 10)
        while broker.statistics("flush")["behind_bytes"]:
            pass
        assert 1_000_000 <= written_bytes(broker.store / "commitlog" / f"{0:020d}") < 8 << 20


def test_where_the_system_cannot_begin_to_write_flushes_do_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family = begin_run(tmp_path, "ASYNC_FLUSH")
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(bytes(SEGMENT))
    writer = ControlFile.open(family.control.path, writable=True)
    writer.own(Counter.WROTE).reset(8 << 20)

    def refused(*_arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(flush, "begin_writing", refused)
    actor = object.__new__(FlushActor)
    actor.__dict__ |= {
        "_family": family, "_segment_bytes": SEGMENT, "_segments": {}, "_begun": 0,
        "_writes_behind": True, "_wrote": family.control.read(Counter.WROTE),
        "_flushed": family.control.read(Counter.FLUSHED),
        "_steps": family.control.sleep_on(Counter.STEPS, 0),
        "_errno": writer.own(Counter.FLUSH_ERRNO),
    }  # fmt: skip
    actor._write_behind()
    assert not actor._writes_behind
    assert "pages are written at flushes only: Operation not supported" in caplog.text


def test_a_checkpoint_that_finds_no_room_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one makes the file: on a full disk that took a replica out of service."""
    actor = object.__new__(FlushActor)
    actor._checkpoint, actor._checkpoint_fits = Checkpoint(tmp_path), True
    pwrite = os.pwrite

    def refused(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refused)
    for _ in range(2):
        actor._keep_checkpoint(physic_msg_timestamp=7)
    assert caplog.text.count("checkpoint is not written: No space left on device") == 1
    assert Checkpoint(tmp_path).words["physic_msg_timestamp"] == 0
    monkeypatch.setattr(os, "pwrite", pwrite)
    actor._keep_checkpoint(logics_msg_timestamp=8)
    words = Checkpoint(tmp_path).words
    assert (words["physic_msg_timestamp"], words["logics_msg_timestamp"]) == (7, 8)

    def broken(*_arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output error"):
        actor._keep_checkpoint(logics_msg_timestamp=9)
