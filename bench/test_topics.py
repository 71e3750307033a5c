"""Many topics: create them, start with them, list them, ask for the route of each.

Small with the tests; with --full 200,000 topics. The memory is what the processes of the broker
have for themselves (USS), all together and the largest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from benchmarks import Report

from cometmq import Broker
from cometmq.client import Admin
from cometmq.client.routes import Routes

MIB = 1 << 20
T = TypeVar("T")


@pytest.mark.timeout(600)
def test_many_topics(tmp_path: Path, full: bool, report: Report) -> None:
    count = 200_000 if full else 2_000
    store, settings = tmp_path / "store", {"maxTopics": count + 10}
    names = [f"topic-{number:06d}" for number in range(count)]
    random.Random(7).shuffle(names)  # as nobody sorts them

    def timed(what: str, act: Callable[[], T]) -> T:
        began = time.perf_counter()
        done = act()
        report(what, time.perf_counter() - began, "s")
        return done

    with Broker(store, settings=settings) as broker, Admin(broker.name_server) as admin:
        memory_of(broker, "empty", report)
        refused = timed(f"create {count} topics", lambda: admin.create_topics(names, 4))
        assert refused == []
        assert len(timed("list them", admin.topics)) >= count
        assert len(timed("list them with what they hold", admin.describe_topics)) >= count
        timed("create one more", lambda: admin.create_topic("one-more"))
        with broker.producer() as producer:
            timed("send to a topic that is not there", lambda: producer.send("another", b"x"))
        memory_of(broker, "with them", report)
    report("config/topics.json", (store / "config" / "topics.json").stat().st_size / MIB, "MiB")
    began = time.perf_counter()
    with Broker(store, settings=settings) as broker, Admin(broker.name_server) as admin:
        report("start with them", time.perf_counter() - began, "s")
        assert set(admin.topics()) >= {*names, "one-more", "another"}
        asked = names[: count // 10]
        routes = Routes(broker.name_server)
        began = time.perf_counter()
        for name in asked:
            assert routes.topic(name).brokers[0].info.write_queues == 4
        took = time.perf_counter() - began
        report("routes, one after the other", len(asked) / took, "1/s")
        routes.close()
        with broker.producer() as producer:
            sent = names[: count // 100]
            began = time.perf_counter()
            for name in sent:
                producer.send(name, b"x")
            took = time.perf_counter() - began
            report("first sends, each to another topic", len(sent) / took, "1/s")
        timed("create one after a start", lambda: admin.create_topic("and-one"))
        memory_of(broker, "after a start", report)


def memory_of(broker: Broker, when: str, report: Report) -> None:
    """What the processes have for themselves."""
    supervisor = psutil.Process(broker.pid)
    used = {
        process.name(): process.memory_full_info().uss / MIB
        for process in supervisor.children(recursive=True)
    }
    report(f"memory {when}", sum(used.values()), "MiB")
    largest = max(used, key=lambda name: used[name])
    report(f"of that {largest}", used[largest], "MiB")
