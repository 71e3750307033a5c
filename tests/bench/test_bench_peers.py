"""Other brokers under the harness: started, sent to in every way, read whole, and gone."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from interop import peers
from jvm import QUICK
from patience import patient

from cometmq.bench import histograms
from cometmq.bench.crew import Crew
from cometmq.bench.extra import BenchError
from cometmq.bench.peers import fetch, maven, server
from cometmq.bench.peers.nats import Nats
from cometmq.bench.peers.redis import Redis
from cometmq.bench.peers.rocketmq import RocketMQ
from cometmq.bench.systems import Durability, System
from cometmq.bench.worker import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(maven.FETCH_TIMEOUT_S + 120)]

MANY = 4_000
FEW = 1_000  # one in flight, and open loop
RATE = 1_000.0
SEED = 7
ANSWER_S = patient(60.0)
MODES = ("one_in_flight", "async", "batch")
_topics = count(1)


@pytest.fixture(scope="module", autouse=True)
def _short_lived_jvms() -> Iterator[None]:
    """They are not here to be fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", " ".join(QUICK))
        yield


def jvm(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.jvm)


@pytest.fixture(scope="module", params=["redis", "nats", jvm("kafka"), jvm("rocketmq")])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A peer that serves; nothing of it is left afterwards."""
    system = peers.require(request.param)
    if isinstance(system, RocketMQ):
        system.settings.update(peers.ROCKETMQ_IN_SHORT)
    try:
        system.start(tmp_path_factory.mktemp(system.name), Durability.PAGE_CACHE)
        pids = system.processes()
        assert pids
        assert all(map(psutil.pid_exists, pids))
        only_on_loopback(system)
        yield system
    finally:
        system.stop()
    assert system.processes() == []
    assert not any(map(psutil.pid_exists, pids))


def only_on_loopback(system: System) -> None:
    """RocketMQ's replication cannot be bound to one address."""
    listening = [
        connection.laddr
        for pid in system.processes()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    elsewhere = [at for at in listening if at.ip.removeprefix("::ffff:") != server.LOOPBACK]
    assert len(elsewhere) <= (system.name == "rocketmq"), elsewhere


def new_topic(system: System, queues: int = 1) -> str:
    topic = f"peers-{next(_topics)}"
    system.create(topic, queues)
    return topic


def produce(crew: Crew, system: System, client: str, **given: Any) -> dict[str, Any]:
    job = Job(role="produce", endpoint=system.endpoint(), seed=SEED, **given)
    worker = crew.start(system.command(client), job)
    worker.wait_ready()
    worker.go()
    result = worker.result(ANSWER_S)
    assert result["acked"] == job.messages, result
    assert result["failed"] == 0
    assert result["seconds"] > 0
    assert result["client"]
    return result


def consume(crew: Crew, system: System, client: str, **given: Any) -> dict[str, Any]:
    job = Job(role="consume", endpoint=system.endpoint(), **{"seed": SEED, **given})
    worker = crew.start(system.command(client), job)
    worker.wait_ready()
    worker.go()
    return worker.result(ANSWER_S)


def assert_all(result: dict[str, Any], expect: int, *, ordered: bool = True) -> None:
    wrong = {key: result[key] for key in ("bad_crc", "lost", "duplicates")}
    assert wrong == {"bad_crc": 0, "lost": 0, "duplicates": 0}
    assert result["received"] == result["distinct"] == expect
    assert result["out_of_order"] == 0 or not ordered


def test_every_way_of_sending_is_read_whole(running: System, tmp_path: Path) -> None:
    """All clients send, each reads what all have sent: stamps are the same in all languages."""
    topic = new_topic(running, queues=4)
    numbers = count()
    expect = 0
    with Crew(tmp_path) as crew:
        for client in running.clients:
            for mode in MODES:
                messages = FEW if mode == "one_in_flight" else MANY
                produce(
                    crew, running, client, topics=[topic], queues=4, producer=next(numbers),
                    mode=mode, messages=messages, warmup=256, hlog=str(tmp_path / mode),
                    options={"spread": 1},
                )  # fmt: skip
                assert (tmp_path / f"{mode}.service.hlog").exists() == (mode == "one_in_flight")
                expect += messages + 256
        for client in running.clients:
            result = consume(
                crew, running, client, topics=[topic], queues=4, group=f"all-{client}",
                expect=expect, timeout_s=patient(20),
            )  # fmt: skip
            assert_all(result, expect, ordered=not hasattr(running, "unordered"))


def test_open_loop_has_all_latencies(running: System, tmp_path: Path) -> None:
    """The consumer is there first; the warm-up is in no histogram."""
    for client in running.clients:
        topic, expect = new_topic(running), FEW + 100
        with Crew(tmp_path) as crew:
            job = Job(
                role="consume", endpoint=running.endpoint(), topics=[topic], group=f"loop-{client}",
                expect=expect, seed=SEED, timeout_s=patient(20), hlog=str(tmp_path / "read"),
                options={"skip": 100, "verify": "inline"},
            )  # fmt: skip
            reader = crew.start(running.command(client), job)
            reader.wait_ready()
            reader.go()
            sent = produce(
                crew, running, client, topics=[topic], messages=FEW, warmup=100, rate=RATE,
                hlog=str(tmp_path / "sent"),
            )  # fmt: skip
            read = reader.result(ANSWER_S)
        assert_all(read, expect, ordered=not hasattr(running, "unordered"))
        service, response, whole = (
            histograms.read(Path(path))
            for path in (sent["service_hlog"], sent["response_hlog"], read["hlog"])
        )
        assert {each.get_total_count() for each in (service, response, whole)} == {FEW}
        assert response.get_mean_value() >= service.get_mean_value()
        assert whole.get_min_value() > 1000  # a microsecond: the clocks are one


def test_two_members_share_a_group(running: System, tmp_path: Path) -> None:
    client, topic = running.clients[0], new_topic(running, queues=4)
    with Crew(tmp_path) as crew:
        produce(crew, running, client, topics=[topic], queues=4, mode="batch", messages=MANY)
        members = []
        for _ in range(2):
            job = Job(
                role="consume", endpoint=running.endpoint(), topics=[topic], queues=4, group="two",
                expect=1 << 62, seed=SEED, options={"shared": 1},
            )  # fmt: skip
            members.append(crew.start(running.command(client), job))
        for worker in members:
            worker.wait_ready()
        for worker in members:
            worker.go()
        while sum(worker.progress for worker in members) < MANY:
            for worker in members:
                worker.look(1.5)
        for worker in members:
            worker.stop()
        results = [worker.result(ANSWER_S) for worker in members]
    handed = sum(each["distinct"] for each in results)
    if running.name == "rocketmq":  # its queues move later: both get what was not committed then
        assert handed >= MANY, results
    else:
        assert handed == MANY, results
    assert sum(each["bad_crc"] for each in results) == 0


@pytest.mark.parametrize(
    ("running", "options"),
    [("redis", {}), ("nats", {}), ("nats", {"pushed": True})],
    indirect=["running"],
)
def test_a_handler_is_called_for_each(
    running: System, tmp_path: Path, options: dict[str, Any]
) -> None:
    """And each is acknowledged: another member of the group finds nothing."""
    client, given = running.clients[0], {"topics": [new_topic(running, queues=4)], "queues": 4}
    group, results = f"handlers{len(options)}", []
    with Crew(tmp_path) as crew:
        produce(crew, running, client, messages=MANY, **given)
        for expect, timeout_s in ((MANY, ANSWER_S), (1, 1.0)):
            job = Job(
                role="handle", endpoint=running.endpoint(), group=group, expect=expect,
                options={"ack": True, **options}, timeout_s=timeout_s, **given,
            )  # fmt: skip
            worker = crew.start(running.command(client), job)
            worker.wait_ready()
            worker.go()
            results.append(worker.result(ANSWER_S))
    assert [each["messages"] for each in results] == [MANY, 0]
    assert results[0]["seconds"] > 0
    assert results[0]["client"]


@pytest.mark.parametrize("running", ["redis", "nats", jvm("kafka")], indirect=True)
def test_what_is_not_of_this_run_is_noticed(running: System, tmp_path: Path) -> None:
    client, topic = running.clients[0], new_topic(running)
    with Crew(tmp_path) as crew:
        produce(crew, running, client, topics=[topic], mode="batch", messages=256)
        result = consume(
            crew, running, client, topics=[topic], group="other", expect=257, seed=SEED + 1,
            timeout_s=2,
        )  # fmt: skip
    assert (result["received"], result["bad_crc"], result["distinct"]) == (256, 256, 0)
    assert result["lost"] == 257


@pytest.mark.jvm
def test_rocketmqs_store_in_process(tmp_path: Path) -> None:
    """Written under both ways of flushing, by one thread and by many; read; opened again."""
    system = peers.require("rocketmq_store")
    given: dict[str, Any] = {"topics": ["t"], "queues": 4}
    with Crew(tmp_path) as crew:
        system.start(tmp_path, Durability.PAGE_CACHE)
        produce(crew, system, "java", mode="batch", messages=MANY, **given)
        system.start(tmp_path, Durability.FSYNC)
        threads = {"mode": "async", "in_flight": 16, "producer": 1}
        sent = produce(crew, system, "java", messages=FEW, **threads, **given)
        assert sent["extra"]["dispatched_after_s"] >= 0
        read = consume(crew, system, "java", expect=MANY + FEW, group="all", **given)
        assert_all(read, MANY + FEW)
        job = Job(role="recover", endpoint=system.endpoint(), topics=[])
        worker = crew.start(system.command("java"), job)
        worker.wait_ready()
        worker.go()
        recovered = worker.result(ANSWER_S)
    assert recovered["clean"] is True
    assert recovered["bytes"] > (MANY + FEW) * 128


def test_redis_syncs_always_and_its_own_tool_counts(tmp_path: Path) -> None:
    peers.require("redis")
    system = Redis()
    try:
        system.start(tmp_path, Durability.FSYNC)
        with socket.create_connection((server.LOOPBACK, system.endpoint()["port"])) as connection:
            connection.sendall(b"CONFIG GET appendfsync\r\n")
            assert b"always" in connection.recv(1000)
        found = system.benchmark("own", 1000, 128)
        assert found["acked"] == 1024
        assert found["rate"] == pytest.approx(found["acked"] / found["seconds"])
    finally:
        system.stop()


def test_nats_refuses_a_level_that_it_cannot_give(tmp_path: Path) -> None:
    peers.require("nats")
    system = Nats()
    try:
        if tuple(map(int, system.version().split(".")[:2])) < (2, 10):
            with pytest.raises(BenchError, match=r"2\.10 or newer"):
                system.start(tmp_path, Durability.FSYNC)
        else:
            system.start(tmp_path, Durability.FSYNC)
    finally:
        system.stop()
    assert system.processes() == []


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo the disk is made of cheese; exit 3"]
    failing = server.Server("cheese", command, tmp_path)
    with pytest.raises(BenchError, match=r"(?s)status 3; .*made of cheese"):
        failing.wait_for("Ready")
    failing.stop()


def test_a_server_that_never_serves_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    silent = server.Server("silent", ["sh", "-c", "sleep 60 & echo $!; wait"], tmp_path)
    silent.wait_for("\n")
    child = int(silent.log.read_text())
    with pytest.raises(BenchError, match=r"does not serve after 0\.1 s"):
        silent.wait_for("Ready", 0.1)
    silent.stop()
    assert not psutil.pid_exists(silent.pid)
    gone = os.pidfd_open(child) if psutil.pid_exists(child) else None
    assert gone is None or select.select([gone], [], [], patient(5))[0]


def test_fetch_says_what_it_could_not_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COMETMQ_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said: list[str] = []
    found = fetch(["redis", "nats", "kafka", "rocketmq"], said.append)
    assert found["redis"] == "redis-server is to be installed by root: apt-get install redis-server"
    assert found["nats"] == "nats-server is to be installed by root: apt-get install nats-server"
    for name in ("kafka", "rocketmq"):
        assert found[name] == "no `java` on the PATH: apt-get install default-jdk-headless"
    assert said[0] == "redis ..."
