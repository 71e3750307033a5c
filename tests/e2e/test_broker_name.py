"""The name of a broker stays with its store (Fault 5)."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import patient

from cometmq import Admin, Broker
from cometmq.actors.launch.addresses import default_name, name_of
from cometmq.client import Consumer
from cometmq.shm.state.identity import IDENTITY_FILE, read_identity

WAIT_S = patient(60)


def name_in(store: Path, **settings: object) -> str:
    with Broker(store, profile="test", settings=settings) as broker:
        return broker.name


def read(broker: Broker, folder: Path, start: str, count: int) -> list[bytes]:
    """Return the messages of a broadcasting consumer, at least `count`, until no more arrive."""
    found: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    with Consumer(broker.name_server, "g", "t", broadcast=folder, start=start) as consumer:
        while time.monotonic() < deadline:
            messages = consumer.poll(timeout_s=0.5)
            consumer.ack(messages)
            found += [message.body for message in messages]
            if not messages and len(found) >= count:
                break
    return found


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_broadcast_progress_outlives_a_move_of_the_store(tmp_path: Path, start: str) -> None:
    with Broker(tmp_path / "first", profile="test") as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic("t", queues=1)
        read(broker, tmp_path / "offsets", start, 0)
        with broker.producer() as producer:
            producer.send_many("t", [b"%d" % number for number in range(10)])
        assert len(read(broker, tmp_path / "offsets", start, 10)) == 10
        with broker.producer() as producer:
            producer.send_many("t", [b"%d" % number for number in range(10, 30)])
        name = broker.name
    (tmp_path / "first").rename(tmp_path / "second")
    with Broker(tmp_path / "second", profile="test") as broker:
        assert broker.name == name
        found = read(broker, tmp_path / "offsets", start, 20)
    assert found == [b"%d" % number for number in range(10, 30)]


def test_the_machine_is_called_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays the same in a new container on the same volume."""
    name = name_in(tmp_path / "store")
    assert name == default_name(tmp_path / "store")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    assert default_name(tmp_path / "store") != name
    assert name_of(tmp_path / "store") == name


def test_a_store_of_before_names_its_last_broker(tmp_path: Path) -> None:
    """The name of a store from CometMQ 0.1.0 is that of its last broker."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / IDENTITY_FILE).write_text('{"store_id":"5d41","broker":"old-place"}')
    assert name_in(tmp_path / "store") == "old-place"
    (tmp_path / "store").rename(tmp_path / "moved")
    assert name_in(tmp_path / "moved") == "old-place"


def test_brokername_wins_and_is_logged_where_it_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = name_in(tmp_path / "store")
    assert "was created by broker" not in caplog.text
    assert name_in(tmp_path / "store", brokerName="other") == "other"
    assert f"brokerName=other: the store was created by broker {name}" in caplog.text
    assert read_identity(tmp_path / "store").broker == "other"
    assert name_in(tmp_path / "store") == name
    caplog.clear()
    assert name_in(tmp_path / "named", brokerName="mine") == "mine"
    assert name_in(tmp_path / "named") == "mine"
    assert "was created by broker" not in caplog.text


def test_a_copy_beside_its_original_has_a_name_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy gets the name of the original once that is deleted."""
    caplog.set_level(logging.WARNING)
    original, copy = tmp_path / "store", tmp_path / "backup"
    name = name_in(original)
    shutil.copytree(original, copy)
    other = name_in(copy)
    assert other != name
    assert f"is a copy of the store in {original}" in caplog.text
    assert name_in(copy) == other
    assert name_in(original) == name
    shutil.rmtree(original)
    copy.rename(original)
    assert name_in(original) == name


def test_a_copy_in_a_folder_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    name = name_in(tmp_path / "a" / "store")
    shutil.copytree(tmp_path / "a" / "store", tmp_path / "b" / "store")
    assert name_in(tmp_path / "b" / "store") != name


def test_the_same_folder_by_another_path_is_no_copy(tmp_path: Path) -> None:
    name = name_in(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert name_in(tmp_path / "link") == name
