"""Transactions: commits with 64 in flight, of one process and of three, and one after the other
beside plain sends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from benchmarks import Report, median_s
from loads import BODY, commit_all

from cometmq import AsyncProducer, Broker

IN_FLIGHT = 64
PROCESSES = 3


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("transactions") / "store") as running:
        yield running


async def commit_when_told(server: str, in_flight: int, each: int) -> None:
    """The work of one of several processes, which begin together."""
    async with AsyncProducer(server, name="bench") as producer:
        await commit_all(producer, "t", in_flight, 1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await commit_all(producer, "t", in_flight, each)


def test_64_in_flight(broker: Broker, full: bool, report: Report) -> None:
    each = 400 if full else 20

    async def work() -> None:
        async with broker.async_producer(name="bench") as producer:
            await commit_all(producer, "t", IN_FLIGHT, each)

    median = median_s(lambda: asyncio.run(work()), 3)
    report("64 in flight", IN_FLIGHT * each / median / 1000, "k commits/s")


def test_of_several_processes(broker: Broker, full: bool, report: Report) -> None:
    each, in_flight = 800 if full else 20, IN_FLIGHT // PROCESSES
    command = [sys.executable, __file__, broker.name_server, str(in_flight), str(each)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    began = time.monotonic()
    for worker in workers:
        worker.communicate("go\n")
    took_s = time.monotonic() - began
    assert [worker.returncode for worker in workers] == [0] * PROCESSES
    report(f"of {PROCESSES} processes", PROCESSES * in_flight * each / took_s / 1000, "k commits/s")


def test_one_in_flight(broker: Broker, full: bool, report: Report) -> None:
    count = 2_000 if full else 100
    with broker.producer(name="bench") as producer:

        def commit() -> None:
            for _ in range(count):
                with producer.transaction("t", BODY):
                    pass

        def send() -> None:
            for _ in range(count):
                producer.send("t", BODY)

        commits_s, sends_s = median_s(commit, 5), median_s(send, 5)
    report("one in flight", commits_s / count * 1e6, "us a commit")
    report("beside a plain send", commits_s / sends_s, "times as long")


if __name__ == "__main__":
    asyncio.run(commit_when_told(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
