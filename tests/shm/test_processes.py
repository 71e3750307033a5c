"""Processes by a name that tells whether they have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from cometmq.shm.os.processes import (
    command_of,
    has_ended,
    name_of,
    own_process,
    pids,
    processor_s,
)


def test_this_one_lives() -> None:
    assert own_process()
    assert not has_ended(own_process())


@pytest.mark.parametrize("reaped", [True, False])
def test_one_that_was_killed(reaped: bool) -> None:
    program = "import cometmq.shm.os.processes as p; print(p.own_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert not has_ended(name)
        process.send_signal(signal.SIGKILL)
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert has_ended(name)


def test_what_one_is_called_and_has_used() -> None:
    pid = os.getpid()
    found = psutil.Process(pid)
    assert pid in pids()
    assert name_of(pid) == found.name()[:15]
    assert command_of(pid) == " ".join(found.cmdline()).strip()
    times = found.cpu_times()
    assert 0 < times.user + times.system <= processor_s(pid) + 0.02
    gone = 2**22 + 1  # no pid
    assert gone not in pids()
    assert (name_of(gone), command_of(gone), processor_s(gone)) == ("", "", 0.0)


def test_another_one_that_got_its_pid() -> None:
    where, pid, began = own_process().rsplit("/", 2)
    assert has_ended(f"{where}/{pid}/{int(began) + 1}")


def test_what_cannot_be_told_lives() -> None:
    where, pid, began = own_process().rsplit("/", 2)
    boot, pids, times = where.split("/")
    gone = 2**22 + 1  # no pid
    assert has_ended(f"{where}/{gone}/{began}")
    assert not has_ended(f"{boot[::-1]}/{pids}/{times}/{gone}/{began}")  # of another machine
    assert not has_ended(f"{boot}/pid:[1]/{times}/{gone}/{began}")  # of another container
    # Began by another clock.
    assert not has_ended(f"{boot}/{pids}/time:[1]/{pid}/{int(began) + 1}")
    for name in ("", "x", f"{where}/{pid}", f"{where}/{'9' * 10}/{began}", "x" * 1_000_000):
        assert not has_ended(name)
    assert not has_ended(f"{where}/1/{began}") or os.getpid() == 1 or _begins(1) != began


def test_a_proc_of_other_processes_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    where, pid, began = own_process().rsplit("/", 2)
    ended = f"{where}/{pid}/{int(began) + 1}"
    assert has_ended(ended)
    monkeypatch.setattr(os, "getpid", lambda: 1_000_000_000)
    assert own_process() == ""
    assert not has_ended(ended)


def _begins(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
