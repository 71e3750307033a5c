"""Durable small files: killed at every line, every system call failing, cut off from power."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fault.disk import FILE_SYSTEMS, Disk, need, small_disk
from patience import patient

from cometmq.protocol.errors import DiskFull
from cometmq.shm.os import durable
from cometmq.shm.os.durable import (
    PRIVATE,
    beside,
    keep_words,
    replace_file,
    whole_file,
    write_beside,
)

OLD, NEW = b"old " * 100, b"new content " * 100


def whole(path: Path, content: bytes) -> None:
    with whole_file(path, beside(path, several=True)) as made:
        made.write_bytes(content)


WAYS: dict[str, Callable[[Path, bytes], None]] = {"replace": replace_file, "whole": whole}
in_every_way = pytest.mark.parametrize("write", WAYS.values(), ids=WAYS.keys())
CALLS = ("open", "write", "fsync", "close", "unlink", "replace")


class Killed(BaseException):
    """Not an Exception, so that nothing that handles faults runs, as after a kill."""


def content_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# --- kills ----------------------------------------------------------------------------------------


@in_every_way
@pytest.mark.parametrize("before", [None, OLD])
@pytest.mark.slow
def test_killed_at_every_line_it_is_the_old_or_the_new_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, bytes], None],
    before: bytes | None,
) -> None:
    """What a kill leaves is the folder as it is at that line: a copy is taken at each."""
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    folder.mkdir()
    if before is not None:
        (folder / "file").write_bytes(before)
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:50]))  # many torn writes
    seen: list[bytes | None] = []

    def at_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != durable.__file__:
            return None
        shutil.copytree(folder, copies / str(len(seen)))
        seen.append(content_of(folder / "file"))
        return at_line

    sys.settrace(at_line)
    try:
        write(folder / "file", NEW)
    finally:
        sys.settrace(None)
    assert len(seen) > 10
    assert seen.index(NEW) > 5  # and not sooner
    assert set(seen) == {before, NEW}
    for number in range(len(seen)):
        left = copies / str(number)
        write(left / "file", OLD)  # the next one goes on from there
        assert [path.name for path in left.iterdir()] == ["file"]
        assert content_of(left / "file") == OLD


# --- faults ---------------------------------------------------------------------------------------


@in_every_way
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.slow
def test_the_nth_call_of_the_system_fails(
    tmp_path: Path, write: Callable[[Path, bytes], None], code: int
) -> None:
    """For n = 1, 2, 3 ... until no call is left to fail."""
    gc.collect()  # what other tests have left is closed when it goes
    for n in itertools.count(1):
        folder = tmp_path / str(n)
        folder.mkdir()
        path = folder / "file"
        path.write_bytes(OLD)
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(n, patch, OSError(code, os.strerror(code)))
            raised = None
            try:
                write(path, NEW)
            except (OSError, DiskFull) as error:
                raised = error
        if len(calls) < n:
            assert raised is None
            break
        if raised is None:
            assert calls[n - 1] == "unlink"  # a leftover that is not there
        elif code in (errno.ENOSPC, errno.EDQUOT) and write is replace_file:
            assert isinstance(raised, DiskFull)
            assert str(path) in str(raised)
        assert content_of(path) == (NEW if "replace" in calls[: n - 1] or raised is None else OLD)
        write(path, NEW)
        assert content_of(path) == NEW
        assert [found.name for found in folder.iterdir()] == ["file"]
    assert n > 5


def fail_at(n: int, patch: pytest.MonkeyPatch, fault: OSError) -> list[str]:
    """Has the nth call of these functions of `os` fail instead of acting; notes all calls."""
    calls: list[str] = []
    ours = threading.current_thread()

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread() is not ours:  # pytest-xdist's have work to do as well
                return function(*arguments, **keywords)
            calls.append(function.__name__)
            if len(calls) == n:
                raise fault
            return function(*arguments, **keywords)

        return call

    for name in CALLS:
        patch.setattr(os, name, failing(getattr(os, name)))
    return calls


def test_a_full_disk_keeps_the_old_one_and_leaves_no_half_of_the_new(tmp_path: Path) -> None:
    need("ext4", "a full disk")
    with small_disk(tmp_path, 8 << 20) as disk:
        path = disk.folder / "file"
        replace_file(path, OLD)
        filler = disk.folder / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
                file.flush()
        with pytest.raises(DiskFull, match=str(path)):
            replace_file(path, bytes(64 << 10))
        assert path.read_bytes() == OLD
        assert not beside(path).exists()
        filler.unlink()
        replace_file(path, NEW)
        assert path.read_bytes() == NEW


# --- what lies there, and who may read it ---------------------------------------------------------


@pytest.mark.parametrize("left", ["file", "link", "hard link"])
def test_a_leftover_is_removed_and_not_written_to(tmp_path: Path, left: str) -> None:
    """Else its mode would stay, or a file elsewhere would be overwritten."""
    path, elsewhere = tmp_path / "folder" / "file", tmp_path / "elsewhere"
    path.parent.mkdir()
    elsewhere.write_bytes(b"somebody else's")
    elsewhere.chmod(0o666)
    if left == "file":
        beside(path).write_bytes(b"half of some")
        beside(path).chmod(0o666)
    elif left == "link":
        beside(path).symlink_to(elsewhere)
    else:
        os.link(elsewhere, beside(path))
    replace_file(path, NEW, mode=PRIVATE)
    assert path.read_bytes() == NEW
    assert stat.S_IMODE(path.lstat().st_mode) == PRIVATE
    assert stat.S_ISREG(path.lstat().st_mode)
    assert elsewhere.read_bytes() == b"somebody else's"
    assert [found.name for found in path.parent.iterdir()] == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"somebody else's")
    path.symlink_to(elsewhere)
    replace_file(path, NEW)
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == b"somebody else's"


@pytest.mark.parametrize(
    ("umask", "mode", "wanted"),
    [(0o077, 0o640, 0o600), (0o027, 0o640, 0o640), (0o022, 0o640, 0o640), (0o000, 0o600, 0o600)],
)
def test_the_mode_is_the_named_one_less_the_umask(
    tmp_path: Path, umask: int, mode: int, wanted: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(0o666)  # what stood there before does not matter
    before = os.umask(umask)
    try:
        replace_file(path, NEW, mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == wanted


def test_a_folder_in_the_way_is_an_error_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    beside(path).mkdir()
    with pytest.raises(OSError, match=r"file\.tmp"):
        replace_file(path, NEW)
    assert path.read_bytes() == OLD


def test_several_processes_have_temporary_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    other = path.with_name(f"file.{os.getpid() + 1}.tmp")
    other.write_bytes(b"of another")
    assert write_beside(path, NEW, several=True).name == f"file.{os.getpid()}.tmp"
    whole(path, NEW)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", other.name]


def test_what_fails_while_a_large_file_is_made_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def fails() -> None:
        with whole_file(path, beside(path)) as made:
            made.write_bytes(b"half")
            raise Killed

    with pytest.raises(Killed):
        fails()
    assert path.read_bytes() == OLD
    assert not beside(path).exists()


def test_words_are_overwritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "words"
    keep_words(path, b"12345678", size=64)
    inode = path.stat().st_ino
    keep_words(path, b"abcd", size=64)
    assert path.read_bytes() == b"abcd5678" + bytes(56)
    assert path.stat().st_ino == inode
    with pytest.raises(AssertionError):
        keep_words(path, bytes(513))  # more than a disk writes at once


# --- power ----------------------------------------------------------------------------------------


def numbered(number: int) -> bytes:
    return b"%08d" % number * 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("way", [*WAYS, "words"])
def test_power_cuts(tmp_path: Path, kind: str, way: str) -> None:
    """What was answered before the cut is there, or the one that was being written; and it is
    whole."""
    need(kind, "power cuts")
    write = WAYS.get(way, lambda path, content: keep_words(path, content[:32]))
    wanted_bytes = 32 if way == "words" else len(numbered(0))
    with Disk(tmp_path, kind) as disk:
        path = disk.folder / "file"
        write(path, numbered(0))
        durable.sync_folder(path.parent)
        answered = begun = 0
        for cut in range(5):
            enough, dark = threading.Event(), threading.Event()

            def go_on(dark: threading.Event = dark, enough: threading.Event = enough) -> None:
                nonlocal answered, begun
                with contextlib.suppress(OSError):
                    while not dark.is_set():
                        begun += 1
                        write(path, numbered(begun))
                        if not dark.is_set():  # else the machine that says so was dark already
                            answered = begun
                        if begun % 7 == 3:
                            enough.set()
                enough.set()

            writer = threading.Thread(target=go_on)
            writer.start()
            assert enough.wait(patient(60))
            dark.set()
            disk.cut()
            writer.join()
            disk.power_on()
            content = path.read_bytes()
            assert len(content) == wanted_bytes, cut
            number = int(content[:8])
            assert content == numbered(number)[:wanted_bytes]
            assert answered <= number <= begun
            answered = begun = number
        disk.check()
