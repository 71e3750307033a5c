"""More queues than a process may have descriptors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from family import MARK, RUN, RunningBroker, encode_batch
from paths import KIT, SEARCH
from patience import patient

from cometmq import Consumer
from cometmq.protocol.commands import Section, SendMessages, SendResult
from cometmq.shm.kernel.codec import file_maps
from cometmq.shm.live.control import Counter
from cometmq.shm.os import files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOPICS = [f"wide-{number}" for number in range(5)]
QUEUES = 4_000  # of each
ALL = len(TOPICS) * QUEUES
MANY = 1_000  # sections of a command
WAIT_S = patient(120)


def send_to_all(broker: RunningBroker) -> None:
    body = encode_batch([b"one"])
    for topic in TOPICS:
        for first in range(0, QUEUES, MANY):
            sections = [Section(topic, queue_id, 1) for queue_id in range(first, first + MANY)]
            answer, _ = broker.commitlog.ask(
                SendMessages(sections, 0), [body] * MANY, timeout_s=patient(60)
            )
            assert isinstance(answer, SendResult)
            assert not any(result.code for result in answer.results)


def wait_dispatched(broker: RunningBroker) -> None:
    deadline = time.monotonic() + WAIT_S
    while broker.counter(Counter.DISPATCHED) < broker.counter(Counter.WROTE):
        assert time.monotonic() < deadline, broker.log[-4000:]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """Twenty thousand queues with two messages each; no process of it may have more descriptors."""
    settings = {"mappedFileSizeCommitLog": 64 << 20, "mappedFileSizeConsumeQueue": 20_000}
    environ = {"PYTHONPATH": SEARCH}
    store = tmp_path_factory.mktemp("many") / "store"
    broker = RunningBroker(store, settings, environ=environ, module="narrow_broker")
    try:
        for topic in TOPICS:
            broker.create_topic(topic, QUEUES)
        for _ in range(2):
            send_to_all(broker)
            wait_dispatched(broker)
        yield broker
    finally:
        broker.kill_all()  # in order it would sync twenty thousand files


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_one_consumer_reads_them_all(broker: RunningBroker, transport: str) -> None:
    arguments = [broker.ready.name_server, transport, str(2 * ALL), *TOPICS]
    done = subprocess.run(
        [sys.executable, str(KIT / "narrow_consumer.py"), *arguments],
        env={**os.environ, MARK: f"{RUN}/many"}, capture_output=True, text=True,
        timeout=patient(600),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + broker.log[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["came"], found["queues"]) == (2 * ALL, ALL), found
    assert found["descriptors"] < 100
    assert (found["maps"] >= ALL) == (transport == "mapped")
    assert "Too many open files" not in broker.log, broker.log[-4000:]
    assert broker.statistics()["restarts"] == 0
    for role in ("dispatcher", "reader-0", "commitlog"):
        process = psutil.Process(broker.pids()[role])
        assert process.rlimit(psutil.RLIMIT_NOFILE)[1] == 1_024
        assert process.num_fds() < 200


MAPS_MAX = 64


def maps_of(pid: int, store: Path) -> int:
    """Segments that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    folders = (str(store / "consumequeue"), str(store / "commitlog"))
    return sum(line.partition("/")[2] != "" and any(each in line for each in folders)
               for line in lines)  # fmt: skip


def test_segments_are_let_go_before_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues and segments of the log are several times what a process may have mapped."""
    monkeypatch.setattr(files, "FILE_MAPS_MAX", MAPS_MAX)
    store = tmp_path / "store"
    settings = {"mappedFileSizeCommitLog": 65_537, "maxMessageSize": 16_384}
    environ = {"PYTHONPATH": SEARCH, "MAPS_MAX": str(MAPS_MAX)}
    queues, turns = 300, 5
    with RunningBroker(store, settings, environ=environ, module="narrow_broker") as broker:
        broker.create_topic("t", queues)
        sent = []
        for turn in range(turns):
            for queue_id in range(queues):
                sent += broker.send("t", queue_id, [b"%d %d" % (turn, queue_id) + bytes(8_000)])
        wait_dispatched(broker)
        assert broker.counter(Counter.WROTE) > 2 * MAPS_MAX * 65_537
        assert maps_of(broker.pids()["dispatcher"], store) <= MAPS_MAX + 2
        wanted = sorted((one.queue_id, one.queue_offset, one.body) for one in sent)
        for transport in ("mapped", "zmq"):
            found = []
            with Consumer(
                broker.ready.name_server, transport, "t", transport=transport, start="earliest"
            ) as consumer:
                deadline = time.monotonic() + WAIT_S
                while len(found) < len(sent):
                    assert time.monotonic() < deadline, f"{len(found)} of {len(sent)} came"
                    messages = consumer.poll(100, 1)
                    found += [(one.queue_id, one.queue_offset, one.body) for one in messages]
                    assert file_maps() <= MAPS_MAX + 2
            assert sorted(found) == wanted
        assert maps_of(broker.pids()["reader-0"], store) <= MAPS_MAX + 2
        assert maps_of(broker.pids()["dispatcher"], store) <= MAPS_MAX + 2
        assert "Traceback" not in broker.log, broker.log
        assert broker.statistics()["restarts"] == 0
