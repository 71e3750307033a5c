"""A store without its log, for example on an unmounted disk, is refused, not emptied.

Fault 9. Queues, checkpoint, index and offsets say that there was a log.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import run
from family import SMALL, RunningBroker, Sent

from cometmq import Consumer
from cometmq.protocol.errors import StoreDamaged, StoreError
from cometmq.shm.derived.queue_check import StoreFiles
from cometmq.shm.tools.repair import repair_store
from cometmq.shm.tools.start_checks import check_store

SEGMENT, QUEUE = (
    int(str(SMALL[key])) for key in ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue")
)


def left(store: Path, *, kill: bool) -> list[Sent]:
    """Create a store with messages, some of which a group has committed."""
    with RunningBroker(store) as broker:
        broker.create_topic("t", 1)
        sent = broker.send("t", 0, [b"one", b"two"], keys="k")
        with Consumer(broker.ready.name_server, "g", "t") as consumer:
            for _, message in zip(range(2), consumer, strict=False):
                consumer.ack(message)
            consumer.commit()
        if kill:
            broker.kill_all()
    return sent


def contents(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def gone(log: Path) -> None:
    log.rename(log.parent.with_name("elsewhere"))


def empty(log: Path) -> None:
    gone(log)
    log.mkdir()


def cut_off(log: Path) -> None:
    """Empty the log. RocketMQ, too, ignores an empty file that sorts last."""
    empty(log)
    (log / f"{0:020d}").touch()


def dangling(log: Path) -> None:
    gone(log)
    log.symlink_to(log.parent / "not mounted")


def back(store: Path) -> None:
    log = store / "commitlog"
    if log.is_symlink():
        log.unlink()
    elif log.exists():
        shutil.rmtree(log)
    store.with_name("elsewhere").rename(log)


@pytest.mark.parametrize("kill", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("harm", [gone, empty, cut_off, dangling])
def test_a_store_without_its_log_is_refused_and_not_changed(
    harm: Callable[[Path], None], kill: bool, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    sent = left(store, kill=kill)
    harm(store / "commitlog")
    before = contents(store)
    with pytest.raises(StoreError, match="commitlog") as raised:
        RunningBroker(store)
    assert "mount" in str(raised.value)
    assert contents(store) == before
    back(store)
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)
        answer = broker.send("t", 0, [b"three"])
        assert answer[0].queue_offset == 2


KEPT: dict[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoint",),
    "queues": ("consumequeue",),
    "index": ("index",),
    "offsets": ("config",),
}


@pytest.mark.parametrize("kept", KEPT)
def test_each_of_them_says_that_there_was_a_log(kept: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    left(store, kill=False)
    for path in list(store.iterdir()):
        if path.name not in KEPT[kept]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(StoreDamaged, match="there was a log") as raised:
        check_store(StoreFiles(store, SEGMENT, QUEUE))
    assert "move" in str(raised.value)
    if kept == "offsets":  # the offsets of a slave may be ahead of its log
        check_store(StoreFiles(store, SEGMENT, QUEUE), is_copy=True)


def test_repair_refuses_it_as_well(tmp_path: Path) -> None:
    store = tmp_path / "store"
    left(store, kill=False)
    empty(store / "commitlog")
    before = contents(store)
    with pytest.raises(StoreDamaged, match="there was a log"):
        repair_store(store, SEGMENT, QUEUE)
    assert contents(store) == before
    done = run("store", "repair", str(store))
    assert done.returncode
    assert "there was a log" in done.stderr.decode()
    assert contents(store) == before


def test_an_empty_log_can_be_begun_as_the_error_says(tmp_path: Path) -> None:
    store = tmp_path / "store"
    left(store, kill=False)
    empty(store / "commitlog")
    with pytest.raises(StoreDamaged) as raised:
        RunningBroker(store)
    words = str(raised.value).rpartition("move ")[2].partition(" away;")[0]
    for name in words.split(", "):
        path = store / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with RunningBroker(store) as broker:
        broker.create_topic("new", 1)
        assert broker.send("new", 0, [b"one"])[0].queue_offset == 0


@pytest.mark.parametrize("name", ["consumequeue", "config", "index", "timerlog"])
def test_a_link_to_nothing_is_named(name: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / name).symlink_to(tmp_path / "not mounted")
    with pytest.raises(StoreError) as raised:
        RunningBroker(store)
    assert str(store / name) in str(raised.value)
    assert str(tmp_path / "not mounted") in str(raised.value)
    assert sorted(path.name for path in store.iterdir()) == [name]


@pytest.mark.parametrize("above", [False, True], ids=["itself", "above it"])
def test_a_store_that_is_a_link_to_nothing_is_named(above: bool, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "not mounted")
    with pytest.raises(StoreError) as raised:
        RunningBroker(link / "store" if above else link, log_path=tmp_path / "log")
    assert f"{link} is a link to {tmp_path / 'not mounted'}" in str(raised.value)
    assert not (tmp_path / "not mounted").exists()
