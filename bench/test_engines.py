"""Engines of a group's record: time of a change, and delay until the end of a session is reported.

Three servers on this machine for etcd. A holder is killed as soon as its session is visible, before
it would renew it.
"""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Iterator

import pytest
from benchmarks import Report
from engine_servers import World, running
from patience import patient

from cometmq.actors.replication.engines.engine import Applied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KILLED_MAX_S = patient(60)


@pytest.fixture(scope="module", params=["sqlite", "etcd"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def test_change(world: World, full: bool, report: Report) -> None:
    """One client, one change after the other, of a record of 300 bytes; then reads."""
    count = 2000 if full else 20
    took, read = [], []
    with world.open() as engine:
        version: int | None = None
        for _ in range(count):
            began = time.perf_counter()
            outcome = engine.cas("bench", version, b"x" * 300)
            took.append(time.perf_counter() - began)
            assert isinstance(outcome, Applied)
            version = outcome.version
        for _ in range(count):
            began = time.perf_counter()
            engine.get("bench")
            read.append(time.perf_counter() - began)
    report("compare-and-set, p50", 1000 * statistics.median(took), "ms")
    report("compare-and-set, p99", 1000 * sorted(took)[count * 99 // 100], "ms")
    report("get, p50", 1000 * statistics.median(read), "ms")


def test_end_of_a_session(world: World, full: bool, report: Report) -> None:
    """From the kill -9 of its holder until another process is woken with it."""
    took = []
    with world.open() as engine:
        watch = engine.watch("ends")
        poller = select.poll()
        poller.register(watch.fileno(), select.POLLIN)
        for _ in range(20 if full else 1):
            with world.child() as child:
                child.ask(do="session", group="ends", broker=1, ttl=world.ttl_s)
                while not ((view := watch.take()) and view.alive):
                    assert poller.poll(KILLED_MAX_S * 1000)
                child.process.kill()
                began = time.perf_counter()
                while (view := watch.take()) is None or view.alive:
                    assert poller.poll(KILLED_MAX_S * 1000)
                took.append(time.perf_counter() - began)
    report(f"session of {world.ttl_s:g} s is over, p50", statistics.median(took), "s")
    report("... at most", max(took), "s")
