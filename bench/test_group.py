"""A group of three replicas beside a broker alone, in turns, all on this machine.

The group is `cometmq cluster init` in a process of its own, with SQLite as its engine; a message is
acknowledged when two of three have it, in memory under ASYNC_FLUSH and on the disk under
SYNC_FLUSH. Three replicas on one machine share its processors and its disk, as replicas on machines
of their own do not: these figures are the least that a group does.

And how soon a follower that was stopped has all that it lacks, beside a bare copy of the same files
through a socket of this machine, while somebody sends to the master.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from benchmarks import Counters, Report
from catching_up import Sends, bare_copy_s, bytes_per_s, tell
from patience import patient

from cometmq import AsyncProducer, Broker, Producer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

TOPIC: Final = "bench"
COMETMQ: Final = (sys.executable, "-m", "cometmq")
BODY: Final = random.Random(7).randbytes(128)
LARGE: Final = random.Random(7).randbytes(1_000)
IN_FLIGHT: Final = 64
END_S: Final = patient(60)

Send = Callable[[str, int], None]  # to the broker at that name server, so many


@contextmanager
def running_group(folder: Path, flush: str) -> Iterator[str]:
    """Its name server; the cluster lies in `folder`."""
    command = [*COMETMQ, "cluster", "init", "--replicas", "3", "--port", "0"]
    command += ["--store", str(folder), "-o", "json", "--set", f"flushDiskType={flush}"]
    log = folder.with_suffix(".log")
    with (
        log.open("wb") as said,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
            start_new_session=True,
        ) as group,
    ):  # fmt: skip
        assert group.stdout is not None
        line = group.stdout.readline()
        assert line, log.read_text()
        try:
            yield json.loads(line)["name_server"]
        finally:
            group.send_signal(signal.SIGINT)
            assert group.wait(END_S) == 0, log.read_text()


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, str]]:
    """How they flush, and the name servers of a broker alone and of a group."""
    flush, folder = request.param, tmp_path_factory.mktemp("group")
    with (
        Broker(folder / "alone", settings={"flushDiskType": flush}) as alone,
        running_group(folder / "group", flush) as group,
    ):
        yield flush, alone.name_server, group


def lingering(name_server: str, count: int) -> None:
    with Producer(name_server, linger_ms=5, timeout_s=patient(60)) as producer:
        for _ in range(count):
            producer.send(TOPIC, BODY)
        producer.flush()


def many(name_server: str, count: int) -> None:
    with Producer(name_server, timeout_s=patient(60)) as producer:
        producer.send_many(TOPIC, [BODY] * count)


def one_in_flight(name_server: str, count: int) -> None:
    with Producer(name_server, timeout_s=patient(60)) as producer:
        for _ in range(count):
            producer.send(TOPIC, BODY)


def in_flight(name_server: str, count: int) -> None:
    async def send() -> None:
        async with AsyncProducer(name_server, timeout_s=patient(60)) as producer:

            async def one() -> None:
                for _ in range(count // IN_FLIGHT):
                    await producer.send(TOPIC, BODY)

            await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))

    asyncio.run(send())


@pytest.mark.parametrize(
    ("send", "most", "few"),
    [
        (one_in_flight, 3_000, 30),
        (in_flight, 64_000, 640),
        (lingering, 500_000, 2_000),
        (many, 1_000_000, 20_000),
    ],
)
def test_group(
    pair: tuple[str, str, str], send: Send, most: int, few: int, full: bool, report: Report
) -> None:
    flush, alone, group = pair
    if full and flush == "SYNC_FLUSH":
        most //= 10
    count = most if full else few
    send(alone, few), send(group, few)
    took: tuple[list[float], list[float]] = [], []
    for _ in range(5 if full else 1):
        for name_server, times in ((alone, took[0]), (group, took[1])):
            began = time.perf_counter()
            send(name_server, count)
            times.append(time.perf_counter() - began)
    one, three = map(statistics.median, took)
    name = f"{send.__name__}, {flush}"
    if send is one_in_flight:
        report(f"{name}: alone", one / count * 1e6, "us")
        report(f"{name}: group", three / count * 1e6, "us")
    else:
        report(f"{name}: alone", count / one / 1e3, "k/s")
        report(f"{name}: group", count / three / 1e3, "k/s")
    report(f"{name}: group, of alone", 100 * one / three, "%")


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("batch_kib", [256, 1_024])  # the default, and four times that
def test_a_producer_that_stays(tmp_path: Path, batch_kib: int, full: bool, report: Report) -> None:
    count, rounds = (1_000_000, 7) if full else (2_000, 1)
    rates = []
    with (
        running_group(tmp_path / "group", "ASYNC_FLUSH") as name_server,
        Producer(
            name_server, linger_ms=5, batch_bytes=batch_kib << 10, timeout_s=patient(60)
        ) as producer,
    ):
        for _ in range(1 + rounds):  # of the first one nothing is warm
            began = time.perf_counter()
            for _ in range(count):
                producer.send(TOPIC, BODY)
            producer.flush()
            rates.append(count / (time.perf_counter() - began))
    name = f"lingering, batches of {batch_kib} KiB"
    report(f"{name}: median of rounds", statistics.median(rates[1:]) / 1e3, "k/s")
    report(f"{name}: best round", max(rates[1:]) / 1e3, "k/s")


# --- a follower that was away ---


def replicas_of(folder: Path) -> dict[str, dict[str, Any]]:
    command = [*COMETMQ, "cluster", "status", "--store", str(folder), "-o", "json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {each["name"]: each for each in found["replicas"]}


def one_that(folder: Path, role: str) -> dict[str, Any]:
    return next(each for each in replicas_of(folder).values() if each["role"] == role)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A broker with all its processes."""
    broker = psutil.Process(pid)
    processes = [broker, *broker.children(recursive=True)]
    for each in processes:
        each.suspend()
    try:
        yield
    finally:
        for each in processes:
            each.resume()


def wait_left_out(folder: Path, name: str) -> None:
    deadline = time.monotonic() + END_S
    while replicas_of(folder)[name]["in_sync"]:
        assert time.monotonic() < deadline, "it was not left out"


def test_catch_up(tmp_path: Path, full: bool, report: Report) -> None:
    folder, count = tmp_path / "group", 10_000_000 if full else 20_000
    with (
        running_group(folder, "ASYNC_FLUSH") as name_server,
        Producer(name_server, timeout_s=patient(60)) as producer,
    ):
        producer.send(TOPIC, LARGE)
        master, follower = one_that(folder, "master"), one_that(folder, "follower")
        store = folder / master["name"] / "store"
        wrote = Counters(store).wrote
        has = Counters(folder / follower["name"] / "store").flushed
        begin = has.value
        with stopped(follower["pid"]):
            wait_left_out(folder, follower["name"])
            for _ in range(count // 20_000):
                producer.send_many(TOPIC, [LARGE] * 20_000)
            end = wrote.value
            with Sends(producer) as beside:
                bare_s = bare_copy_s(store, end, tmp_path / "copy")
            with Sends(producer) as before:
                time.sleep(3.0 if full else 0.3)  # of quiet
            sends = ExitStack()
            during = sends.enter_context(Sends(producer))
        with sends:
            rate = bytes_per_s(has, begin, end)
    tell(report, rate, end / bare_s, before, beside, during)
