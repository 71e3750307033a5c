"""Back-pressure: which refusal, and that what is refused may come again."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from family import Load, RunningBroker
from patience import patient
from still import go_on, stop

from cometmq import Producer, errors
from cometmq.actors.writer.admission import Admission
from cometmq.actors.writer.opening import SYNC_HERE_BYTES
from cometmq.conf import BrokerSettings

SETTINGS = BrokerSettings(
    os_page_cache_busy_time_out_ms=1_000,
    wait_time_in_send_queue_ms=200,
    max_in_flight_send_bytes=10_000_000,
)


def test_a_put_that_hung_has_what_came_meanwhile_refused_once() -> None:
    admission = Admission(SETTINGS)
    admission.begin_group(10.0, None)
    admission.check(0)
    admission.end_group(10.0, 11.5)
    admission.begin_group(11.5, None)
    with pytest.raises(errors.SystemBusy, match=r"page cache is busy.*1500 ms.*try again") as busy:
        admission.check(0)
    assert busy.value.retriable
    admission.end_group(11.5, 11.5)
    admission.begin_group(11.5, None)
    admission.check(0)


def test_what_comes_long_after_a_put_that_hung_is_taken() -> None:
    admission = Admission(SETTINGS)
    admission.begin_group(10.0, None)
    admission.end_group(10.0, 15.0)
    admission.begin_group(16.0, None)
    admission.check(0)


def test_the_oldest_that_waits_for_the_disk_decides() -> None:
    admission = Admission(SETTINGS)
    admission.begin_group(10.0, 9.9)
    admission.check(0)
    admission.begin_group(10.2, 9.9)
    with pytest.raises(errors.SystemBusy, match=r"disk is busy.*300 ms"):
        admission.check(0)


def test_shutting_down_is_for_good() -> None:
    admission = Admission(SETTINGS)
    admission.close(errors.DiskFull("full"))
    with pytest.raises(errors.DiskFull):
        admission.check(0)
    admission.close(errors.ShuttingDown("ends"))
    admission.open()
    with pytest.raises(errors.ShuttingDown):
        admission.check(0)


def test_a_disk_that_hangs_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    """The flush process is stopped under SYNC_FLUSH: sends are refused, and stored later."""
    settings = {"flushDiskType": "SYNC_FLUSH", "waitTimeMillsInSendQueue": 100}
    more = bytes(SYNC_HERE_BYTES)  # than the commitlog process syncs itself
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        flush = broker.pids()["flush"]
        with Load(broker, "t", threads=4, queues=4) as load:
            load.wait_for_more(100)
            stop(flush)
            busy = threading.Event()
            line = broker.channel(broker.endpoints.commitlog)
            for number in itertools.count():  # the load's own sends wait for the disk
                try:
                    broker.send("t", 0, [b"%d 0" % number, more], timeout_s=0.2)
                except errors.SystemBusy:
                    busy.set()
                    break
                except errors.NotConfirmed:
                    assert number < 50, broker.log[-2000:]
            go_on(flush)
            load.wait_for_more(100)
        line.close()
        assert busy.is_set()
        broker.until_logged("waitTimeMillsInSendQueue")
        broker.assert_stored(load.acknowledged)


def test_a_producer_rides_it_out(tmp_path: Path) -> None:
    settings = {"flushDiskType": "SYNC_FLUSH", "waitTimeMillsInSendQueue": 50}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        flush = broker.pids()["flush"]
        with Producer(broker.ready.name_server, linger_ms=1, timeout_s=patient(20)) as producer:
            producer.send("t", b"first").wait()
            stop(flush)
            timer = threading.Timer(1, go_on, (flush,))
            timer.start()
            # What does not wait is the flush process's, and so is all that comes behind it.
            producer.send("t", b"hurried", wait=False).wait()
            receipts = [producer.send("t", b"%d" % number) for number in range(200)]
            assert {receipt.wait().status for receipt in receipts} <= {"SEND_OK"}
            timer.join()
