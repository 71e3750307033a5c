"""A broker for the tests of a service: small, and quick."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

import psutil
import pytest
from live_files import entries
from patience import patient

from cometmq import Broker
from cometmq.conf import BrokerSettings
from cometmq.conf.profiles import PROFILES
from cometmq.errors import ArgumentIllegal

MIB = 1 << 20
WAIT_S = patient(30)


def disk_bytes(folder: Path) -> int:
    return sum(status.st_blocks for _, status in entries(folder) if S_ISREG(status.st_mode)) * 512


def test_a_broker_for_tests_is_small(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Broker(store, profile="test") as broker:
        with broker.producer() as producer:
            producer.send("orders", b"one", keys="k")
        with broker.consumer("g", "orders", start="earliest") as consumer:
            (message,) = consumer.poll(1, WAIT_S)
            consumer.ack(message)
        processes = psutil.Process(broker.pid).children(recursive=True)
        pss = sum(each.memory_full_info().pss for each in processes)
        main = psutil.Process(broker.pid)
        pss += main.memory_full_info().pss
        pss += psutil.Process(main.ppid()).memory_full_info().pss  # what it was forked from
        assert len(processes) >= 8
        assert pss < 100 * 2**20
        assert disk_bytes(store) < 32 * MIB
    assert disk_bytes(store) < 8 * MIB


@pytest.mark.parametrize("order", [("test", None), (None, "test")])
def test_a_store_changes_its_profile(order: tuple[str | None, str | None], tmp_path: Path) -> None:
    for number, profile in enumerate(order):
        with Broker(tmp_path, profile=profile) as broker:  # type: ignore[arg-type]
            with broker.producer() as producer:
                producer.send("t", b"%d" % number)
            with broker.consumer("g", "t", start="earliest") as consumer:
                (message,) = consumer.poll(1, WAIT_S)
                assert message.body == b"%d" % number
                consumer.ack(message)


def test_a_profile_is_made_of_settings_that_can_be_given(tmp_path: Path) -> None:
    for settings in PROFILES.values():
        assert BrokerSettings.from_keys(settings).as_keys().items() >= settings.items()
    with pytest.raises(ArgumentIllegal, match="profile='tiny': test, or none"):
        Broker(tmp_path / "none", profile="tiny")  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()
