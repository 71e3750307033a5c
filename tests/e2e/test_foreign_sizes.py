"""A store of other segment sizes than the defaults is served with its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_process import json_of, serving
from family import SMALL, RunningBroker
from patience import patient

from cometmq import Broker, errors
from cometmq.shm.state.identity import IDENTITY_FILE
from cometmq.shm.tools.start_checks import sizes_there

SIZES = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 2_000}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with RunningBroker(tmp_path / "store", {**SMALL, **SIZES, "port": 0}) as broker:
        broker.create_topic("t")
        broker.send("t", 0, [b"x"] * 10)
    return tmp_path / "store"


def test_an_embedded_broker_takes_them_from_the_files(store: Path) -> None:
    assert sizes_there(store) == SIZES
    with Broker(store, profile="test") as broker, broker.consumer("g", "t") as consumer:
        assert broker.settings.mapped_file_size_commit_log_bytes == 1 << 20
        assert [message.body for message in consumer.poll(timeout_s=patient(30))] == [b"x"] * 10


def test_so_does_the_command(store: Path) -> None:
    (store / IDENTITY_FILE).unlink()  # as in a store of RocketMQ's
    with serving("broker", "--port", "0", "--store", str(store)) as server:
        (topic,) = json_of("topic", "list", COMETMQ_NAME_SERVER=server.name_server)
        assert topic["topic"] == "t"
    assert sizes_there(store) == SIZES


@pytest.mark.parametrize("key", SIZES)
def test_a_setting_that_disagrees_is_refused(key: str, store: Path) -> None:
    with pytest.raises(
        errors.StoreNotOurs, match=rf"{key} = 8000, .* have {SIZES[key]} bytes: set"
    ):
        Broker(store, settings={key: 8_000}, profile="test")


def test_a_file_that_was_cut_off_is_no_size(store: Path) -> None:
    (segment,) = sorted((store / "commitlog").iterdir())
    os.truncate(segment, 4_096)
    assert "mappedFileSizeCommitLog" not in sizes_there(store)
    with pytest.raises(errors.StoreNotOurs, match=r"mappedFileSizeCommitLog = .* 4096 bytes"):
        Broker(store, profile="test")


def test_a_size_that_no_setting_may_have(store: Path) -> None:
    (store / IDENTITY_FILE).unlink()
    for name, size in (("commitlog", 1_000), ("consumequeue/t/0", 2_011)):
        (segment,) = sorted((store / name).iterdir())
        os.truncate(segment, size)
    assert sizes_there(store) == {}


def test_nothing_is_there(tmp_path: Path) -> None:
    assert sizes_there(tmp_path / "store") == {}
    (tmp_path / "store").write_text("a file")
    assert sizes_there(tmp_path / "store") == {}
