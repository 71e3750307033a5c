"""A group of three replicas beside a broker alone, in turns, all on this machine.

The group is `cometmq cluster init` in a process of its own, with SQLite as its engine; a message is
acknowledged when two of three have it, in memory under ASYNC_FLUSH and on the disk under
SYNC_FLUSH. Three replicas on one machine share its processors and its disk, as replicas on machines
of their own do not: these figures are the least that a group does.
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
from typing import Final

import pytest
from benchmarks import Report

from cometmq import AsyncProducer, Broker, Producer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

TOPIC: Final = "bench"
BODY: Final = random.Random(7).randbytes(128)
IN_FLIGHT: Final = 64
END_S: Final = 60

Send = Callable[[str, int], None]  # to the broker at that name server, so many


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, str]]:
    """How they flush, and the name servers of a broker alone and of a group."""
    flush, folder = request.param, tmp_path_factory.mktemp("group")
    command = [sys.executable, "-m", "cometmq", "cluster", "init", "--replicas", "3", "--port", "0"]
    command += ["--store", str(folder / "group"), "-o", "json", "--set", f"flushDiskType={flush}"]
    log = folder / "group.log"
    with (
        log.open("wb") as said,
        Broker(folder / "alone", settings={"flushDiskType": flush}) as alone,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
            start_new_session=True,
        ) as group,
    ):  # fmt: skip
        assert group.stdout is not None
        line = group.stdout.readline()
        assert line, log.read_text()
        try:
            yield flush, alone.name_server, json.loads(line)["name_server"]
        finally:
            group.send_signal(signal.SIGINT)
            assert group.wait(END_S) == 0, log.read_text()


def lingering(name_server: str, count: int) -> None:
    with Producer(name_server, linger_ms=5, timeout_s=60) as producer:
        for _ in range(count):
            producer.send(TOPIC, BODY)
        producer.flush()


def many(name_server: str, count: int) -> None:
    with Producer(name_server, timeout_s=60) as producer:
        producer.send_many(TOPIC, [BODY] * count)


def one_in_flight(name_server: str, count: int) -> None:
    with Producer(name_server, timeout_s=60) as producer:
        for _ in range(count):
            producer.send(TOPIC, BODY)


def in_flight(name_server: str, count: int) -> None:
    async def send() -> None:
        async with AsyncProducer(name_server, timeout_s=60) as producer:

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
