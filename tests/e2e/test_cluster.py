"""`cometmq cluster`, as somebody at a terminal has it: three brokers, a kill -9, another master."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli_process import output_of, run
from family import left_behind
from forked import RUN
from patience import patient
from replicas import RunningCluster, ctrl_c, ended, kill_session
from secured_servers import PASSWORD, SecuredEtcd

from cometmq.client import Consumer, Producer
from cometmq.conf.engine import ENGINE_KEYS
from cometmq.protocol.errors import (
    CometError,
    InSyncReplicasNotEnough,
    NotConfirmed,
    NotReachable,
    TopicNotExist,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_S = patient(90)
PACE_S = 0.01  # between two messages
AWAY_S = patient(
    45
)  # of writing, at the most: a session of 2 s, and a machine that others use as well
TOPIC = "orders"


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    found = f"{RUN}/{tmp_path.name}"
    yield found
    left = left_behind(found)  # after a failure
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, WAIT_S)


class Sending:
    """Numbered messages, one after the other, and which of them were acknowledged."""

    def __init__(self, name_server: str, begin: int = 0) -> None:
        self._name_server = name_server
        self._begin = begin
        self._ending = threading.Event()
        self.acknowledged: list[int] = []
        self.longest_pause_s = 0.0
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        number, last = self._begin, time.monotonic()
        with Producer(self._name_server, timeout_s=WAIT_S, wait_for_broker=WAIT_S) as producer:
            while not self._ending.wait(PACE_S):
                with contextlib.suppress(CometError):  # it is not known to be stored
                    producer.send(TOPIC, b"%d" % number).wait()
                    self.acknowledged.append(number)
                    now = time.monotonic()
                    self.longest_pause_s = max(self.longest_pause_s, now - last)
                    last = now
                number += 1

    def wait_for(self, more: int) -> None:
        """Until so many more were acknowledged."""
        deadline, count = time.monotonic() + WAIT_S, len(self.acknowledged) + more
        while len(self.acknowledged) < count:
            assert time.monotonic() < deadline, f"{len(self.acknowledged)} of {count}"
            time.sleep(0.02)

    def __enter__(self) -> Sending:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()


def stored(name_server: str, wanted: set[int]) -> list[int]:
    """What there is, once all that is wanted was seen, or nothing comes any more."""
    found: list[int] = []
    deadline = time.monotonic() + WAIT_S
    with Consumer(name_server, None, transport="zmq", wait_for_broker=WAIT_S) as consumer:
        while True:
            try:
                consumer.assign(TOPIC)
                break
            except (TopicNotExist, NotReachable):  # a name server that has just started is told yet
                if time.monotonic() > deadline:
                    raise
        quiet = 0
        while quiet < 15 and not wanted <= set(found):
            messages = consumer.poll(1_000, timeout_s=2)
            quiet = 0 if messages else quiet + 1
            found += [int(message.body) for message in messages]
        found += [int(message.body) for message in consumer.poll(1_000, timeout_s=0.5)]
    return found


def assert_kept(name_server: str, acknowledged: list[int]) -> None:
    found = stored(name_server, set(acknowledged))
    lost = set(acknowledged) - set(found)
    assert not lost, f"{len(lost)} of {len(acknowledged)}: {sorted(lost)[:10]}"
    assert len(set(found)) == len(found), "a message is there twice"


def assert_refused(name_server: str) -> None:
    """Nothing is acknowledged. What comes before the master has left out the others is taken, and
    not confirmed; then it is refused."""
    deadline = time.monotonic() + WAIT_S
    with Producer(name_server, timeout_s=2, wait_for_broker=WAIT_S) as producer:
        for number in itertools.count(1):
            with pytest.raises((InSyncReplicasNotEnough, NotConfirmed)) as raised:
                producer.send(TOPIC, b"-%d" % number).wait()
            if raised.errisinstance(InSyncReplicasNotEnough):
                return
            assert time.monotonic() < deadline, raised.value


def test_a_master_is_killed_and_comes_back(tmp_path: Path, mark: str) -> None:
    cluster = RunningCluster(tmp_path / "try", mark)
    found = cluster.until_all_in_sync()
    master, epoch = found["master"], found["epoch"]
    assert cluster.ready["name_server"] == found["name_server"]
    with Sending(found["name_server"]) as sending:
        sending.wait_for(50)
        cluster.kill(master)
        sending.wait_for(50)
        after = cluster.status()
        assert after["serves"]
        assert after["epoch"] > epoch
        assert after["master"] not in (master, None)
        (gone,) = (each for each in after["replicas"] if each["name"] == master)
        assert (gone["role"], gone["in_sync"], gone["pid"]) == ("away", False, None)
        assert gone["why"] == "its process is not running"
        again = cluster.run_again(master)
        back = cluster.until_all_in_sync()
        assert [each["why"] for each in back["replicas"]] == ["", "", ""]
        sending.wait_for(20)
        out = output_of("cluster", "failover", "--store", str(cluster.path), "--to", master)
        assert out.decode().startswith(f"{master} serves; messages were not taken for ")
        named = cluster.status()
        assert (named["master"], named["epoch"] > after["epoch"]) == (master, True)
        sending.wait_for(50)
    assert sending.longest_pause_s < AWAY_S
    cluster.until_all_in_sync()
    assert_kept(cluster.name_server, sending.acknowledged)
    assert f"to start it again: cometmq cluster run --store {cluster.path} {master}" in cluster.said
    assert ctrl_c(cluster.init) == 0, cluster.said  # and what was started beside it ends as well
    assert ended(again) == 0
    assert not cluster.left()


def test_all_are_killed_and_the_folder_goes_on(tmp_path: Path, mark: str) -> None:
    cluster = RunningCluster(tmp_path / "try", mark)
    found = cluster.until_all_in_sync()
    with Sending(cluster.name_server) as sending:
        sending.wait_for(100)
    for each in found["replicas"]:
        os.kill(each["pid"], signal.SIGSTOP)
    os.kill(cluster.init.pid, signal.SIGKILL)
    ended(cluster.init)
    for each in found["replicas"]:
        kill_session(each["pid"])
    stopped = cluster.status()
    assert (stopped["serves"], stopped["master"]) == (False, None)
    assert [each["role"] for each in stopped["replicas"]] == ["away"] * 3
    cluster = RunningCluster(tmp_path / "try", mark)
    assert cluster.name_server == found["name_server"]
    after = cluster.until_all_in_sync()
    assert after["epoch"] > found["epoch"]
    assert_kept(cluster.name_server, sending.acknowledged)
    with Sending(cluster.name_server, 1_000_000) as more:
        more.wait_for(50)
    assert_kept(cluster.name_server, sending.acknowledged + more.acknowledged)
    assert ctrl_c(cluster.init) == 0, cluster.said
    assert not cluster.left()


def test_it_ends_in_order_and_a_replica_is_replaced(tmp_path: Path, mark: str) -> None:
    """One more replica is added, and an old one removed, while messages are sent."""
    cluster = RunningCluster(tmp_path / "try", mark)
    cluster.until_all_in_sync()
    store = ("--store", str(cluster.path))
    with Sending(cluster.name_server) as sending:
        sending.wait_for(50)
        output_of("cluster", "add", *store, "n3")
        fourth = cluster.run_again("n3")
        found = cluster.until_all_in_sync()
        assert len(found["replicas"]) == 4
        victim = next(each["name"] for each in found["replicas"] if each["role"] == "follower")
        output_of("cluster", "remove", *store, victim)
        found = cluster.until_all_in_sync()
        assert {each["name"] for each in found["replicas"]} == {"n0", "n1", "n2", "n3"} - {victim}
        sending.wait_for(50)
    assert_kept(cluster.name_server, sending.acknowledged)
    assert ctrl_c(fourth) == 0
    assert ctrl_c(cluster.init) == 0, cluster.said
    assert not cluster.left()
    cluster = RunningCluster(tmp_path / "try", mark)
    cluster.until(lambda found: found["serves"], "it does not serve")
    assert ctrl_c(cluster.init) == 0, cluster.said
    assert not cluster.left()


def test_two_of_three_are_lost_and_one_comes_back_empty(tmp_path: Path, mark: str) -> None:
    """The runbook of docs/replication.md: reads go on, and writing does with one in its place."""
    cluster = RunningCluster(tmp_path / "try", mark)
    found = cluster.until_all_in_sync()
    with Sending(cluster.name_server) as sending:
        sending.wait_for(50)
    (left,) = [each["name"] for each in found["replicas"] if each["role"] == "follower"][:1]
    lost = [each["name"] for each in found["replicas"] if each["name"] != left]
    for name in lost:
        cluster.kill(name)
    short = cluster.until(lambda now: now["master"] == left, "the third one is not elected")
    assert (short["serves"], short["why"]) == (False, "in sync: 1, needed: 2")
    assert_refused(cluster.name_server)
    assert_kept(cluster.name_server, sending.acknowledged)
    shutil.rmtree(cluster.path / lost[0] / "store")
    again = cluster.run_again(lost[0])
    cluster.until(lambda now: now["serves"], "it does not serve with two")
    with Sending(cluster.name_server, 1_000_000) as more:
        more.wait_for(20)
    assert_kept(cluster.name_server, sending.acknowledged + more.acknowledged)
    assert ctrl_c(cluster.init) == 0, cluster.said
    assert ended(again) == 0
    assert not cluster.left()


def test_an_engine_that_wants_tls_and_a_password(tmp_path: Path, mark: str) -> None:
    """Elections, a restart of the engine and the commands go by it, and the password is seen
    nowhere."""
    if shutil.which("etcd") is None:
        pytest.skip("the engine etcd: etcd-server is not installed")
    place = tmp_path / "etcd"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        etcd = SecuredEtcd(place, stack)
        etcd.enable()
        pairs = [
            part
            for key, value in zip(ENGINE_KEYS, etcd.access, strict=True)
            for part in ("--set", f"{key}={value}")
        ]
        session = ("--set", "groupSessionTimeout=10s")
        cluster = RunningCluster(tmp_path / "try", mark, "--engine", etcd.url, *pairs, *session)
        found = cluster.until_all_in_sync()
        with Sending(cluster.name_server) as sending:
            sending.wait_for(20)
            etcd.restart()
            sending.wait_for(20)
            (to,) = [each["name"] for each in found["replicas"] if each["role"] == "follower"][:1]
            conf = str(cluster.path / to / "broker.conf")
            cluster.until_all_in_sync()
            done = run("cluster", "failover", "-c", conf, "--to", to)
            assert f"{to} is the master of epoch".encode() in done.stderr, done.stderr
            sending.wait_for(20)
        named = ("--engine", etcd.url, "--group", "cluster")
        assert (
            json.loads(output_of("cluster", "status", *named, *pairs, "-o", "json"))["master"] == to
        )
        done = run("cluster", "status", *named, "--set", f"groupEngineCaFile={etcd.access.ca_file}")
        assert done.returncode != 0
        assert b"it refuses our certificate" in done.stderr
        assert_kept(cluster.name_server, sending.acknowledged)
        for process in cluster.left():
            seen = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            seen += Path(f"/proc/{process.pid}/environ").read_bytes()
            assert PASSWORD.encode() not in seen
        assert ctrl_c(cluster.init) == 0, cluster.said
        logs = [
            path for path in cluster.path.rglob("*") if path.suffix in (".log", ".conf", ".json")
        ]
        assert len(logs) >= 10
        for path in logs:
            assert PASSWORD.encode() not in path.read_bytes(), path
        assert PASSWORD not in cluster.said
    assert not cluster.left()
