"""Segments before they are needed: made, used again, warmed, and what it costs to commit there."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cli_process
import pytest
import reference
from allocator_child import SEGMENT, begin_run, die_at, get_ready, lines_of_it
from dying import DIED, some_of
from family import SMALL, RunningBroker, Sent
from patience import patient

from cometmq.actors.maintenance import hot_window
from cometmq.actors.maintenance.allocator import CGROUP, memory_limit_bytes
from cometmq.actors.maintenance.hot_window import HotWindow
from cometmq.actors.maintenance.reach import Reach
from cometmq.actors.runtime.meters import values_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import DiskFull
from cometmq.shm.live.control import Counter
from cometmq.shm.log.segments import SegmentMaker
from cometmq.shm.os.files import RETIRED_DIR, STAGING_DIR, Pages, map_log, segment_name

STALE = b"\xda\xa3\x20\xa7" * (SEGMENT // 4)
WAIT_S = patient(60)
FILE_SPACE = 1 << 60  # everywhere


def retire(store: Path, *starts: int, content: bytes = STALE) -> None:
    folder = store / RETIRED_DIR
    folder.mkdir(parents=True, exist_ok=True)
    for start in starts:
        (folder / segment_name(start)).write_bytes(content)


def log_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((store / "commitlog").iterdir())}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


READY = {segment_name(number * SEGMENT): bytes(SEGMENT) for number in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    begin_run(store)
    return store


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_the_oldest_retired_segment_is_used_again(store: Path, flush: str) -> None:
    retire(store, 5 * SEGMENT, 9 * SEGMENT)
    for suffix in (".held", ".forced", ".releasing"):
        (store / RETIRED_DIR / f"{segment_name(0)}{suffix}").write_bytes(STALE)
    statistics = values_of(get_ready(store, flush).statistics())
    assert (statistics["fresh_segments"], statistics["recycled_segments"]) == (2, 1)
    assert log_of(store) == READY
    assert names_in(store / STAGING_DIR) == []
    left = [f"{segment_name(0)}{suffix}" for suffix in (".forced", ".held", ".releasing")]
    assert names_in(store / RETIRED_DIR) == [*left, segment_name(9 * SEGMENT)]


def test_a_retired_file_of_another_size_is_not_used(store: Path) -> None:
    retire(store, 0, content=STALE[:-1])
    (store / RETIRED_DIR / segment_name(SEGMENT)).symlink_to("/etc/passwd")
    statistics = values_of(get_ready(store).statistics())
    assert statistics["recycled_segments"] == 0
    assert log_of(store) == READY
    assert names_in(store / RETIRED_DIR) == []


def test_the_cleaner_may_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retire(tmp_path, 0)
    maker = SegmentMaker(tmp_path, SEGMENT, small_pages=False)
    maker.begin()
    listed = os.listdir(tmp_path / RETIRED_DIR)
    (tmp_path / RETIRED_DIR / segment_name(0)).unlink()
    monkeypatch.setattr(os, "listdir", lambda _folder: listed)
    assert not maker.take_retired()


@pytest.mark.slow
def test_killed_at_any_line(store: Path, tmp_path: Path) -> None:
    """No stale byte is ever in commitlog/, nothing is left in staging, the next one goes on."""
    retire(store, 5 * SEGMENT, 9 * SEGMENT)

    def copy() -> Path:
        there = tmp_path / "copy"
        shutil.rmtree(there, ignore_errors=True)
        return Path(shutil.copytree(store, there))

    lines = lines_of_it(copy())
    assert len(lines) > 100
    for place, (line, passes) in some_of(enumerate(sorted(lines.items())), 50):
        nth = passes if place % 2 else 1  # the first time that it is passed, or the last
        there = copy()
        assert die_at(there, line, nth) == DIED, (line, nth)
        for name, content in log_of(there).items():
            assert content == READY[name], (line, nth, name)
        get_ready(there).close()
        assert log_of(there) == READY, (line, nth)
        assert names_in(there / STAGING_DIR) == [], (line, nth)


def test_a_disk_that_fails_while_recycling(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retire(store, 0)

    def failing(*_arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    actor = get_ready(store)
    assert log_of(store) == READY
    assert values_of(actor.statistics())["recycled_segments"] == 0
    assert names_in(store / STAGING_DIR) == []


# --- in a broker ---


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
@pytest.mark.slow
def test_a_broker_uses_them_again(flush: str, tmp_path: Path) -> None:
    """What was stored is there after kill -9, and nothing of the earlier life."""
    store = tmp_path / "store"
    old = tmp_path / "old"
    with RunningBroker(old) as broker:
        broker.create_topic("t", 1)
        for _ in range(3):
            broker.send("t", 0, [b"an earlier life" * 1000] * 40)
    stale = (old / "commitlog" / segment_name(0)).read_bytes()
    sent: list[Sent] = []
    with RunningBroker(store, {"flushDiskType": flush}) as broker:
        broker.create_topic("t", 1)
        for number in range(12):
            retire(store, (1000 + number) << 20, content=stale)
            sent += broker.send("t", 0, [b"x" * 10_000] * 60)
        deadline = time.monotonic() + WAIT_S
        while not broker.statistics("allocator")["recycled_segments"]:
            assert time.monotonic() < deadline, broker.statistics("allocator")
            sent += broker.send("t", 0, [b"x" * 10_000] * 60)
        broker.assert_stored(sent)
        broker.kill("allocator")
        sent += broker.send("t", 0, [b"x" * 10_000] * 60)
        broker.kill_all()
    for path in sorted((store / "commitlog").iterdir()):
        assert b"an earlier life" not in path.read_bytes()
    with RunningBroker(store, {"flushDiskType": flush}) as broker:
        broker.assert_stored(sent)
        assert broker.close() == 0
    assert reference.check_store(store) == []


def device_bytes(path: Path) -> int:
    """Written to the device that holds this path, by anybody."""
    device = path.stat().st_dev
    file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    try:
        return int(file.read_text().split()[6]) * 512
    except OSError:
        pytest.skip(f"bytes per commit: {file} cannot be read")


@pytest.mark.alone
def test_a_commit_writes_about_a_page(tmp_path: Path) -> None:
    """Not a large folio (1 MiB) and not the journal. Others write too, so: once in a while."""
    settings = {"flushDiskType": "SYNC_FLUSH", "mappedFileSizeCommitLog": 64 << 20}
    found: list[float] = []
    with RunningBroker(tmp_path / "store", settings) as broker:
        device_bytes(broker.store)
        broker.create_topic("t", 1)
        deadline = time.monotonic() + WAIT_S
        while not found or min(found) > 8 << 10:
            assert time.monotonic() < deadline, f"bytes per commit: {found}"
            before, commits = device_bytes(broker.store), broker.counter(Counter.SYNCS)
            for _ in range(50):
                broker.send("t", 0, [b"x" * 300])
            commits = broker.counter(Counter.SYNCS) - commits
            found.append(round((device_bytes(broker.store) - before) / commits))


# --- what cannot be had ---


def window(store: Path, said: list[str], *, lock: bool = False, most_bytes: int = 0) -> HotWindow:
    return HotWindow(
        store,
        1 << 20,
        reach=Reach(1 << 20, most_bytes, has_room=lambda _bytes: True),
        pages=Pages.SINGLE,
        lock=lock,
        say=lambda _what, text: said.append(text),
        on_locked=lambda _count: None,
    )


@pytest.fixture
def log_store(tmp_path: Path) -> Path:
    (tmp_path / "commitlog").mkdir()
    with (tmp_path / "commitlog" / segment_name(0)).open("wb") as segment:
        os.posix_fallocate(segment.fileno(), 0, 1 << 20)
    return tmp_path


def test_a_window_that_has_everything(log_store: Path) -> None:
    said: list[str] = []
    hot = window(log_store, said)
    assert hot.follow(0, FILE_SPACE)
    assert hot.state == "1 MiB ahead, populated, written as single pages, 0 MiB locked"
    assert said == []
    hot.close()


def mapped_kib(store: Path, what: str) -> int:
    """A figure of this process's mapping of the first segment."""
    mappings = Path("/proc/self/smaps").read_text()
    _, _, mapping = mappings.partition(str(store / "commitlog" / segment_name(0)))
    return int(mapping.partition(f"\n{what}:")[2].split()[0])


@pytest.mark.parametrize(
    ("pages", "advice"),
    [(Pages.AROUND, set()), (Pages.SINGLE, {"rr"}), (Pages.LARGE, {"rr", "hg"})],
)
def test_how_pages_of_the_log_come(log_store: Path, pages: Pages, advice: set[str]) -> None:
    with map_log(log_store / "commitlog" / segment_name(0), 1 << 20, pages):
        mappings = Path("/proc/self/smaps").read_text()
    _, _, mapping = mappings.partition(str(log_store / "commitlog" / segment_name(0)))
    flags = mapping.partition("\nVmFlags:")[2].partition("\n")[0].split()
    knows = pages is not Pages.LARGE or Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert {"rr", "hg"} & set(flags) == (advice if knows else set())


def test_pages_that_are_written_already_are_not_made_dirty(log_store: Path) -> None:
    said: list[str] = []
    hot = window(log_store, said)
    hot.written.add(0)
    assert hot.follow(0, FILE_SPACE)
    assert said == []
    assert mapped_kib(log_store, "Rss") == 1024
    assert mapped_kib(log_store, "Shared_Dirty") + mapped_kib(log_store, "Private_Dirty") == 0
    hot.close()


def test_a_kernel_that_cannot_populate(log_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses advice that it does not know with EINVAL, as before Linux 5.14."""
    monkeypatch.setattr(hot_window, "POPULATE_WRITE", 9_999)
    said: list[str] = []
    hot = window(log_store, said)
    assert hot.follow(0, FILE_SPACE)
    assert len(said) == 1
    assert "Invalid argument (MADV_POPULATE_WRITE needs Linux 5.14)" in said[0]
    assert hot.state == "1 MiB ahead, read ahead, 0 MiB locked"
    hot.close()


def in_child(action: Callable[[], str]) -> str:
    """What a forked child, whose rights and limits may be lowered, returns."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, action().encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def drop_capability(number: int) -> None:
    """From the effective set of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert not libc.capget(header, sets)
    sets[0] &= ~(1 << number)
    assert not libc.capset(header, sets), os.strerror(ctypes.get_errno())


def test_a_memlock_limit_below_the_window(log_store: Path) -> None:
    """What is nearest to the tail is locked, the rest is said."""

    def lock() -> str:
        drop_capability(14)  # CAP_IPC_LOCK
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, resource.getrlimit(8)[1]))
        said: list[str] = []
        hot = window(log_store, said, lock=True)
        assert hot.follow(0, FILE_SPACE)
        return f"{hot.state}|{said}"

    text = in_child(lock)
    assert "0 MiB locked|['0 of the 1048576 bytes of the hot window are locked" in text
    assert "raise the memlock limit (ulimit -l)" in text


@pytest.mark.parametrize("pages", [Pages.AROUND, Pages.LARGE])
def test_the_usual_memlock_limit(tmp_path: Path, pages: Pages) -> None:
    """8 MiB: smaller than a piece that is populated at a time, and locked all the same."""
    (tmp_path / "commitlog").mkdir()
    with (tmp_path / "commitlog" / segment_name(0)).open("wb") as segment:
        os.posix_fallocate(segment.fileno(), 0, 16 << 20)

    def lock() -> str:
        drop_capability(14)  # CAP_IPC_LOCK
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, resource.getrlimit(8)[1]))
        hot = HotWindow(
            tmp_path,
            16 << 20,
            reach=Reach(16 << 20, 0, has_room=lambda _bytes: True),
            pages=pages,
            lock=True,
            say=lambda _what, _text: None,
            on_locked=lambda _count: None,
        )
        assert hot.follow(0, FILE_SPACE)
        return hot.state

    assert in_child(lock) == "16 MiB ahead, populated, 8 MiB locked"


def test_a_memory_limit_of_the_control_group(tmp_path: Path) -> None:
    own = next(
        (line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
         if line.split(":")[1] == "memory"), None,
    )  # fmt: skip
    root = CGROUP / "memory" if own else CGROUP
    name = "memory.limit_in_bytes" if own else "memory.max"
    group = root / (own or "/").lstrip("/") / f"cometmq-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(128 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"a limit of memory, which needs a control group: {error}")
    try:

        def limited() -> str:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            begin_run(tmp_path / "store")
            actor = get_ready(tmp_path / "store")
            return f"{memory_limit_bytes()} {values_of(actor.statistics())['limits']}"

        text = in_child(limited)
    finally:
        group.rmdir()
    wanted = BrokerSettings().hot_window_bytes
    assert text.startswith(f"{128 << 20} the hot window is {32 << 20} bytes instead of {wanted}")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """Sends are refused with the reason, and taken again when the limit is gone."""
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        pids = broker.pids()
        soft, hard = resource.prlimit(pids["allocator"], resource.RLIMIT_FSIZE)
        resource.prlimit(pids["allocator"], resource.RLIMIT_FSIZE, (1 << 19, hard))
        sent: list[Sent] = []

        def send_on() -> None:
            for _ in range(100):
                sent.extend(broker.send("t", 0, [b"y" * 50_000] * 4))

        with pytest.raises(DiskFull, match="File too large"):
            send_on()
        assert "ulimit -f" in str(broker.statistics("allocator")["limits"])
        assert broker.log.count("ulimit -f") == 1
        resource.prlimit(pids["allocator"], resource.RLIMIT_FSIZE, (soft, hard))
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                sent += broker.send("t", 0, [b"z" * 50_000] * 4)
                break
            except DiskFull:
                assert time.monotonic() < deadline
        broker.assert_stored(sent)
        assert broker.statistics("allocator")["limits"] == ""
        assert broker.pids() == pids, "somebody died of it"


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system without fallocate."""
    folder = tmp_path / "ramfs"
    folder.mkdir()
    command = ["mount", "-t", "ramfs", "cometmq-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        why_not = done.stderr.strip() if done.returncode else None
    except FileNotFoundError:
        why_not = "there is no mount(8)"
    if why_not:
        pytest.skip(f"a disk without fallocate, which needs a mount: {why_not}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_without_fallocate(ramfs: Path) -> None:
    with RunningBroker(ramfs / "store", {"flushDiskType": "SYNC_FLUSH"}) as broker:
        broker.create_topic("t", 1)
        sent = [one for _ in range(8) for one in broker.send("t", 0, [b"x" * 50_000] * 4)]
        broker.assert_stored(sent)
        assert "lacks fallocate" in str(broker.statistics("allocator")["limits"])
        assert broker.log.count("lacks fallocate") == 1
        assert broker.close() == 0


def test_stat_tells_of_it(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", {"flushDiskType": "SYNC_FLUSH"}) as broker:
        shown = cli_process.run("stat", "--store", str(broker.store), "--json")
        segments = json.loads(shown.stdout)["segments"]
        assert segments["fresh_segments"] == 3
        assert "written as single pages" in segments["hot_window"]
        assert segments["limits"] == ""
        assert segments["allocated"] == 3 * int(str(SMALL["mappedFileSizeCommitLog"]))
        text = cli_process.run("stat", "--store", str(broker.store)).stdout
        assert b"segments.recycled_segments\t0" in text
