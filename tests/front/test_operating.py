"""What an operator asks: is it there, what is it doing, where does it log."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_process import json_of, run
from family import RunningBroker
from patience import patient
from still import stopped
from waiting import until

from cometmq.actors.runtime.log_file import LogFile
from cometmq.actors.runtime.logs import TextFormatter, set_up_logging
from cometmq.actors.runtime.roles import ROLES
from cometmq.conf import BrokerSettings
from cometmq.conf.settings import PARTS
from cometmq.errors import ConfigError
from cometmq.shm.live.control import Counter

WAIT_S = patient(30)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("operating") / "store") as running:
        yield running


# --- the log ---


def test_a_line_has_date_and_zone() -> None:
    record = logging.LogRecord("cometmq", logging.INFO, "", 1, "text", None, None)
    line = TextFormatter("flush").format(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d{4} INFO    flush: text", line)


def append_lines(path: Path, writer: int, count: int) -> None:
    handler = LogFile(path, 4_000, 1_000)
    for number in range(count):
        text = f"{writer} {number} " + "x" * (number % 90)
        handler.emit(logging.LogRecord("cometmq", logging.INFO, "", 1, text, None, None))
    handler.close()


def test_several_processes_share_a_file_and_rotate_it(tmp_path: Path) -> None:
    """No line is lost or torn, whoever rotates."""
    path = tmp_path / "broker.log"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_lines, args=(path, each, 400)) for each in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(WAIT_S)
        assert each.exitcode == 0
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert len(lines) == 1_600
    assert {tuple(map(int, line.split()[:2])) for line in lines} == {
        (writer, number) for writer in range(4) for number in range(400)
    }
    assert len(list(tmp_path.iterdir())) > 10
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 4_000 + 5 * 120


def test_so_many_old_files_are_kept(tmp_path: Path) -> None:
    handler = LogFile(tmp_path / "log", 10, 2)
    for number in range(9):
        handler.emit(
            logging.LogRecord("c", logging.INFO, "", 1, f"line number {number}", None, None)
        )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert (tmp_path / "log.2").read_text() == "line number 6\n"
    (tmp_path / "log").rename(tmp_path / "moved")  # as logrotate does
    handler.emit(logging.LogRecord("c", logging.INFO, "", 1, "after", None, None))
    assert (tmp_path / "log").read_text() == "after\n"
    handler.close()


def lines_to(path: Path, bytes_max: int = 0) -> tuple[LogFile, Callable[[str], None]]:
    handler = LogFile(path, bytes_max, 2)
    return handler, lambda text: handler.emit(
        logging.LogRecord("c", logging.INFO, "", 1, text, None, None)
    )


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("first", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("then", [0o000, 0o077])
def test_log_files_have_one_mode_whatever_the_umask(tmp_path: Path, first: int, then: int) -> None:
    """Fault 33: all log files have mode 0640; it became 0600 at the first rotation."""
    path = tmp_path / "log"
    with umask(first):
        handler, say = lines_to(path, bytes_max=10)
        say("line number 1")
    assert mode_of(path) == 0o640
    with umask(then):
        say("line number 2")  # renames
        path.rename(tmp_path / "moved")
        say("line number 3")
    handler.close()
    assert {each.name: mode_of(each) for each in tmp_path.iterdir()} == dict.fromkeys(
        ("log", "log.1", "moved"), 0o640
    )


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o660])
def test_a_log_file_that_is_there_keeps_its_mode_and_hands_it_on(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "log"
    path.touch()
    path.chmod(mode)
    with umask(0o077):
        handler, say = lines_to(path, bytes_max=10)
        for number in range(4):
            say(f"line number {number}")
    handler.close()
    assert {mode_of(each) for each in tmp_path.iterdir()} == {mode}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_log_that_cannot_be_opened_again_goes_on_in_the_old_file(tmp_path: Path) -> None:
    """And closes nothing that has its number since: that may be a file of the store."""
    (tmp_path / "logs").mkdir()
    handler, say = lines_to(tmp_path / "logs" / "log")
    say("first")
    (tmp_path / "logs" / "log").rename(tmp_path / "moved")
    (tmp_path / "logs").rmdir()
    say("while there is no folder")
    with (tmp_path / "other").open("w") as other:
        say("still none")
        (tmp_path / "logs").mkdir()
        say("anew")
        other.write("nobody closed this")
    handler.close()
    assert (tmp_path / "moved").read_text() == "first\nwhile there is no folder\nstill none\n"
    assert (tmp_path / "logs" / "log").read_text() == "anew\n"
    assert (tmp_path / "other").read_text() == "nobody closed this"


def test_no_descriptor_is_left_for_the_next_log_file(tmp_path: Path) -> None:
    handler, say = lines_to(tmp_path / "log", bytes_max=10)
    say("more than ten bytes")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))  # no further one
    try:
        say("the second")
        say("the third")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    say("the fourth")
    handler.close()
    kept = [file.read_text() for file in sorted(tmp_path.iterdir(), reverse=True)]
    assert "".join(kept) == "more than ten bytes\nthe second\nthe third\nthe fourth\n"
    assert (tmp_path / "log").read_text() == "the fourth\n"


def test_the_folder_of_a_log_is_made(tmp_path: Path) -> None:
    """As that of the store is."""
    path = tmp_path / "var" / "log" / "broker.log"
    with RunningBroker(tmp_path / "store", {"logFile": str(path)}):
        assert path.read_text()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"logFile = .*/file/broker.log: Not a directory"):
        RunningBroker(tmp_path / "other", {"logFile": str(tmp_path / "file" / "broker.log")})


def test_a_broker_logs_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.log"
    settings = {"logFile": str(path), "logLevels": "allocator=ERROR;dispatcher=debug"}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("orders")
        assert broker.close() == 0
    text = path.read_text()
    assert "coordinator: topic orders is created" in text
    assert " allocator: " not in text
    assert broker.log == ""


def test_levels_of_parts_are_checked() -> None:
    assert set(PARTS) == {"broker", *(role.name for role in ROLES)}
    for wrong, what in (("flash=DEBUG", "'flash' is none"), ("flush=LOUD", "give flush a level")):
        with pytest.raises(ConfigError, match=what):
            BrokerSettings.from_keys({"logLevels": wrong})
    settings = BrokerSettings.from_keys({"logFile": "/proc/none/broker.log"})
    with pytest.raises(ConfigError, match="logFile"):
        set_up_logging("broker", settings)


# --- signals ---


def test_signals_that_ask_do_not_kill(broker: RunningBroker) -> None:
    pids = broker.pids()
    for pid in (broker.ready.pid, *pids.values()):
        os.kill(pid, signal.SIGUSR2)
    os.kill(broker.ready.pid, signal.SIGUSR1)
    deadline = time.monotonic() + WAIT_S
    while "asked by SIGUSR1" not in broker.log or broker.log.count("most recent call first") < 9:
        assert time.monotonic() < deadline, broker.log
        time.sleep(0.05)
    broker.until_logged(f"wrote={broker.counter(Counter.WROTE)}")
    assert broker.pids() == pids
    broker.create_topic("t")
    broker.send("t", 0, [b"still"])


# --- commands ---


def test_ping(broker: RunningBroker) -> None:
    server = broker.ready.name_server
    found = json_of("ping", "--name-server", server)
    assert [row["process"] for row in found] == ["commitlog", "coordinator", "reader-0"]
    assert all(row["answers"] and row["pid"] for row in found)
    assert run("ping", "-q", "--name-server", server).stdout == b""
    address = server.removeprefix("tcp://")
    assert [row["address"] for row in json_of("ping", address)] == [r["address"] for r in found]
    both = run("ping", address, "--name-server", server)
    assert (both.returncode, b"give it once" in both.stderr) == (2, True)
    with stopped(broker.pids()["coordinator"]):
        some = run("ping", "--timeout", "1", "--name-server", server)
    assert some.returncode == 1
    assert b"1 of 3 processes do not answer within 1 s: coordinator" in some.stderr
    nobody = run("ping", "--timeout", "1", "--name-server", "127.0.0.1:1")
    assert nobody.returncode == 3


def test_broker_list_and_remote_stat(broker: RunningBroker) -> None:
    server = broker.ready.name_server
    (row,) = json_of("broker", "list", "--name-server", server)
    assert row["broker"] == broker.endpoints.broker
    found = json_of("stat", "--name-server", server)
    assert found[row["broker"]]["commitlog"]["wrote"] == broker.counter(Counter.WROTE)


@pytest.mark.slow
def test_topics_in_json_and_unknown_names(broker: RunningBroker) -> None:
    server = broker.ready.name_server
    made = json_of("topic", "create", "a", "b", "--queues", "3", "--name-server", server)
    assert made == [{"topic": "a", "error": None}, {"topic": "b", "error": None}]
    broker.send("a", 0, [b"one"])

    def counted() -> bool:  # by the dispatcher
        topics = json_of("stat", "--store", str(broker.store))["topics"]
        return bool(topics.get("a") == {"queues": 3, "messages": 1})

    until(counted)
    again = run("topic", "create", "a", "--queues", "4", "-o", "json", "--name-server", server)
    assert again.returncode == 1
    assert "queues" in json.loads(again.stdout)[0]["error"]
    gone = json_of("topic", "delete", "b", "--name-server", server)
    assert gone == [{"topic": "b", "error": None}]
    reset = run("group", "reset", "nobody", "-t", "a", "--to", "earliest", "--name-server", server)
    assert b"no broker knew group nobody before" in reset.stderr
    release = run("store", "release", "backup", "--name-server", server)
    assert release.returncode == 1
    assert b"no hold backup: there is none" in release.stderr


def test_watching_in_a_pipe_says_what_was_asked_for(broker: RunningBroker) -> None:
    command = [sys.executable, "-m", "cometmq", "stat", "--store", str(broker.store), "-w", "0.1"]
    for output, begins in (("table", b"time\t"), ("json", b"{")):
        with subprocess.Popen([*command, "-o", output], stdout=subprocess.PIPE) as watching:
            assert watching.stdout is not None
            assert watching.stdout.readline().startswith(begins)
            watching.terminate()


def test_a_store_in_use_is_verified_by_another_command(broker: RunningBroker) -> None:
    done = run("store", "verify", str(broker.store))
    assert done.returncode != 0
    assert b"is checked by `cometmq spark audit`, beside its broker" in done.stderr


def test_what_is_refused_is_not_unconfirmed(broker: RunningBroker) -> None:
    server = broker.ready.name_server
    broker.create_topic("refused", 1)
    run("topic", "update", "refused", "--perm", "r", "--name-server", server)
    command = [sys.executable, "-m", "cometmq", "msg", "send", "-t", "refused", "-o", "json"]
    command += ["--name-server", server, "--timeout", "2"]
    done = subprocess.run(command, input=b"one\ntwo\n", capture_output=True, timeout=patient(60))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["sent"], found["refused"], found["unconfirmed"]) == (2, 2, 0)
