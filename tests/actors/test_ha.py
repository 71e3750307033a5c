"""The master's side of replication: what slaves are sent, and what their words are worth."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli_process import json_of, output_of
from family import RunningBroker
from patience import patient
from ports import free_ports
from scripted_slave import ScriptedSlave, log_bytes

from cometmq.cli.stat_replication import slaves_text
from cometmq.shm.live.control import Counter

FAST = {"haSendHeartbeatInterval": 200, "haHousekeepingInterval": 2_000}


def master(store: Path, **settings: object) -> RunningBroker:
    port = free_ports()
    broker = RunningBroker(store, {"haListenPort": port, **FAST, **settings})
    broker.create_topic("orders", 4)
    return broker


def port_of(broker: RunningBroker) -> int:
    return int(broker.settings["haListenPort"])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with master(tmp_path / "store") as broker:
        yield broker


def wait_log(broker: RunningBroker, pattern: str) -> str:
    deadline = time.monotonic() + patient(30)
    while not (found := re.search(pattern, broker.log)):
        assert time.monotonic() < deadline, f"{pattern!r} is not in:\n{broker.log}"
        time.sleep(0.01)
    return found[0]


def wait_counter(broker: RunningBroker, counter: Counter, wanted: int) -> None:
    deadline = time.monotonic() + patient(30)
    while broker.counter(counter) != wanted:
        assert time.monotonic() < deadline, (counter, broker.counter(counter), wanted, broker.log)
        time.sleep(0.002)


def load(broker: RunningBroker, batches: int, count: int = 50, size: int = 1_000) -> int:
    """Send so much; where the log ends."""
    for number in range(batches):
        broker.send("orders", number % 4, [bytes([number % 251]) * size] * count)
    return broker.counter(Counter.WROTE)


# --- the log ---


def test_a_lone_broker_has_no_such_process(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        assert "ha" not in broker.pids()


def test_an_empty_slave_gets_a_whole_copy(broker: RunningBroker) -> None:
    end = load(broker, 60)  # some segments of 1 MiB
    assert end > 2 << 20
    with ScriptedSlave(port_of(broker)) as slave:
        slave.report(0)
        slave.follow(end)
        assert slave.begin == 0
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        wait_counter(broker, Counter.REPLICATED, slave.end)
        for offset, size in slave.frames:  # none goes across the end of a segment
            assert size == 0 or offset >> 20 == (offset + size - 1) >> 20
        end = load(broker, 1)
        slave.follow(end)
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        assert broker.counter(Counter.SLAVES) == 1
    wait_counter(broker, Counter.SLAVES, 0)
    wait_log(broker, "is lost: it has closed the connection; it has acknowledged the log up to")


def test_frames_end_behind_whole_records_and_large_ones_are_cut(tmp_path: Path) -> None:
    """So a slave's log ends where a later connection goes on, wherever its first one broke."""
    with master(tmp_path / "store", haTransferBatchSize=4_096) as broker:
        load(broker, 4, count=3, size=1_500)
        broker.send("orders", 0, [b"large" * 4_000])
        end = load(broker, 2, count=3, size=1_500)
        with ScriptedSlave(port_of(broker)) as slave:
            slave.report(0)
            slave.follow(end)
            frames = [frame for frame in slave.frames if frame[1]]
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        cuts = [offset + size for offset, size in frames[:-1]]
        for cut in cuts:
            copy = bytes(slave.copy[:cut])
            with ScriptedSlave(port_of(broker), copy) as again:
                again.report()
                again.follow(end)
                assert again.copy[: len(slave.copy)] == slave.copy
                assert again.frames[0][0] == cut
        with ScriptedSlave(port_of(broker)) as other:
            other.report(cuts[0] + 1)
            other.wait_closed()
        wait_log(broker, f"its log ends at {cuts[0] + 1}, and no record of ours begins at")


def test_a_segment_is_passed_on_with_its_blank(broker: RunningBroker) -> None:
    """Also a message for which another segment had to be begun."""
    with ScriptedSlave(port_of(broker)) as slave:
        slave.report(0)
        for _ in range(7):
            broker.send("orders", 0, [b"x" * 200_000])
            slave.follow(broker.counter(Counter.WROTE))
        assert slave.end > 1 << 20
        assert slave.copy == log_bytes(broker.store, 0, slave.end)


@pytest.mark.slow
def test_idle_slaves_hear_heartbeats_and_silent_ones_are_let_go(broker: RunningBroker) -> None:
    began = time.monotonic()
    with ScriptedSlave(port_of(broker)) as silent, ScriptedSlave(port_of(broker)) as slave:
        slave.report(0)
        slave.follow(broker.counter(Counter.WROTE))
        while len(slave.frames) < 20:
            offset, size = slave.read_frame()
            if size == 0:
                assert offset == slave.end
                slave.report()
        silent.wait_closed()
        assert time.monotonic() - began >= 2
        assert broker.statistics("ha")["slaves"] == 1
        slave.wait_closed()  # as it now says nothing either
    wait_log(broker, f"slave {slave.address} is lost: it has reported nothing for")


# --- what is no slave ---


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([0, 1 << 40], r"it acknowledges 1099511627776, and was sent the log up to \d+"),
        ([0, "end", 100], r"it reports 100, after \d+: a slave's log does not get shorter"),
        ([1 << 50], r"its log ends at 1125899906842624, and ours at \d+ already"),
        ([-5], r"its log ends at -5, and that is no place in a log"),
        ([0x474554202F204854], r"its log ends at \d+, and ours at \d+ already"),  # GET / HT
        ([77], r"its log ends at 77, and no record of ours begins at 77"),
    ],
)
def test_what_no_slave_says_is_never_an_acknowledgement(
    broker: RunningBroker, reports: list[int | str], said: str
) -> None:
    end = load(broker, 1)
    replicated = broker.counter(Counter.REPLICATED)
    with ScriptedSlave(port_of(broker)) as slave:
        for report in reports:
            if report == "end":
                slave.follow(end)
                wait_counter(broker, Counter.REPLICATED, slave.end)
                replicated = slave.end
            else:
                assert isinstance(report, int)
                slave.report(report)
        slave.wait_closed()
    wait_log(broker, f"slave {slave.address} is refused: {said}")
    assert broker.counter(Counter.REPLICATED) == replicated
    assert broker.statistics("ha")["slaves_refused"] == 1


def test_what_it_had_before_counts_only_with_something_that_it_was_sent(
    broker: RunningBroker,
) -> None:
    """apache/rocketmq#3015: whoever came and sent a number was believed."""
    end = load(broker, 1)
    copy = log_bytes(broker.store, 0, end)
    with ScriptedSlave(port_of(broker), copy) as slave:
        slave.report()
        slave.report()
        slave.read_frame()  # a heartbeat
        assert broker.counter(Counter.REPLICATED) == 0
        assert broker.statistics("ha")["slaves"] == 1
        end = load(broker, 1)
        slave.follow(end)
        wait_counter(broker, Counter.REPLICATED, slave.end)


def test_half_a_report_is_no_report(broker: RunningBroker) -> None:
    end = load(broker, 1)
    with ScriptedSlave(port_of(broker)) as slave:
        for _ in range(7):
            slave.socket.sendall(b"\0")
        broker.statistics("ha")
        assert broker.statistics("ha")["slaves"] == 0
        slave.socket.sendall(b"\0" + end.to_bytes(8, "big")[:5])
        slave.follow(end, acknowledge=False)
        assert broker.counter(Counter.REPLICATED) == 0
        slave.socket.sendall(end.to_bytes(8, "big")[5:])
        wait_counter(broker, Counter.REPLICATED, end)


def test_a_log_that_was_ahead_is_remembered(broker: RunningBroker) -> None:
    """A slave that has what a power cut took from its master comes again and again with the same
    log, until ours is as long."""
    end = load(broker, 1)
    record = len(log_bytes(broker.store, 0, end)) // 50
    ahead = end + 10 * record
    for _ in range(2):
        with ScriptedSlave(port_of(broker)) as slave:
            slave.report(ahead)
            slave.wait_closed()
    while broker.counter(Counter.WROTE) <= ahead:
        load(broker, 1)
    with ScriptedSlave(port_of(broker)) as slave:
        slave.report(ahead)
        slave.wait_closed()
    wait_log(broker, f"its log ends at {ahead}, and it was ahead of ours when it came before")


def test_strangers_are_sent_away(tmp_path: Path) -> None:
    with (
        master(tmp_path / "store", haAllowedPeers="10.0.0.0/8;127.0.0.9") as broker,
        ScriptedSlave(port_of(broker)) as stranger,
    ):
        stranger.report(0)
        stranger.wait_closed()
        wait_log(broker, r"127.0.0.1:\d+ is no slave of ours and was sent away: haAllowedPeers")
        for _ in range(50):
            with ScriptedSlave(port_of(broker)) as stranger:
                stranger.wait_closed()
        assert broker.log.count("is no slave of ours") == 1
        assert broker.statistics("ha")["slaves_not_admitted"] == 51
        assert broker.counter(Counter.REPLICATED) == 0


@pytest.mark.slow
def test_ten_thousand_connections(broker: RunningBroker) -> None:
    """Those that say nothing make room for others; a slave is served all the while."""
    with ScriptedSlave(port_of(broker)) as slave:
        slave.report(0)
        slave.follow(broker.counter(Counter.WROTE))
        slave.follow_on()
        crowd: list[ScriptedSlave] = []
        try:
            for number in range(10_000):
                crowd.append(ScriptedSlave(port_of(broker)))
                if len(crowd) > 200:
                    crowd.pop(0).close()
                if number % 1_000 == 0:
                    slave.wait_end(load(broker, 1, count=2))
            end = load(broker, 1)
            slave.wait_end(end)
        finally:
            for each in crowd:
                each.close()
        wait_counter(broker, Counter.REPLICATED, slave.end)
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        assert broker.statistics("ha")["connections"] <= 64
        assert broker.statistics("ha")["slaves"] == 1


# --- slow ones ---


def test_a_slave_that_never_reads_disturbs_nobody(broker: RunningBroker) -> None:
    with ScriptedSlave(port_of(broker)) as lazy, ScriptedSlave(port_of(broker)) as slave:
        lazy.report(0)
        slave.report(0)
        slave.follow_on()
        for _ in range(3):
            end = load(broker, 100)
            slave.wait_end(end)
            lazy.report(0)  # that is all that it does
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        memory = [
            process.memory_info().rss
            for process in broker.processes()
            if process.pid == broker.pids()["ha"]
        ]
        assert memory[0] < 200 << 20
        lazy.follow(end, acknowledge=False)  # it reads at last, and all is there
        assert lazy.copy[: len(slave.copy)] == slave.copy


# --- kills ---


def test_killed_processes_and_a_load_leave_one_log(tmp_path: Path) -> None:
    """`ha`, the writer and the whole broker are killed; the copy is the log, byte for byte."""
    with master(tmp_path / "store") as broker:
        copy = b""
        for role in ("ha", "commitlog", "ha", "flush", "dispatcher", "ha"):
            with ScriptedSlave(port_of(broker), copy) as slave:
                slave.report()
                slave.follow_on()
                load(broker, 20)
                broker.kill(role)
                end = load(broker, 20)
                if role != "ha":
                    slave.wait_end(end)
            copy = bytes(slave.copy)
            assert copy == log_bytes(broker.store, 0, len(copy))
        with ScriptedSlave(port_of(broker), copy) as slave:
            slave.report()
            slave.follow_on()
            slave.wait_end(end)
            replicated = broker.counter(Counter.REPLICATED)
            assert replicated <= broker.counter(Counter.WROTE)
            broker.kill_all()
        copy = bytes(slave.copy)
        settings = {key: broker.settings[key] for key in ("haListenPort", *FAST)}
    with RunningBroker(tmp_path / "store", settings) as broker:
        with ScriptedSlave(port_of(broker), copy) as slave:
            slave.report()
            slave.follow(load(broker, 20))
        assert slave.copy == log_bytes(broker.store, 0, slave.end)


def test_an_orderly_end_gives_slaves_all_of_it(broker: RunningBroker) -> None:
    with ScriptedSlave(port_of(broker)) as slave:
        slave.report(0)
        slave.follow_on()
        load(broker, 100)
        broker.close()
        slave.wait_ended()
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        assert not log_bytes(broker.store, slave.end).strip(b"\0")


# --- how fast ---

# A scripted slave is silent until a frame has come whole.
SLOW = {
    "haFlowControlEnable": True,
    "maxHaTransferByteInSecond": 1_000_000,
    "haHousekeepingInterval": 60_000,
}


def test_a_limit_is_kept_for_each_slave(tmp_path: Path) -> None:
    with master(tmp_path / "store", **SLOW) as broker:
        end = load(broker, 30)
        with ScriptedSlave(port_of(broker)) as slave, ScriptedSlave(port_of(broker)) as other:
            began = time.monotonic()
            for each in (slave, other):
                each.report(0)
                each.follow_on()
            for each in (slave, other):
                each.wait_end(end)
            assert time.monotonic() - began >= (end - 10_000) / 1e6 - 0.01
            end = load(broker, 1)
            for each in (slave, other):
                each.wait_end(end)
                assert each.copy == log_bytes(broker.store, 0, each.end)
            wait_counter(broker, Counter.REPLICATED, end)


def test_without_flow_control_there_is_no_limit(tmp_path: Path) -> None:
    with master(tmp_path / "store", maxHaTransferByteInSecond=1) as broker:
        end = load(broker, 30)
        with ScriptedSlave(port_of(broker)) as slave:
            slave.report(0)
            slave.follow(end)
            assert slave.copy == log_bytes(broker.store, 0, slave.end)


def test_a_limit_holds_to_an_orderly_end(tmp_path: Path) -> None:
    with master(tmp_path / "store", **SLOW) as broker, ScriptedSlave(port_of(broker)) as slave:
        began = time.monotonic()
        slave.report(0)
        slave.follow_on()
        end = load(broker, 3)  # 17 bursts, for which there are three seconds at an end
        broker.close()
        slave.wait_ended()
        assert time.monotonic() - began >= (end - 10_000) / 1e6 - 0.01
        assert slave.copy == log_bytes(broker.store, 0, slave.end)
        assert slave.end >= end


@pytest.mark.parametrize("bytes_per_s", [1, 100])
def test_a_limit_of_a_few_bytes_disturbs_nobody(tmp_path: Path, bytes_per_s: int) -> None:
    limit = {**SLOW, "maxHaTransferByteInSecond": bytes_per_s}
    with master(tmp_path / "store", **limit) as broker, ScriptedSlave(port_of(broker)) as slave:
        began = time.monotonic()
        slave.report(0)
        slave.follow_on()
        wait_log(broker, "slave .* is connected")
        process = psutil.Process(broker.pids()["ha"])
        before = sum(process.cpu_times()[:2])
        for _ in range(20):
            load(broker, 20)
            assert broker.statistics("ha")["slaves"] == 1
        took_s = sum(process.cpu_times()[:2]) - before
        assert took_s < 1, "it has spun"
        came = slave.end
        assert came <= (time.monotonic() - began) * bytes_per_s + 2


def test_descriptors_and_maps_do_not_grow(broker: RunningBroker) -> None:
    process = psutil.Process(broker.pids()["ha"])

    def count() -> tuple[int, int]:
        return process.num_fds(), sum(
            "commitlog" in each.path for each in process.memory_maps(grouped=False)
        )

    def serve() -> None:
        end = load(broker, 50)
        with ScriptedSlave(port_of(broker)) as slave:
            slave.report(0)
            slave.follow(end)
        wait_counter(broker, Counter.SLAVES, 0)

    serve()
    before = count()
    for _ in range(5):
        serve()
    assert count() == before


# --- for people ---


def test_stat_shows_slaves(broker: RunningBroker) -> None:
    with ScriptedSlave(port_of(broker)) as slave:
        slave.report(0)
        slave.follow_on()
        slave.wait_end(load(broker, 3))
        wait_counter(broker, Counter.REPLICATED, slave.end)
        shown = json_of("stat", "--store", str(broker.store), "--json")
        assert shown["counters"]["replicated"] == slave.end
        found = shown["replication"]
        assert found["slaves_in_sync"] == found["slaves_connected"] == 1
        assert found["slaves_lost"] == found["slaves_refused"] == found["slaves_not_admitted"] == 0
        seen = found["slaves"][slave.address]
        assert seen["acknowledged"] == slave.end
        assert seen["lag_bytes"] == 0
        assert abs(seen["since_ms"] / 1000 - time.time()) < 60
        text = output_of("stat", "--store", str(broker.store)).decode()
        assert f"replication.slaves.{slave.address}.acknowledged\t{slave.end}" in text


def test_the_page_of_a_terminal() -> None:
    slave = {"address": "10.0.0.7:4711", "acknowledged": 1_000, "lag_bytes": 24, "since_ms": 0}
    assert re.fullmatch(
        r"10\.0\.0\.7:4711 at 1,000, 24 bytes behind since 19(70|69)-\d\d-\d\d \d\d:\d\d:\d\d",
        slaves_text([slave]),
    )
    assert slaves_text([]) == "none is connected"
