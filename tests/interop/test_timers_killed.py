"""Timers of a store whose broker was killed early or late, opened by a real RocketMQ.

Fault 10. RocketMQ reads the topic of timers again from the position in `timercheck`; without the
file it begins at the start, and each unit is in its wheel twice.
"""

from __future__ import annotations

import base64
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from family import RunningBroker
from interop import peers, rocketmq
from interop.handover import THEIRS
from interop.real import RealRocketMQ
from waiting import until

from cometmq import Producer
from cometmq.client import Admin
from cometmq.protocol.integers import INT64_MAX
from cometmq.shm.derived.timer_files import CHECK_BYTES, CHECK_FILE
from cometmq.shm.kernel.layout import TIMER_CHECK

NEVER = {
    "flushDelayOffsetInterval": 3_600_000,
    "flushConsumerOffsetInterval": 500,  # topics.json likewise
    "mappedFileSizeTimerLog": 8_192,
}
DUE_S, LAST_S = 20, 24
COUNT, RECALLED = 20, 5


def timercheck(store: Path) -> dict[str, int]:
    content = (store / "config" / CHECK_FILE).read_bytes()
    assert len(content) == CHECK_BYTES
    return TIMER_CHECK.unpack(content)


def pending(broker: RunningBroker) -> int:
    return int(broker.statistics("scheduler")["timers_pending"])


def test_timercheck_is_there_before_the_first_unit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, NEVER) as broker, Producer(broker.ready.name_server) as producer:
        producer.send("timed", b"far", queue_id=0, deliver_after=90_000)
        until(lambda: pending(broker) == 1, says="it is in the wheel")
        broker.kill_all()
    assert timercheck(store)["master_queue_offset"] == INT64_MAX


def test_a_timercheck_of_rocketmqs_is_made_ours_before_the_next_unit(tmp_path: Path) -> None:
    """RocketMQ's position is replaced before our next unit, which would otherwise be read again.
    The position of deliveries stays."""
    store = tmp_path / "store"
    with RunningBroker(store, NEVER) as broker, Producer(broker.ready.name_server) as producer:
        producer.send("timed", b"far", queue_id=0, deliver_after=90_000)
        until(lambda: pending(broker) == 1, says="it is in the wheel")
    words = timercheck(store)
    theirs = words | {"master_queue_offset": 1}
    content = TIMER_CHECK.pack(**theirs).ljust(CHECK_BYTES, b"\0")
    (store / "config" / CHECK_FILE).write_bytes(content)
    with RunningBroker(store, NEVER) as broker, Producer(broker.ready.name_server) as producer:
        producer.send("timed", b"too", queue_id=0, deliver_after=90_000)
        until(lambda: pending(broker) == 2, says="both are in the wheel")
        broker.kill_all()
    found = timercheck(store)
    assert found["master_queue_offset"] == INT64_MAX
    names = ("last_read_ms", "log_end", "queue_offset")
    assert [found[name] for name in names] == [words[name] for name in names]


def test_a_timer_log_that_is_made_anew_is_not_behind_timercheck(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, NEVER) as broker, Producer(broker.ready.name_server) as producer:
        for _ in range(3):
            producer.send("timed", b"far", queue_id=0, deliver_after=90_000)
        until(lambda: pending(broker) == 3, says="all are in the wheel")
    assert timercheck(store)["log_end"] == 3 * 52
    (store / "timerlog" / f"{0:020d}").unlink()
    with RunningBroker(store, NEVER) as broker:
        until(lambda: pending(broker) == 3, says="all are in the wheel")
        broker.kill_all()
    found = timercheck(store)
    assert (found["log_end"], found["queue_offset"]) == (0, 0)


@pytest.fixture
def rocket(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealRocketMQ]:
    peers.require("rocketmq")
    failed = request.session.testsfailed
    with RealRocketMQ(tmp_path_factory.mktemp("jvm")) as running:
        yield running
        if request.session.testsfailed > failed:
            sys.stderr.write(running.said)


@pytest.mark.slow
@pytest.mark.jvm
@pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 300)
def test_rocketmq_delivers_each_pending_timer_once(rocket: RealRocketMQ, tmp_path: Path) -> None:
    """Recalled timers are not delivered. The broker is killed before it writes its files."""
    store = tmp_path / "store"
    with RunningBroker(store, NEVER) as broker, Producer(broker.ready.name_server) as producer:
        with Admin(broker.ready.name_server) as admin:
            admin.create_topic("timed", queues=1)
        sent = [
            producer.send("timed", b"%d" % number, deliver_after=DUE_S) for number in range(COUNT)
        ]
        producer.send("timed", b"last", deliver_after=LAST_S)
        for receipt in sent[:RECALLED]:
            producer.recall(receipt)
        topics = store / "config" / "topics.json"
        until(
            lambda: topics.exists() and b"timed" in topics.read_bytes(),
            says="RocketMQ knows the topic",
        )
        until(lambda: pending(broker) >= COUNT + 1, says="all are in the wheel")
        broker.kill_all()
    rocket.start(store, THEIRS, "timed")
    rocket.consume("g", {"timed": ""})
    found: Counter[str] = Counter()

    def is_over(events: list[dict[str, str]]) -> bool:
        found.clear()
        found.update(base64.b64decode(event["body"]).decode() for event in events)
        return found["last"] > 0

    rocket.wait(is_over)
    rocket.stop()
    is_over(rocket.events)
    assert found == Counter([*map(str, range(RECALLED, COUNT)), "last"])
