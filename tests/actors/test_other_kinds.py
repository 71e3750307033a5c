"""Stores of other kinds from RocketMQ, and logs in other places: the advice of each error works.

Fault 28.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from family import RunningBroker, Sent

from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ConfigError, StoreError, StoreNotOurs


def left(store: Path) -> list[Sent]:
    with RunningBroker(store) as broker:
        broker.create_topic("t", 1)
        return broker.send("t", 0, [b"one", b"two"])


def as_rocksdb(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "CURRENT").write_text("MANIFEST-000004\n")
    (folder / "MANIFEST-000004").write_bytes(bytes(77))
    (folder / "000008.sst").write_bytes(bytes(4_096))


def test_queues_in_rocksdb(tmp_path: Path) -> None:
    store = tmp_path / "store"
    sent = left(store)
    shutil.rmtree(store / "consumequeue")
    as_rocksdb(store / "consumequeue")
    with pytest.raises(StoreNotOurs, match="Move consumequeue away") as raised:
        RunningBroker(store)
    assert "mappedFileSizeConsumeQueue" not in str(raised.value)
    (store / "consumequeue").rename(tmp_path / "away")
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)
        assert broker.send("t", 0, [b"three"])[0].queue_offset == 2


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("topics", "topics.json"),
        ("subscriptionGroups", "subscriptionGroup.json"),
        ("consumerOffsets", "consumerOffset.json"),
    ],
)
def test_configuration_in_rocksdb(folder: str, file: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    sent = left(store)
    (store / "config" / file).unlink(missing_ok=True)
    (store / "config" / f"{file}.bak").unlink(missing_ok=True)
    as_rocksdb(store / "config" / folder)
    with pytest.raises(StoreNotOurs, match=rf"{folder}.*{file}"):
        RunningBroker(store)
    (store / "config" / folder).rename(tmp_path / "away")
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)


@pytest.mark.parametrize("log", ["none", "empty", "old"])
def test_a_log_of_dledger(log: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    sent = left(store)
    (store / "dledger-n0" / "data").mkdir(parents=True)
    (store / "dledger-n0" / "data" / f"{0:020d}").write_bytes(bytes(4_096))
    if log != "old":
        shutil.rmtree(store / "commitlog")
    if log == "empty":
        (store / "commitlog").mkdir()
    with pytest.raises(StoreNotOurs, match="DLedger") as raised:
        RunningBroker(store)
    assert "mount" not in str(raised.value)
    if log == "old":
        (store / "dledger-n0").rename(tmp_path / "away")
        with RunningBroker(store) as broker:
            broker.assert_stored(sent)


def test_a_log_elsewhere_by_a_link(tmp_path: Path) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "disk" / "commitlog"
    sent = left(store)
    elsewhere.parent.mkdir()
    settings = {"storePathCommitLog": str(elsewhere)}
    with pytest.raises(StoreError, match=f"make {store / 'commitlog'} a link"):
        RunningBroker(store, settings)
    (store / "commitlog").rename(elsewhere)
    (store / "commitlog").symlink_to(elsewhere)
    with RunningBroker(store, settings) as broker:
        broker.assert_stored(sent)


@pytest.mark.parametrize(
    "key", ["diskMaxUsedSpaceRatio", "diskSpaceCleanForciblyRatio", "diskSpaceWarningLevelRatio"]
)
@pytest.mark.parametrize(("given", "percent"), [("0.90", 90), (0.85, 85), ("0.8", 80), ("88", 88)])
def test_a_ratio_may_be_a_fraction(key: str, given: object, percent: int) -> None:
    assert BrokerSettings.from_keys({key: given}).as_keys()[key] == percent


@pytest.mark.parametrize("given", ["0.905", 0.8571, "0.", ".9x", "1.5", "0.2", 1.5, "nan", "0"])
def test_a_fraction_that_is_no_percentage_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="diskSpaceWarningLevelRatio"):
        BrokerSettings.from_keys({"diskSpaceWarningLevelRatio": given})
