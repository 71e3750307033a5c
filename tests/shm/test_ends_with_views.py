"""Owners of file maps can be closed while views of the maps exist.

Fault 38: a BufferError at an orderly shutdown left `abort`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cometmq.shm.derived.index_file import IndexFiles, IndexReader, IndexShape
from cometmq.shm.derived.timer_files import TimerFiles
from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.log.references import LogMaps, create_references
from cometmq.shm.os.files import COMMITLOG_DIR, STAGING_DIR, create_segment

SEGMENT = 65_536


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in (COMMITLOG_DIR, STAGING_DIR, "index"):
        (tmp_path / name).mkdir()
    create_references(tmp_path)
    for start in (0, SEGMENT):
        create_segment(
            tmp_path / COMMITLOG_DIR, start, SEGMENT, tmp_path / STAGING_DIR, reserve_bytes=0
        )
    return tmp_path


def maps_of(owner: object) -> list[FileMap]:
    """Return all file maps of an object."""
    found: list[FileMap] = []
    todo: list[Any] = list(vars(owner).values())
    while todo:
        each = todo.pop()
        if isinstance(each, FileMap):
            found.append(each)
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, tuple | list):
            todo += each
    return found


def log_maps(store: Path) -> LogMaps:
    maps = LogMaps(store, SEGMENT)
    maps.map(0)
    maps.map(SEGMENT)
    return maps


def timers(store: Path) -> TimerFiles:
    return TimerFiles(store, SEGMENT)


def index_reader(store: Path) -> IndexReader:
    shape = IndexShape(100, 100)
    files = IndexFiles(store, shape)
    files._roll()
    files.close()
    reader = IndexReader(store, shape)
    assert list(reader.files())
    return reader


def index_writer(store: Path) -> IndexFiles:
    files = IndexFiles(store, IndexShape(100, 100))
    files._roll()
    return files


@pytest.mark.parametrize("made", [log_maps, timers, index_reader, index_writer])
def test_an_end_with_views(store: Path, made: Any) -> None:
    owner = made(store)
    maps = maps_of(owner)
    assert maps
    views = [memoryview(each) for each in maps]
    owner.close()
    for view in views:
        assert view[0] in range(256)  # still mapped
        view.release()
    for each in maps:
        with pytest.raises(ValueError, match="closed"):
            memoryview(each)


def test_a_deleted_segment_that_is_seen_yet(store: Path) -> None:
    maps = log_maps(store)
    (first, *_) = maps_of(maps)
    with memoryview(first) as view:
        maps.let_go_below(SEGMENT)
        assert view[0] == 0
    maps.close()
