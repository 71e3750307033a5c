"""Index files: what RocketMQ wrote is read, what we write is what RocketMQ would have written."""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
import reference
from family import RunningBroker
from hypothesis import given, settings
from hypothesis import strategies as st
from interop import rocketmq

from cometmq.client import Admin
from cometmq.protocol.commands import QueryMessages, QueryResult
from cometmq.protocol.errors import MessageNotFound, NoPermission
from cometmq.shm import _kernel
from cometmq.shm.control import Counter
from cometmq.shm.files import map_segment
from cometmq.shm.index_file import (
    IndexFiles,
    IndexHeader,
    IndexReader,
    IndexShape,
    delete_expired,
    list_index_files,
    next_name,
    read_header,
)
from cometmq.shm.index_recovery import LogScan, recover_index
from cometmq.shm.layout import INDEX_ENTRY, INDEX_HEADER


def shape_of(meta: dict[str, Any]) -> IndexShape:
    return IndexShape(meta["settings"]["maxHashSlotNum"], meta["settings"]["maxIndexNum"])


def assert_answers(reader: IndexReader, meta: dict[str, Any]) -> None:
    queries = meta["queries"]["queryMessage"]
    assert len(queries) > 200
    for query in queries:
        found = reader.query(
            query["topic"], query["key"], query["maxNum"], query["begin"], query["end"]
        )
        assert found == query["physicalOffsets"], query
    assert not reader.damaged


def build(store: Path, meta: dict[str, Any], log_end: int, *, step: int = 1000) -> IndexFiles:
    """Index the store's log from its beginning, a few records a call."""
    segment_bytes = meta["settings"]["mappedFileSizeCommitLog"]
    files = IndexFiles(store, shape_of(meta))
    at = 0
    while at < log_end:
        start = at // segment_bytes * segment_bytes
        path = store / "commitlog" / f"{start:020d}"
        with map_segment(path, segment_bytes, writable=False) as memory:
            end = min(log_end, start + segment_bytes)
            at, reason = files.index(memory, start, at, end, step)
        if reason == _kernel.INDEX_BLANK:
            at = start + segment_bytes
        assert reason != _kernel.INDEX_BAD
    files.close()
    return files


def entries(path: Path, shape: IndexShape) -> list[tuple[int, int]]:
    """(keyHash, physical offset) of every entry."""
    raw = path.read_bytes()
    header = IndexHeader.of(raw)
    found = [
        INDEX_ENTRY.unpack(raw, shape.entries_at + number * INDEX_ENTRY.size)
        for number in range(1, header.index_count)
    ]
    return [(entry["key_hash"], entry["physical_offset"]) for entry in found]


# --- RocketMQ's own files -------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.CLEAN)
def test_golden_files_answer_as_rocketmq_did(name: str, tmp_path: Path) -> None:
    meta = golden.meta(name)
    store = golden.unpack(name, tmp_path)
    reader = IndexReader(store, shape_of(meta))
    assert_answers(reader, meta)
    reader.close()


@pytest.mark.parametrize("name", golden.ALL)
def test_golden_headers(name: str, tmp_path: Path) -> None:
    meta = golden.meta(name)
    store = golden.unpack(name, tmp_path)
    assert list_index_files(store) == [file["file"] for file in meta["onDisk"]["index"]]
    for file in meta["onDisk"]["index"]:
        path = store / "index" / file["file"]
        assert read_header(path) == tuple(list(file.values())[1:])
        with map_segment(path, shape_of(meta).file_bytes, writable=False) as memory:
            slots, count = shape_of(meta).slots, shape_of(meta).entries
            assert _kernel.index_is_whole(memory, slots, count)


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize("name", golden.CLEAN)
def test_built_by_us_from_the_golden_logs(name: str, step: int, tmp_path: Path) -> None:
    """Byte for byte: the names alone differ, which are the time of creation."""
    if step == 1 and name == "loghub-clean":
        pytest.skip("16,000 calls")
    meta = golden.meta(name)
    theirs = golden.unpack(name, tmp_path)
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "commitlog").symlink_to(theirs / "commitlog")
    build(ours, meta, meta["opened"]["maxPhyOffset"], step=step)
    names = list_index_files(ours)
    assert len(names) == len(list_index_files(theirs))
    for our_name, their_name in zip(names, list_index_files(theirs), strict=True):
        our, their = ours / "index" / our_name, theirs / "index" / their_name
        assert our.read_bytes() == their.read_bytes(), their_name
    reader = IndexReader(ours, shape_of(meta))
    assert_answers(reader, meta)
    reader.close()
