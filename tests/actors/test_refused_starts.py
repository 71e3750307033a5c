"""A start that is refused changes nothing: for every reason names, sizes, times, modes and contents
of the store are what they were, whether its last run ended in order or was killed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from family import SMALL, RunningBroker, left_behind
from inside import wait_dispatched
from ports import free_ports

from cometmq import Broker
from cometmq.actors.launch.supervisor import _take_store
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import CometError, StoreError
from cometmq.shm.os.files import ABORT_FILE

Tree = dict[str, tuple[int, int, int, bytes]]
Settings = dict[str, object]


def tree_of(store: Path) -> Tree:
    """mode, size, time of the last change and content of everything, by name."""
    found: Tree = {}
    for path in [store, *sorted(store.rglob("*"))] if store.exists() else []:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = status.st_mode, status.st_size, status.st_mtime_ns, content
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One that was closed in order, and one whose broker was killed."""
    folder = tmp_path_factory.mktemp("stores")
    for name in ("closed", "killed"):
        with RunningBroker(folder / name) as broker:
            broker.create_topic("t")
            for queue in range(3):
                broker.send("t", queue, [b"x" * 1_000] * 20, keys="k")
            wait_dispatched(broker)  # each queue has a file
            if name == "killed":
                broker.kill_all()
    return {name: folder / name for name in ("closed", "killed")}


@pytest.fixture(params=["closed", "killed"])
def store(request: pytest.FixtureRequest, stores: Mapping[str, Path], tmp_path: Path) -> Path:
    copy = tmp_path / "store"
    shutil.copytree(stores[request.param], copy)
    return copy


def other_segments(_store: Path) -> tuple[Settings, str]:
    return {"mappedFileSizeCommitLog": 2 << 20}, (
        "mappedFileSizeCommitLog = 2097152, but the segments in"
    )


def other_queue_segments(_store: Path) -> tuple[Settings, str]:
    return {"mappedFileSizeConsumeQueue": 4_000}, (
        "mappedFileSizeConsumeQueue = 4000, but the segments in"
    )


def foreign_file(store: Path) -> tuple[Settings, str]:
    (store / "commitlog" / "notes.txt").write_text("x")
    return {}, "notes.txt"


def damaged_checkpoint(store: Path) -> tuple[Settings, str]:
    (store / "checkpoint").write_bytes(b"short")
    return {}, "checkpoint: 5 bytes"


def damaged_identity(store: Path) -> tuple[Settings, str]:
    (store / "cometmq.store").write_bytes(b"{")
    return {}, "cometmq.store"


def damaged_holds(store: Path) -> tuple[Settings, str]:
    (store / "cometmq.holds").write_bytes(b"[")
    return {}, "cometmq.holds"


def damaged_new_holds(store: Path) -> tuple[Settings, str]:
    for name in ("holds.json", "holds.json.bak"):
        (store / "config" / name).write_bytes(b'{"holds":{"h":{"physicalOffset":-1}}}')
    return {}, "nothing is held any more: the log is deleted as it expires"


def damaged_config(name: str, content: bytes) -> Callable[[Path], tuple[Settings, str]]:
    def damage(store: Path) -> tuple[Settings, str]:
        for path in (store / "config" / name, store / "config" / f"{name}.bak"):
            path.write_bytes(content)
        return {}, name

    return damage


def log_elsewhere(store: Path) -> tuple[Settings, str]:
    return {"storePathCommitLog": str(store / "log")}, "storePathCommitLog"


def no_room_for_a_message(_store: Path) -> tuple[Settings, str]:
    return {"maxInFlightSendBytes": 1 << 16}, "maxInFlightSendBytes = 65536: must be at least"


def slave_of_nobody(_store: Path) -> tuple[Settings, str]:
    return {"brokerRole": "SLAVE"}, "haMasterAddress: must be the master's host:port"


def nobody_s_address(_store: Path) -> tuple[Settings, str]:
    return {"bindAddress": "192.0.2.1"}, "192.0.2.1"


def no_such_group(_store: Path) -> tuple[Settings, str]:
    return {"storeGroup": "no-such-group"}, "storeGroup = no-such-group"


def port_behind_the_last(_store: Path) -> tuple[Settings, str]:
    return {"port": 65_534}, "65535 is the last"


REASONS = [
    other_segments, other_queue_segments, foreign_file, damaged_checkpoint,
    damaged_identity, damaged_holds, damaged_new_holds, log_elsewhere, no_room_for_a_message,
    slave_of_nobody, nobody_s_address, port_behind_the_last, no_such_group,
    *(
        pytest.param(damaged_config(name, content), id=f"{name}-{number}")
        for name in ("topics.json", "subscriptionGroup.json", "consumerOffset.json")
        for number, content in enumerate((b"{", b"\0" * 100, b"[" * 100_000))
    ),
]  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.slow
def test_a_refused_start_changes_nothing(
    reason: Callable[[Path], tuple[Settings, str]], store: Path
) -> None:
    settings, text = reason(store)
    before = tree_of(store)
    assert text in refusal_of(store, settings)
    assert left_behind() == []
    assert tree_of(store) == before


def refusal_of(store: Path, settings: Settings) -> str:
    """What the start is refused with; one that is not refused leaves nothing running."""
    with pytest.raises((CometError, ValueError)) as raised:
        RunningBroker(store, settings).close()
    return str(raised.value)


@pytest.mark.parametrize("behind", range(4))
@pytest.mark.slow
def test_a_taken_port(behind: int, store: Path) -> None:
    base = free_ports(5)
    before = tree_of(store)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + behind))
        taken.listen()
        with pytest.raises(CometError, match=f"port {base + behind} is taken by process"):
            RunningBroker(store, {"port": base}).close()
    assert left_behind() == []
    assert tree_of(store) == before


@pytest.mark.parametrize("byte", [0, 1])
def test_a_store_that_somebody_has_locked(byte: int, store: Path) -> None:
    """A real RocketMQ, or another broker's supervisor."""
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b');"
        f"fcntl.lockf(f, fcntl.LOCK_EX, 1, {byte}); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(store / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        before = tree_of(store)
        with pytest.raises(CometError, match=f"lock is held by process {process.pid}"):
            RunningBroker(store).close()
        assert tree_of(store) == before
        process.communicate()


def test_by_the_embedded_broker_too(store: Path) -> None:
    settings, text = other_queue_segments(store)
    before = tree_of(store)
    given = {key: value for key, value in {**SMALL, **settings}.items() if key != "port"}
    for writer in ("here", "apart"):
        with pytest.raises(CometError, match=text):
            Broker(store, settings=given, writer=writer)  # type: ignore[arg-type]
    assert tree_of(store) == before


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    base = free_ports(5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base))
        taken.listen()
        with pytest.raises(CometError, match="is taken by"):
            RunningBroker(
                tmp_path / "new" / "store", {"port": base}, log_path=tmp_path / "log"
            ).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_store_of_another_user(stores: Mapping[str, Path]) -> None:
    settings = BrokerSettings.from_keys(dict(SMALL))
    text = "Permission denied; the store belongs to user 0"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        store = Path(folder) / "store"
        shutil.copytree(stores["closed"], store)
        store.chmod(0o755)
        for number, path in enumerate((store / "lock", store)):
            path.chmod(0o700 if number else 0o600)
            before = tree_of(store)
            os.seteuid(65_534)
            try:
                with pytest.raises(StoreError, match=text):
                    _take_store(replace(settings, store_path_root_dir=store))
            finally:
                os.seteuid(0)
            assert tree_of(store) == before


def test_after_a_refusal_the_killed_run_is_gone_on_with(
    stores: Mapping[str, Path], tmp_path: Path
) -> None:
    """Its counters are still there; nothing has to be searched."""
    store = tmp_path / "store"
    shutil.copytree(stores["killed"], store)
    with pytest.raises(CometError):
        RunningBroker(store, {"mappedFileSizeConsumeQueue": 4_000}).close()
    assert (store / ABORT_FILE).exists()
    assert (store / "cometmq.control").exists()
    with RunningBroker(store) as broker:
        assert len(broker.read_queue("t", 0)) == 20
