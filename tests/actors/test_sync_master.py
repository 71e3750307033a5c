"""SYNC_MASTER: nothing is answered as sent that no slave has, and who asks is told why."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from family import RunningBroker
from patience import patient
from ports import free_ports
from scripted_slave import ScriptedSlave, log_bytes
from waiting import until

from cometmq import Broker, Producer
from cometmq.errors import CometError, ConfigError, FlushSlaveTimeout, SlaveNotAvailable
from cometmq.protocol.commands import Section, SendMessages, SendResult
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchEncoder
from cometmq.shm.live.control import Counter

# A busy machine may let a slave wait for a second.
SYNC = {"brokerRole": "SYNC_MASTER", "slaveTimeout": 1_500}
BOTH = ["ASYNC_FLUSH", "SYNC_FLUSH"]


def master(store: Path, **settings: object) -> RunningBroker:
    return RunningBroker(store, SYNC | {"haListenPort": free_ports()} | settings)


def slave_of(broker: RunningBroker, number: int = 1) -> ScriptedSlave:
    """That follows from now on, has all, and is counted as the so-manyth: the `ha` process does so
    once it has sent."""
    slave = ScriptedSlave(int(broker.settings["haListenPort"]))
    slave.report()
    slave.follow_on()
    slave.wait_end(broker.counter(Counter.WROTE))
    until(lambda: broker.counter(Counter.SLAVES) == number)
    return slave


@pytest.fixture(params=BOTH)
def broker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    with master(tmp_path / "store", flushDiskType=request.param) as broker:
        broker.create_topic("t")
        yield broker


def ask(broker: RunningBroker, body: bytes, *, wait: bool = True) -> tuple[int, str, float]:
    """Send one message: the answer's code and text, and how long that took."""
    encoder = BatchEncoder()
    encoder.add(body)
    section = Section("t", 0, 1, wait=wait)
    began = time.monotonic()
    answer, _ = broker.commitlog.ask(
        SendMessages([section], born_timestamp_ms=1), [encoder.take()], timeout_s=patient(30)
    )
    assert isinstance(answer, SendResult)
    (result,) = answer.results
    return result.code, result.text, time.monotonic() - began


def test_with_a_slave_messages_are_sent(broker: RunningBroker) -> None:
    with slave_of(broker) as slave:
        for number in range(100):
            code, text, _ = ask(broker, b"%d" % number)
            assert (code, text) == (0, "")
            end = broker.counter(Counter.WROTE)
            assert slave.acknowledged >= end - 4_096
            assert broker.counter(Counter.REPLICATED) >= end - 4_096
        (last,) = broker.send("t", 0, [b"last"])
        assert b"last" in bytes(slave.copy)
        broker.assert_stored([last])
        assert slave.copy == log_bytes(broker.store, 0, slave.end)


def test_without_one_they_are_told_at_once(broker: RunningBroker) -> None:
    took_s = []
    for _ in range(5):  # a busy machine may take long for one of them
        code, text, each_s = ask(broker, b"one")
        assert code == 11
        assert text == (
            "stored, but 0 slaves are connected and close enough (haMaxGapNotInSync), 1 wanted "
            "(inSyncReplicas)"
        )
        took_s.append(each_s)
    assert min(took_s) < 1.5
    assert ask(broker, b"two", wait=False)[0] == 0
    with Producer(broker.ready.name_server) as producer:
        receipt = producer.send("t", b"three")
        assert receipt.status == "SLAVE_NOT_AVAILABLE"
        producer.send_many("t", [b"x"] * 10)
    assert len(broker.read_queue("t", 0, 2)) >= 2  # stored and shown all the same


@pytest.mark.slow
def test_a_slave_that_does_not_acknowledge_is_waited_for(broker: RunningBroker) -> None:
    with ScriptedSlave(int(broker.settings["haListenPort"])) as slave:
        slave.report(0)
        slave.follow(broker.counter(Counter.WROTE))
        end = broker.counter(Counter.WROTE)
        code, text, took_s = ask(broker, b"one")
        assert (code, text) == (12, "not acknowledged by a slave within 1500 ms")
        assert took_s >= 1.5
        with Producer(broker.ready.name_server) as producer:
            assert producer.send("t", b"two").status == "FLUSH_SLAVE_TIMEOUT"
        slave.follow(end + 1)
        slave.follow_on()
        slave.wait_end(broker.counter(Counter.WROTE))
        assert ask(broker, b"three")[0] == 0


def test_a_slave_that_is_too_far_behind_is_not_waited_for(tmp_path: Path) -> None:
    with master(tmp_path / "store", haMaxGapNotInSync=50_000, slaveTimeout=20_000) as broker:
        broker.create_topic("t")
        for _ in range(20):
            broker.commitlog.ask(*batch(b"x" * 10_000, 1), timeout_s=patient(30))
        with ScriptedSlave(int(broker.settings["haListenPort"])) as slave:
            slave.report(0)
            slave.read_frame()
            code, text, _ = ask(broker, b"one")
            assert (code, text[:17]) == (11, "stored, but 0 sla")
            slave.report()
            slave.follow(broker.counter(Counter.WROTE))
            slave.follow_on()
            while ask(broker, b"two")[0]:
                pass


def batch(body: bytes, count: int) -> tuple[SendMessages, list[bytes]]:
    encoder = BatchEncoder()
    for _ in range(count):
        encoder.add(body)
    return SendMessages([Section("t", 0, count)], born_timestamp_ms=1), [encoder.take()]


@pytest.mark.slow
def test_two_slaves_are_waited_for_where_two_are_wanted(tmp_path: Path) -> None:
    with master(tmp_path / "store", inSyncReplicas=3, slaveTimeout=20_000) as broker:
        broker.create_topic("t")
        with slave_of(broker) as one:
            assert ask(broker, b"one")[0] == 11
            with slave_of(broker, 2) as two:
                assert ask(broker, b"two")[0] == 0
                end = broker.counter(Counter.REPLICATED)
                assert min(one.acknowledged, two.acknowledged) >= end
            while ask(broker, b"three")[0] != 11:
                pass
            assert broker.counter(Counter.REPLICATED) <= two.acknowledged


@pytest.mark.slow
def test_groups_and_topics_go_on_without_a_slave(broker: RunningBroker) -> None:
    """What the coordinator keeps waits for slaves as well, and is not lost where there is none."""
    broker.create_topic("another")
    with ScriptedSlave(int(broker.settings["haListenPort"])) as slave:
        slave.report(0)
        slave.follow(broker.counter(Counter.WROTE))
        began = time.monotonic()
        broker.create_topic("third")  # while it does not acknowledge
        assert 1.5 <= time.monotonic() - began < patient(15)
    entries = broker.read_queue("another", 0)
    assert entries == []


def test_nothing_is_acknowledged_that_the_slave_does_not_have(tmp_path: Path) -> None:
    """The master is killed under load; the slave's copy has all that was answered as sent."""
    with master(tmp_path / "store") as broker:
        broker.create_topic("t")
        sent: list[bytes] = []
        enough = threading.Event()

        def load(number: int) -> None:
            with Channel(broker.endpoints.commitlog) as line:
                for count in range(100_000):
                    body = b"<%d-%d>" % (number, count)
                    try:
                        answer, _ = line.ask(*batch(body, 1), timeout_s=2)
                    except CometError:  # the master is gone
                        return
                    assert isinstance(answer, SendResult)
                    if answer.results[0].code == 0:
                        sent.append(body)
                    if len(sent) > 300:
                        enough.set()

        assert broker.endpoints.commitlog
        with slave_of(broker) as slave:
            threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            assert enough.wait(patient(60))
            broker.kill_all()
            slave.wait_ended()
            for thread in threads:
                thread.join(patient(60))
            missing = [body for body in sent if body not in slave.copy]
        assert len(sent) > 300
        assert not missing, (len(missing), len(sent))


@pytest.mark.slow
def test_an_embedded_writer_waits_too(tmp_path: Path) -> None:
    port = free_ports()
    settings = {"brokerRole": "SYNC_MASTER", "haListenPort": port, "slaveTimeout": 1_500}
    settings |= {"flushIntervalCommitLog": 50, "flushCommitLogLeastPages": 0}
    with Broker(tmp_path / "store", writer="here", settings=settings) as broker:
        appender = broker.appender("t", 0)
        with pytest.raises(SlaveNotAvailable, match="stored, but 0 slaves are connected"):
            appender.append(b"one")
        assert appender.append(b"two", wait=False) == 1
        with ScriptedSlave(port) as slave:
            slave.report(0)
            slave.read_frame()
            with pytest.raises(FlushSlaveTimeout, match=r"within 1\.5 s"):
                appender.append(b"three")
            slave.report()
            slave.follow_on()
            assert appender.append(b"four") == 3
            assert b"four" in bytes(slave.copy)
            assert list(appender.append_many([b"five", b"six"])) == [4, 5]
            assert b"six" in bytes(slave.copy)
            appender.append(b"seven", wait=False)
            appender.wait()
            assert b"seven" in bytes(slave.copy)


def test_one_replica_is_a_warning(tmp_path: Path) -> None:
    with master(tmp_path / "store", inSyncReplicas=1) as broker:
        broker.create_topic("t")
        assert ask(broker, b"one")[0] == 0
        broker.until_logged("WARNING broker: brokerRole = SYNC_MASTER, inSyncReplicas = 1")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with (
        master(tmp_path / "store") as broker,
        pytest.raises(
            ConfigError, match=r"haListenPort = \d+: slaves cannot come to 127.0.0.1:\d+: Address"
        ),
    ):
        RunningBroker(tmp_path / "other", {"haListenPort": broker.settings["haListenPort"]})
