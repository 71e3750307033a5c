"""A million messages that wait for their time: what they cost while they wait, at a start after
kill -9, when they are all due at once, and how late they are when they are due over a minute."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks import Report
from patience import patient
from probe_load import probe_until_told
from shared_data import data_path
from test_restart import start_and_kill

from cometmq import Broker
from cometmq.protocol.commands import GetStatistics, Statistics

BODY = b"x" * 100
ROUNDS = 5
LOOK_S = 0.05
PROBED_S = 10.0  # before anything is due
WAIT_S = patient(600.0)
SEED = 20_261_127
LATE_MAX_MS = 100  # of 99 in 100

SPAWN = multiprocessing.get_context("spawn")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]


def scheduler(broker: Broker) -> dict[str, Any]:
    actor = broker.actor("scheduler")
    try:
        answer = actor.ask(GetStatistics(), timeout=WAIT_S)
    finally:
        actor.stop()
    assert isinstance(answer, Statistics)
    return answer.values


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(LOOK_S)


def schedule(broker: Broker, count: int, at: datetime) -> None:
    with broker.producer() as producer:
        producer.send_many("later", [BODY] * count, deliver_at=at)
    wait_until(lambda: scheduler(broker)["timers_pending"] >= count)


def memory_mb(broker: Broker) -> dict[str, float]:
    """Of all processes: their own, and with their share of the files that they have mapped."""
    processes = [psutil.Process(broker.pid)]
    processes += processes[0].children(recursive=True)
    own = sum(_anonymous(process.pid) for process in processes)
    everything = sum(process.memory_full_info().pss for process in processes)
    return {"own": own / 1e6, "with the store's pages": everything / 1e6}


def _anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def test_they_wait(tmp_path: Path, full: bool, report: Report) -> None:
    """Beside a store whose messages wait for nothing, started and killed in turns."""
    count = 1_000_000 if full else 2_000
    stores = {"waiting": tmp_path / "waiting", "plain": tmp_path / "plain"}
    with Broker(stores["waiting"]) as broker:
        schedule(broker, 1, datetime.now(UTC) + timedelta(days=1))
        before = memory_mb(broker)
        schedule(broker, count, datetime.now(UTC) + timedelta(hours=8))
        after = memory_mb(broker)
    for what, mb in after.items():
        report(f"memory more, {what}", mb - before[what], "MB")
    with Broker(stores["plain"]) as broker, broker.producer() as producer:
        producer.send_many("now", [BODY] * count)
    took: dict[str, list[float]] = {what: [] for what in stores}
    for _ in range(ROUNDS if full else 1):
        for what, store in stores.items():
            took[what].append(start_and_kill(store, {}))
    for what, seconds in took.items():
        report(f"start after kill -9, {what}", statistics.median(seconds), "s")
    with Broker(stores["waiting"]) as broker:
        began = time.monotonic()
        wait_until(lambda: scheduler(broker)["timers_pending"] >= count)
        report("until the wheel is there again", time.monotonic() - began, "s")


def test_they_are_due_together(tmp_path: Path, full: bool, report: Report) -> None:
    """Deliveries a second, by the store times of the copies; and how long a plain `send` of another
    process takes meanwhile."""
    count, wait_s = (1_000_000, 60.0) if full else (2_000, 5.0)
    here, there = SPAWN.Pipe()
    with Broker(tmp_path / "store") as broker:
        at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=wait_s)
        due_ms = at.timestamp() * 1000
        schedule(broker, count, at)
        arguments = (broker.name_server, "plain", BODY, there)
        prober = SPAWN.Process(target=probe_until_told, args=arguments)
        prober.start()
        there.close()  # or nobody would be told that it has died
        try:
            here.recv()
            assert not full or time.time() < due_ms / 1000 - PROBED_S, "scheduling took too long"
            wait_until(lambda: scheduler(broker)["timers_delivered"] >= count)
            here.send(None)
            probes: list[tuple[float, float]] = here.recv()
        finally:
            prober.kill()
            prober.join()
        last_ms = _last_stored_ms(broker, count)
    took_s = max(last_ms - due_ms, 1) / 1000
    report("deliveries, all due together", count / took_s / 1000, "k/s")
    assert not full or count / took_s >= 100_000
    before = [took for at_s, took in probes if due_ms - PROBED_S * 1000 < at_s * 1000 < due_ms]
    meanwhile = [took for at_s, took in probes if due_ms <= at_s * 1000 <= last_ms]
    for what, found in ("before", before), ("meanwhile", meanwhile):
        if len(found) > 1:
            for name, share in ("p50", 50), ("p99", 99):
                value = statistics.quantiles(found, n=100, method="inclusive")[share - 1]
                report(f"a plain send, {what}, {name}", value * 1e6, "us")


def test_they_are_due_over_a_minute(tmp_path: Path, full: bool, report: Report) -> None:
    """Log lines, each with a time of its own, sent in any order: each comes once, none early. How
    late they are stored, and come to a consumer."""
    count, ahead_s, over_ms = (1_000_000, 40, 60_000) if full else (2_000, 2, 3_000)
    files = sorted(data_path("loghub").glob("*.log"))
    lines = [line for file in files for line in file.read_bytes().splitlines() if line]
    with Broker(tmp_path / "store") as broker, broker.consumer("looks", "later") as consumer:
        begin = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=ahead_s)
        begin_ms = round(begin.timestamp() * 1000)
        after_ms = [number * over_ms // count for number in range(count)]
        random.Random(SEED).shuffle(after_ms)
        with broker.producer(linger_ms=5) as producer:
            for number, line in zip(range(count), itertools.cycle(lines), strict=False):
                at = begin + timedelta(milliseconds=after_ms[number])
                producer.send("later", line, keys=str(number), deliver_at=at)
        assert not full or time.time() * 1000 < begin_ms, "scheduling took too long"
        stored_late: list[float] = []
        came_late: list[float] = []
        seen: set[int] = set()
        while len(seen) < count:
            messages = consumer.poll(16_384, timeout_s=WAIT_S)
            assert messages, f"{len(seen)} of {count} came"
            now_ms = time.time() * 1000
            for message in messages:
                number = int(message.keys)
                assert number not in seen, f"{number} came twice"
                assert message.body == lines[number % len(lines)]
                seen.add(number)
                due_ms = begin_ms + after_ms[number]
                stored_late.append(message.store_timestamp_ms - due_ms)
                came_late.append(now_ms - due_ms)
            consumer.ack(messages)
    assert min(stored_late) >= 0
    for what, late in ("stored", stored_late), ("handed over", came_late):
        p99 = statistics.quantiles(late, n=100, method="inclusive")[98]
        report(f"late when {what}, p50", statistics.median(late), "ms")
        report(f"late when {what}, p99", p99, "ms")
        report(f"late when {what}, the latest", max(late), "ms")
        assert not full or p99 < LATE_MAX_MS


def _last_stored_ms(broker: Broker, count: int) -> int:
    """Of the copies, all of which must be there."""
    last_ms = found = 0
    with broker.consumer("looks", "later") as consumer:
        while found < count:
            messages = consumer.poll(16_384, timeout_s=WAIT_S)
            found += len(messages)
            last_ms = max(last_ms, *(each.store_timestamp_ms for each in messages))
            consumer.ack(messages)
    return last_ms
