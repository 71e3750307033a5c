"""Brokers of the profile "test" are forked from one process, and are as others are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import patient

from cometmq import Broker
from cometmq.errors import ConfigError, StoreLocked
from cometmq.nursery import nursery

PROGRAM = """
import sys
from cometmq import Broker
broker = Broker(sys.argv[1], profile="test")
print(broker.pid, psutil_parent := open(f"/proc/{broker.pid}/stat").read().split()[3], flush=True)
sys.stdin.read()
"""


def parent_of(broker: Broker) -> int:
    return psutil.Process(broker.pid).ppid()


def test_all_come_from_one_process(tmp_path: Path) -> None:
    with Broker(tmp_path / "a", profile="test") as first:
        with Broker(tmp_path / "b", profile="test") as second:
            assert parent_of(first) == parent_of(second) == nursery()._process.pid
        with first.producer() as producer:  # the end of one is none of another's
            producer.send("t", b"here")
    with Broker(tmp_path / "a", profile="test") as again, again.consumer("g", "t") as consumer:
        assert parent_of(again) == nursery()._process.pid
        assert [each.body for each in consumer.poll(10, patient(60))] == [b"here"]


def test_many_at_once(tmp_path: Path) -> None:
    def live(number: int) -> int:
        store = tmp_path / f"store{number}"
        with Broker(store, profile="test") as broker, broker.producer() as producer:
            return producer.send("t", b"x", queue_id=0).queue_offset

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(live, range(8))) == [0] * 8


def test_it_starts_where_its_service_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder, the environment and the standard error of now, not of the nursery's start."""
    nursery()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMETMQ_LOG_LEVEL", "ERROR")
    before = os.umask(0o027)
    try:
        with Broker("here", profile="test") as broker:
            child = psutil.Process(broker.pid)
            assert child.cwd() == str(tmp_path)
            assert os.getsid(broker.pid) == broker.pid != os.getsid(0)
            assert (tmp_path / "here" / "commitlog").is_dir()
            os.kill(broker.pid, signal.SIGUSR1)  # stacks, to the standard error
            deadline = time.monotonic() + patient(10)
            said = ""
            while "most recent call first" not in said and time.monotonic() < deadline:
                said += capfd.readouterr().err
            assert "most recent call first" in said
    finally:
        os.umask(before)


def test_what_keeps_it_from_starting_is_said(tmp_path: Path) -> None:
    with Broker(tmp_path / "store", profile="test"), pytest.raises(StoreLocked):
        Broker(tmp_path / "store", profile="test")
    with pytest.raises(ConfigError, match="bindAddress"):
        Broker(tmp_path / "other", profile="test", settings={"bindAddress": "192.0.2.1"})


def test_one_that_is_killed(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "store", profile="test")
    os.kill(broker.pid, signal.SIGKILL)
    broker.close()
    assert broker._process.returncode == -signal.SIGKILL
    with Broker(tmp_path / "store", profile="test"):
        pass


def test_without_the_nursery_its_brokers_go_on(tmp_path: Path) -> None:
    with Broker(tmp_path / "a", profile="test") as first:
        process = nursery()._process
        process.kill()
        process.wait()
        with first.producer() as producer:
            producer.send("t", b"here")
        with Broker(tmp_path / "b", profile="test") as second:
            assert parent_of(second) == nursery()._process.pid != process.pid
    with suppress(psutil.NoSuchProcess):  # else whoever adopted it has not looked yet
        assert psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE


def test_one_that_ends_while_a_broker_is_asked_for(tmp_path: Path) -> None:
    stopped = nursery()._process
    stopped.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.3, stopped.kill)
    killer.start()
    try:
        with Broker(tmp_path / "store", profile="test") as broker:
            assert parent_of(broker) != stopped.pid
    finally:
        killer.join()


def test_a_fork_of_the_service_has_its_own(tmp_path: Path) -> None:
    with Broker(tmp_path / "a", profile="test") as ours:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with Broker(tmp_path / "b", profile="test") as theirs:
                    status = int(parent_of(theirs) == parent_of(ours))
                nursery().close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with ours.producer() as producer:
            producer.send("t", b"here")


@pytest.mark.parametrize("end", ["returns", "is killed"])
@pytest.mark.slow
def test_nothing_outlives_the_service(tmp_path: Path, end: str) -> None:
    service = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert service.stdin is not None
    assert service.stdout is not None
    pids = [int(each) for each in service.stdout.readline().split()]
    processes = [psutil.Process(each) for each in pids]
    if end == "is killed":
        service.kill()
    service.stdin.close()
    service.wait()
    service.stdout.close()
    _, alive = psutil.wait_procs(processes, patient(20))
    assert not alive
    with Broker(tmp_path / "store", profile="test"):
        pass
