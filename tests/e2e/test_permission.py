"""Who may look into a store: its owner, and the members of `storeGroup` if there is one."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from family import SMALL, RunningBroker, encode_batch
from live_files import entries
from waiting import until

from cometmq import Broker
from cometmq.client.sending.staging import SinkLine, StageWriter
from cometmq.protocol.errors import StoreError, StoreLocked
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.os.ballast import BALLAST_FILE
from cometmq.shm.os.files import LOCK_FILE
from cometmq.shm.os.locks import StoreLock, check_not_in_use, lock_for_family
from cometmq.shm.reading.column_reader import is_served
from cometmq.shm.state.permission import group_id
from cometmq.shm.state.staging import STAGES_DIR
from cometmq.shm.tools.repair import repair_store

NOBODY, GROUP = 65_534, 54_321
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@contextmanager
def wide_open() -> Iterator[None]:
    """As careless as a umask can be."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def assert_private(store: Path) -> None:
    for path, status in entries(store):
        mode = stat.S_IMODE(status.st_mode)
        assert not mode & 0o077, f"{path} has mode {mode:04o}"


def is_private(path: Path) -> bool:
    """Nothing in it is for the group either."""
    return path.name in (LOCK_FILE, BALLAST_FILE) or STAGES_DIR in path.parts


def assert_shared(store: Path, group: int) -> None:
    for path, status in entries(store):
        mode = stat.S_IMODE(status.st_mode)
        if is_private(path):
            assert not mode & 0o077, (path, oct(mode))
        else:
            wanted = stat.S_ISGID | 0o750 if stat.S_ISDIR(status.st_mode) else 0o640
            assert (mode & 0o7057, status.st_gid) == (wanted & 0o7057, group), (path, oct(mode))


def use(name_server: str) -> None:
    """So that there is a file of every kind."""
    with SinkLine(name_server, "sink") as line:
        writer = StageWriter(line, 0, "a")
        writer.queues("t")
        writer.send("t", 0, encode_batch([b"x"] * 5), 5)
        writer.finish()
        line.commit(0, ["a"])
        StageWriter(line, 1, "b").finish()


def as_user(uid: int, gid: int, work: Callable[[], None]) -> None:
    """In a fork that has no rights but those."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """That other users can come to."""
    found = Path("/tmp") / f"cometmq-{os.getpid()}-{tmp_path.name}"[:80]
    found.mkdir(mode=0o755)
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


def test_a_store_is_its_owner_s_alone(tmp_path: Path) -> None:
    store = tmp_path / "new" / "store"
    with wide_open(), RunningBroker(store, log_path=tmp_path / "log") as broker:
        broker.create_topic("t")
        for queue in range(4):
            broker.send("t", queue, [b"x" * 9_000] * 60, keys="k")
        use(broker.ready.name_server)
        until(lambda: any((store / "index").iterdir()))
        assert_private(tmp_path / "new")
        broker.kill("commitlog")
        broker.kill("dispatcher")
        assert_private(store)
        assert "has mode" not in broker.log
    assert_private(store)


def test_a_service_s_writer_makes_nothing_that_others_can_read(tmp_path: Path) -> None:
    settings = {key: value for key, value in SMALL.items() if key != "port"}
    with wide_open(), Broker(tmp_path / "store", settings=settings, writer="here") as broker:
        appender = broker.appender("t")
        for _ in range(300):
            appender.append(b"x" * 9_000)
        use(broker.name_server)
        assert_private(tmp_path / "store")
    assert_private(tmp_path / "store")


@ROOT
def test_an_ordinary_user_cannot_lock_a_store(folder: Path) -> None:
    """Nor one that was made wider: `lock` is closed at each start."""
    store = folder / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("t")
    store.chmod(0o755)
    (store / LOCK_FILE).chmod(0o644)
    with RunningBroker(store) as broker:
        broker.until_logged(f"{store} has mode 0755: more users")

        def lock_it() -> None:
            with pytest.raises(PermissionError):
                os.open(store / LOCK_FILE, os.O_RDONLY)
            for name in (CONTROL_FILE, "cometmq.references", "cometmq.queues"):
                with pytest.raises(PermissionError):
                    os.open(store / name, os.O_RDONLY)

        as_user(NOBODY, NOBODY, lock_it)
        broker.kill("commitlog")
        broker.send("t", 0, [b"x"])


@ROOT
def test_the_members_of_a_group_may_read(folder: Path) -> None:
    """All but what could be locked, or is staged; and they write nothing."""
    store = folder / "store"
    with wide_open(), RunningBroker(store, {"storeGroup": str(GROUP)}) as broker:
        broker.create_topic("t")
        for queue in range(4):
            broker.send("t", queue, [b"x" * 9_000] * 60, keys="k")
        use(broker.ready.name_server)
        broker.kill("coordinator")
        broker.kill("allocator")
        assert_shared(store, GROUP)

        def look() -> None:
            control = ControlFile.open(store / CONTROL_FILE, writable=False)
            assert control.read(Counter.WROTE).value
            assert is_served(store)
            with pytest.raises(StoreLocked):
                check_not_in_use(store)
            for path, status in entries(store):
                if stat.S_ISDIR(status.st_mode) or is_private(path):
                    continue
                with suppress(FileNotFoundError):  # it has gone to its place
                    path.open("rb").close()
                    with pytest.raises(PermissionError):
                        path.open("r+b")
            with pytest.raises(PermissionError):
                StoreLock(store, 1)

        def look_as_a_stranger() -> None:
            with pytest.raises(PermissionError):
                os.listdir(store)

        as_user(NOBODY, GROUP, look)
        as_user(NOBODY, NOBODY, look_as_a_stranger)
        broker.kill("commitlog")  # what they have locked keeps nobody from going on
    assert_shared(store, GROUP)

    def look_at_a_closed_one() -> None:
        assert not is_served(store)

    as_user(NOBODY, GROUP, look_at_a_closed_one)
    repair_store(store, 1 << 20, 2_000)
    assert_shared(store, GROUP)


@ROOT
def test_a_store_is_given_to_a_group_later(folder: Path) -> None:
    store = folder / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        broker.send("t", 0, [b"x"] * 10)
    assert_private(store)
    with RunningBroker(store, {"storeGroup": str(GROUP)}) as broker:
        assert_shared(store, GROUP)
        broker.send("t", 1, [b"x"] * 10)
        assert_shared(store, GROUP)
    with RunningBroker(store) as broker:
        broker.until_logged(f"{store} has mode 2750: more users")


@ROOT
def test_a_reader_s_locks_on_references_stop_nobody(folder: Path) -> None:
    """A member may hold every byte of it, for reading: segments go on being made and deleted."""
    store = folder / "store"
    with RunningBroker(store, {"storeGroup": str(GROUP)}) as broker:
        broker.create_topic("t")
        descriptor = os.open(store / "cometmq.references", os.O_RDONLY)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            for _ in range(4):
                broker.send("t", 0, [b"x" * 9_000] * 100)
            for role in ("reader-0", "dispatcher", "cleaner"):
                broker.kill(role)
            assert len(broker.read_queue("t", 0, 400)) == 400
        finally:
            os.close(descriptor)


def test_a_group_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="storeGroup = no-such-group: this machine has no such"):
        group_id("no-such-group")
    assert group_id("") is None
    assert group_id(str(os.getgid())) == os.getgid()


def test_a_lock_that_is_new_is_the_owner_s(tmp_path: Path) -> None:
    with wide_open():
        os.close(lock_for_family(tmp_path, 1))
    assert_private(tmp_path / LOCK_FILE)
