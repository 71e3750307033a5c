"""A slave and the power: what it has told its master of under SYNC_FLUSH is there after a cut."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from family import RunningBroker
from fault.disk import Disk, need
from scripted_master import Log, ScriptedMaster, log_of, slave_settings

from cometmq.client.sending.producer import Producer
from cometmq.protocol.derived import DERIVED_TOPIC
from cometmq.shm.kernel.codec import decode
from cometmq.shm.live.control import Counter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEGMENT_BYTES = 200_003
SHAPE = {"mappedFileSizeCommitLog": SEGMENT_BYTES, "maxMessageSize": 32 << 10}
CUTS = 4
SEED = 20_261_125


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    store = tmp_path_factory.mktemp("master") / "master"
    chance = random.Random(SEED)
    with RunningBroker(store, {"brokerName": "copied", **SHAPE}) as broker:
        broker.create_topic("orders", 4)
        for number in range(120):
            bodies = [chance.randbytes(chance.randrange(2_000)) for _ in range(20)]
            broker.send("orders", number % 4, bodies)
        end = broker.counter(Counter.WROTE)
    return log_of(store, end, SEGMENT_BYTES)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_of_a_slave(kind: str, log: Log, tmp_path: Path) -> None:
    """Under load, at moments that the number of reports decides; its torn tail is cut, and comes
    again."""
    need(kind, "power cuts of a slave")
    chance = random.Random(SEED)
    size, grown = 0, threading.Event()
    with (
        Disk(tmp_path, kind) as disk,
        ScriptedMaster(Log(b"", segment_bytes=SEGMENT_BYTES), batch_bytes=3_001) as source,
    ):
        store = disk.folder / "slave"
        settings = {**slave_settings(source.address), **SHAPE, "flushDiskType": "SYNC_FLUSH"}
        acknowledged = 0
        for cut in range(1, CUTS + 1):
            source.reports.clear()  # of a machine that was dark
            slave = RunningBroker(store, settings, log_path=tmp_path / "slave.log")
            try:
                assert slave.counter(Counter.WROTE) >= acknowledged
                stored = log_of(store, acknowledged, SEGMENT_BYTES)
                assert stored.content == log.bytes_of(0, acknowledged), f"seed {SEED}, cut {cut}"
                part = len(log.content) * cut // CUTS
                before = acknowledged
                while size < part:
                    size = min(part, size + chance.randrange(1, 40_000))
                    source.grow(Log(log.content[:size], segment_bytes=SEGMENT_BYTES))
                    grown.wait(0.01)
                source.wait_for(
                    lambda before=before, part=part: (
                        max(source.reports) > before + (part - before) // 2
                    )
                )
                acknowledged = max(source.reports)  # told before the cut began
                disk.cut()
            finally:
                slave.kill_all()
                disk.power_on()
        with RunningBroker(store, settings, log_path=tmp_path / "slave.log") as slave:
            assert slave.counter(Counter.WROTE) >= acknowledged
            source.reports.clear()
            source.wait_acknowledged(log.end)
        assert log_of(store, log.end, SEGMENT_BYTES).content == log.content


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Log, int]:
    """A log that ends with a derived write, and where the mark of that begins."""
    store = tmp_path_factory.mktemp("derived") / "master"
    with RunningBroker(store, {"brokerName": "copied", **SHAPE}) as broker:
        broker.create_topic("orders", 1)
        broker.send("orders", 0, [b"first"])
        with Producer(broker.ready.name_server) as producer:
            producer.send("later", b"a delayed one", delay_level=1)
        delivered = [m for queue in range(8) for m in broker.read_queue("later", queue)]
        while not delivered:
            delivered = [m for queue in range(8) for m in broker.read_queue("later", queue, 0)]
        end = delivered[0].physical_offset + delivered[0].size
    content = log_of(store, end, SEGMENT_BYTES)
    marks = [m for m in decode(content.content) if m.topic == DERIVED_TOPIC]
    mark = marks[-1].physical_offset
    assert decode(content.bytes_of(mark, end))[-1].body == b"a delayed one"
    return content, mark


def test_half_of_a_derived_write(derived: tuple[Log, int], tmp_path: Path) -> None:
    """A slave keeps it, whatever ends it: it has told its master of it. Who becomes a master cuts
    it, and makes it again."""
    whole, mark = derived
    (first,) = decode(whole.bytes_of(mark, whole.end))[:1]
    torn = Log(whole.bytes_of(0, mark + first.size), segment_bytes=SEGMENT_BYTES)
    store = tmp_path / "slave"
    for end in ("killed", "orderly", "killed without counters", "orderly"):
        with ScriptedMaster(torn) as source:
            slave = RunningBroker(store, {**slave_settings(source.address), **SHAPE})
            source.wait_acknowledged(torn.end)
            assert slave.counter(Counter.WROTE) == torn.end
            if end == "orderly":
                slave.close()
            else:
                slave.kill_all()
                if end != "killed":
                    (store / "cometmq.control").unlink()
    for _ in range(2):
        with RunningBroker(store, {"brokerName": "copied", **SHAPE}) as broker:
            bodies = [m.body for queue in range(8) for m in broker.read_queue("later", queue)]
            while not bodies:
                bodies = [m.body for queue in range(8) for m in broker.read_queue("later", queue)]
            assert bodies == [b"a delayed one"]
