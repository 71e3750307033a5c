"""A RocketMQ broker as the slave of our master, by its own HA protocol."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jvm
import pytest
from family import RunningBroker
from interop.peers import ROCKETMQ_IN_SHORT, require
from patience import patient
from ports import free_ports
from scripted_slave import log_bytes

from cometmq.bench.peers.rocketmq import JARS, NAMESRV_FLAGS, OPENED
from cometmq.bench.peers.server import LOOPBACK, Server
from cometmq.shm.live.control import Counter

SEGMENT = 1 << 20
CATCH_UP_S = patient(
    60
)  # it reports 5 s after it has connected, and connects again 5 s after a loss

pytestmark = [pytest.mark.slow, pytest.mark.jvm, pytest.mark.timeout(600)]


class NameServer:
    """Answers whatever a RocketMQ broker asks of its name server with where its master's HA port
    is: release 5.3.3 loses its own `haMasterAddress` before it has made its HA client."""

    def __init__(self, master_port: int) -> None:
        self._fields = {"haServerAddr": f"{LOOPBACK}:{master_port}", "changed": "true"}
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
            while len(prefix := stream.read(8)) == 8:
                size, header_size = struct.unpack(">ii", prefix)
                asked = json.loads(stream.read(size - 4)[: header_size & 0xFFFFFF])
                header = json.dumps({
                    "code": 0, "flag": 1, "language": "OTHER", "opaque": asked["opaque"],
                    "version": 0, "serializeTypeCurrentRPC": "JSON", "extFields": self._fields,
                }).encode()  # fmt: skip
                answer = struct.pack(">ii", 4 + len(header), len(header)) + header
                connection.sendall(answer)

    def close(self) -> None:
        self._listener.close()


class RealSlave:
    """A broker of RocketMQ with brokerRole=SLAVE, on a folder of its own."""

    def __init__(self, folder: Path, master_port: int) -> None:
        require("rocketmq")
        self.folder = folder
        self._name_server = NameServer(master_port)
        folder.mkdir(parents=True, exist_ok=True)
        listen = free_ports(4) + 2
        values = {
            "brokerName": "vm-store",
            "brokerClusterName": "DefaultCluster",
            "brokerId": 1,
            "brokerRole": "SLAVE",
            "brokerIP1": LOOPBACK,
            "bindAddress": LOOPBACK,
            "listenPort": listen,
            "haListenPort": listen + 1,
            "namesrvAddr": f"{LOOPBACK}:{self._name_server.port}",
            "storePathRootDir": folder / "store",
            "mappedFileSizeCommitLog": SEGMENT,
            "mappedFileSizeConsumeQueue": 6_000,
            "maxIndexNum": 4_000,
            "maxHashSlotNum": 1_000,
            "diskMaxUsedSpaceRatio": 95,
            **ROCKETMQ_IN_SHORT,
        }
        config = folder / "broker.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        flags = [*NAMESRV_FLAGS, *jvm.QUICK, "-Xmx512m", *OPENED]
        flags += [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
        command = JARS.java("org.apache.rocketmq.broker.BrokerStartup", flags=flags)
        self.server = Server("slave", [*command, "-c", str(config)], folder)
        self.server.wait_for("boot success")

    def stop(self, *, at_once: bool = False) -> None:
        self.server.stop(at_once=at_once)
        self._name_server.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[RunningBroker]:
    settings = {"haListenPort": free_ports(), "mappedFileSizeCommitLog": SEGMENT}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("orders", 4)
        yield broker


def load(broker: RunningBroker, batches: int) -> None:
    for number in range(batches):
        broker.send("orders", number % 4, [b"%d" % number * 200] * 20, tags="eu", keys=f"k{number}")
    broker.send("orders", 0, [b"large" * 30_000])  # in several pieces of a RocketMQ master


def wait_copy(broker: RunningBroker, folder: Path, begin: int = 0) -> int:
    """Until the slave has acknowledged the whole log, which its files then have; where it ends."""
    deadline = time.monotonic() + CATCH_UP_S
    while (end := broker.counter(Counter.WROTE)) > broker.counter(Counter.REPLICATED):
        assert time.monotonic() < deadline, broker.statistics("ha")
        time.sleep(0.05)
    ours, its = log_bytes(broker.store, begin, end), log_bytes(folder / "store", begin, end)
    assert len(ours) == end - begin
    assert ours == its
    return end


def test_a_real_slave_follows(master: RunningBroker, tmp_path: Path) -> None:
    """An empty one gets the whole log, over the ends of segments; one that was killed goes on
    where it was, as does one whose master was."""
    port = int(master.settings["haListenPort"])
    load(master, 100)
    slave = RealSlave(tmp_path / "slave", port)
    try:
        wait_for_slave(master)
        load(master, 100)
        assert wait_copy(master, slave.folder) > SEGMENT
        slave.stop(at_once=True)
        load(master, 100)
        slave = RealSlave(tmp_path / "slave", port)
        wait_for_slave(master)
        load(master, 10)
        wait_copy(master, slave.folder)
        master.kill("ha")
        wait_for_slave(master)
        load(master, 10)
        wait_copy(master, slave.folder)
        master.kill("commitlog")
        load(master, 100)
        wait_copy(master, slave.folder)
    finally:
        slave.stop()


def test_an_empty_slave_takes_a_log_that_begins_later(tmp_path: Path) -> None:
    settings = {
        "haListenPort": free_ports(),
        "mappedFileSizeCommitLog": SEGMENT,
        "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
        "fileReservedTime": 1,
        "cleanResourceInterval": 100,
        "flushIntervalCommitLog": 50,
        "flushCommitLogLeastPages": 0,
        "flushConsumerOffsetInterval": 100,
    }
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("orders", 4)
        load(broker, 500)
        for segment in sorted((broker.store / "commitlog").iterdir())[:2]:
            os.utime(segment, (0, 0))
        deadline = time.monotonic() + patient(60)
        while not (begin := broker.counter(Counter.MIN_OFFSET)):
            assert time.monotonic() < deadline, broker.log
            time.sleep(0.05)
        slave = RealSlave(tmp_path / "slave", settings["haListenPort"])
        try:
            wait_for_slave(broker)
            load(broker, 10)
            wait_copy(broker, slave.folder, begin)
        finally:
            slave.stop()


def test_a_real_slave_makes_a_sync_master_sure(tmp_path: Path) -> None:
    settings = {
        "brokerRole": "SYNC_MASTER",
        "haListenPort": free_ports(),
        "mappedFileSizeCommitLog": SEGMENT,
    }
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("orders", 4)
        slave = RealSlave(tmp_path / "slave", settings["haListenPort"])
        try:
            wait_for_slave(broker)
            for number in range(50):
                (sent,) = broker.send("orders", 0, [b"<%d>" % number])
                assert sent.body in log_bytes(slave.folder / "store")
            broker.kill_all()
        finally:
            slave.stop()


def wait_for_slave(broker: RunningBroker) -> None:
    deadline = time.monotonic() + CATCH_UP_S
    while not broker.counter(Counter.SLAVES):
        assert time.monotonic() < deadline, broker.log
        time.sleep(0.05)
