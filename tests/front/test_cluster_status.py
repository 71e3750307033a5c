"""How a group stands, and what is new about that.

The engine is a real one, the replicas are sessions and control files; see kit/members.py.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from members import FakeMembers
from rich.console import Console

from cometmq.actors.replication.core.record import GroupRecord, Member, encode_record
from cometmq.actors.replication.engines.engine import (
    Stored,
    View,
)
from cometmq.actors.replication.group.sessions import session_id
from cometmq.cli import cluster_look
from cometmq.cluster import stores
from cometmq.cluster.administration import add
from cometmq.cluster.changes import changes
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.looking import Looker, sized, status_of
from cometmq.cluster.place import GroupPlace
from cometmq.cluster.stores import LocalReplica
from cometmq.errors import (
    ConfigError,
    StoreError,
)
from cometmq.shm.live.control import CONTROL_FILE, Phase, Service
from cometmq.shm.os.locks import StoreLock


def gone_pid() -> int:
    """Of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


FIRST_THREAD_ENDS = """
import ctypes, pathlib, threading, time

def stay():
    while "\\tZ" not in pathlib.Path("/proc/self/status").read_text():
        time.sleep(0.01)  # nothing tells a thread that
    print(flush=True)
    threading.Event().wait()

threading.Thread(target=stay).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_broker_is_gone_once_all_its_threads_are() -> None:
    """Until then it has its store: the first thread of one that was killed may end before."""
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            meta = {"pid": process.pid, "started_ms": int(time.time() * 1000)}
            found = stores.supervisor_of(meta)
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has buried it yet
        assert stores.supervisor_of(meta) is None
    assert found is not None
    assert found.pid == process.pid


# --- how a group stands ---------------------------------------------------------------------------


def test_a_group_that_serves(looker: Looker) -> None:
    found = looker.look()
    assert (found.serves, found.why, found.master, found.epoch) == (True, "", "n0", 1)
    assert found.in_sync == ("n0", "n1", "n2")
    assert [each.role for each in found.replicas] == ["master", "follower", "follower"]
    assert [each.lag_bytes for each in found.replicas] == [0, 1_000, 0]
    assert [each.lag_s for each in found.replicas] == [0.0, 0.5, 0.0]
    assert {each.pid for each in found.replicas} == {os.getpid()}


def test_who_is_killed_is_away_at_once(served: FakeMembers, looker: Looker) -> None:
    """Its session lasts for some time."""
    served.log("n0", 5_000, pid=gone_pid())
    found = looker.look()
    assert found.master is None
    assert found.why == "the master n0 is away, and no other one is elected yet"
    n0 = found.replicas[0]
    assert (n0.role, n0.in_sync, n0.pid, n0.why) == (
        "away",
        False,
        None,
        "its process is not running",
    )
    served.elect("n1")
    served.leave("n0")
    served.log("n1", 6_000, service=Service.OPEN)
    found = looker.look()
    assert (found.serves, found.master, found.epoch) == (True, "n1", 2)
    assert found.replicas[0].lag_bytes == 1_000  # as its last run has left it


def test_a_follower_that_dies_is_counted_on_until_it_is_left_out(
    served: FakeMembers, looker: Looker
) -> None:
    served.log("n2", 5_000, pid=gone_pid())
    n2 = looker.look().replicas[2]
    assert (n2.role, n2.in_sync) == ("away", False)
    assert n2.why.startswith("its process is not running; the group still counts on it")


@pytest.mark.parametrize(
    ("service", "phase", "serves"),
    [
        (Service.OPEN, Phase.SERVING, True),
        (Service.UNSURE, Phase.SERVING, True),
        (Service.OPEN, Phase.RECOVERED, False),
        (Service.SHORT, Phase.SERVING, False),
        (Service.DEPOSED, Phase.SERVING, False),
        (Service.NONE, Phase.SERVING, False),
    ],
)
def test_a_master_that_does_not_serve_yet(
    served: FakeMembers, looker: Looker, service: int, phase: int, serves: bool
) -> None:
    served.log("n0", 5_000, service=service, phase=phase)
    assert looker.look().why == ("" if serves else "the master n0 does not serve yet")


def test_a_broker_that_has_ended_in_order(served: FakeMembers, looker: Looker) -> None:
    """Its control file is gone; its session may still be there."""
    (served.folder.store_of("n1") / CONTROL_FILE).unlink()
    n1 = looker.look().replicas[1]
    assert (n1.role, n1.pid, n1.lag_bytes) == ("away", None, None)
    assert n1.why.startswith("its process is not running")


def test_a_replica_that_is_added_meanwhile_is_looked_at_too(
    served: FakeMembers, looker: Looker
) -> None:
    """As by `cometmq cluster add`, while `init` runs: it ends that replica's broker as well."""
    assert set(looker.supervisors()) == {"n0", "n1", "n2"}
    ClusterFolder(served.folder.path).add("n3", None)
    served.log("n3", 100)
    assert set(looker.supervisors()) == {"n0", "n1", "n2", "n3"}
    add(served.engine, served.group, "n3", "127.0.0.1:4")
    served.start("n3")
    added = looker.look().replica("n3")
    assert added is not None
    assert added.pid == os.getpid()
    ClusterFolder(served.folder.path).remove("n3")
    assert set(looker.supervisors()) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("left", [b"", bytes(8)])
def test_a_broker_between_two_runs_is_waited_for(
    served: FakeMembers, looker: Looker, left: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment it has no control file that counts, and holds its store."""
    monkeypatch.setattr(stores, "BETWEEN_RUNS_S", 20.0)  # a busy machine's timer is late
    store = served.folder.store_of("n1")
    path = store / CONTROL_FILE
    path.unlink()
    if left:
        path.write_bytes(left)
    lock = StoreLock(store, 1)
    next_run = threading.Timer(0.05, served.log, ("n1", 4_500))
    next_run.start()
    try:
        n1 = looker.look().replicas[1]
    finally:
        next_run.join()
        lock.release()
    assert (n1.role, n1.pid, n1.lag_bytes) == ("follower", os.getpid(), 500)


def test_a_control_file_that_is_none_is_said(served: FakeMembers, looker: Looker) -> None:
    (served.folder.store_of("n1") / CONTROL_FILE).write_bytes(b"x" * 100_000)
    with pytest.raises(StoreError, match="begins with b'xxxxxxxx'"):
        looker.look()


RECORD = GroupRecord(
    group="g",
    epoch=3,
    master="a",
    replicas={
        "a": Member("h:1", "ua", 1),
        "b": Member("h:2", "ub", 1),
        "c": Member("h:3", "uc", 1),
        "d": Member("h:4"),
    },
    iss=("a", "b"),
    min_iss=2,
)
PLACE = GroupPlace(group="g", engine="etcd://h:2379")


def a_view(record: GroupRecord, *alive: str) -> View:
    lives = [record.life(name) for name in alive]
    ids = frozenset(session_id(life) for life in lives if life is not None)
    return View(Stored(encode_record(record), 7), ids, 0.0)


def with_changes(**values: Any) -> GroupRecord:
    return GroupRecord(
        **({name: getattr(RECORD, name) for name in RECORD.__struct_fields__} | values)
    )


@pytest.mark.parametrize(
    ("record", "alive", "why"),
    [
        (RECORD, "abc", ""),
        (RECORD, "ab", ""),
        (RECORD, "a", "in sync: 1, needed: 2"),
        (RECORD, "bc", "the master a is away, and no other one is elected yet"),
        (
            RECORD,
            "cd",
            "the master a is away, and no replica with all that is confirmed is there: "
            "start a or b",
        ),
        (with_changes(master=""), "bc", "no master is elected yet"),
        (
            with_changes(master="", iss=("a",), elr=("b",)),
            "c",
            "no replica with all that is confirmed is there: start a",
        ),
        (with_changes(master="", iss=("a",), elr=("b",)), "bc", "no master is elected yet"),
        (
            with_changes(master="", iss=("a", "b")),
            "",
            "no replica with all that is confirmed is there: start a or b",
        ),
    ],
)
def test_why_messages_are_not_taken(record: GroupRecord, alive: str, why: str) -> None:
    assert status_of(PLACE, a_view(record, *alive), {}).why == why


@pytest.mark.parametrize(
    ("record", "alive", "local", "why"),
    [
        (RECORD, "ac", {}, "it has not joined yet"),
        (
            RECORD,
            "ac",
            {"a": LocalReplica(1, 500_000_000), "c": LocalReplica(2, 80_000_000)},
            "420 MB behind",
        ),
        (
            RECORD,
            "ac",
            {"a": LocalReplica(1, 9, said={"follower.0.replica": "c", "follower.0.why": "so"})},
            "so",
        ),
        (RECORD, "a", {"c": LocalReplica()}, "its process is not running"),
        (RECORD, "a", {"c": LocalReplica(2, 9)}, "it runs, and has no session with the engine"),
        (
            RECORD,
            "a",
            {},
            "it has no session with the engine: it is not running, or cannot reach it",
        ),
        (
            with_changes(iss=("a",), elr=("c",)),
            "ac",
            {},
            "it left while too few were in sync, and is to join again",
        ),
        (
            with_changes(iss=("a",), elr=("c",)),
            "a",
            {"c": LocalReplica()},
            "its process is not running; it has all that is confirmed",
        ),
    ],
)
def test_why_somebody_is_not_in_sync(
    record: GroupRecord, alive: str, local: dict[str, LocalReplica], why: str
) -> None:
    found = status_of(PLACE, a_view(record, *alive), local)
    assert found.replicas[2].why == why
    assert found.replicas[3].why == "it was never started"


FULL = "its disk is full: /b/store: the log has no room to go on (0 bytes are free)"


@pytest.mark.parametrize("alive", [("a",), ("a", "b", "c")])
@pytest.mark.parametrize("is_here", [False, True])
def test_what_keeps_a_replica_away_is_said(is_here: bool, alive: tuple[str, ...]) -> None:
    """By itself, where it is on this machine; else by the master, who has heard it."""
    record = with_changes(iss=("a",))
    heard = {"follower.0.replica": "b", "follower.0.why": "it does not follow"}
    local = {"a": LocalReplica(1, 100, serves=True, said=heard)}
    if is_here:
        local["b"] = LocalReplica(2, 90, said={"trouble": FULL})
    else:
        heard["follower.0.trouble"] = FULL
    found = status_of(PLACE, a_view(record, *alive), local).replica("b")
    assert found is not None
    assert (found.in_sync, found.why) == (False, FULL)


def test_a_master_without_room_serves_no_messages() -> None:
    local = {"a": LocalReplica(1, 100, serves=True, said={"trouble": FULL})}
    found = status_of(PLACE, a_view(RECORD, "a", "b", "c"), local)
    assert found.why == f"the master a: {FULL}"


def test_a_damaged_store_is_said() -> None:
    local = {
        "a": LocalReplica(1, 100, serves=True),
        "b": LocalReplica(damage="/b/store/commitlog/0: damaged at 7, physical offset 7: CRC"),
    }
    found = status_of(PLACE, a_view(RECORD, "a", "c"), local).replica("b")
    assert found is not None
    assert found.why.startswith(
        "its store is damaged, and to be replaced by an empty one: /b/store"
    )


def test_what_the_master_says_of_others_far_away() -> None:
    said = {
        "epoch": 3, "role": "master",
        "follower.0.replica": "b", "follower.0.lag_bytes": 12, "follower.0.why": "",
        "follower.1.replica": "c", "follower.1.lag_bytes": 34, "follower.1.why": "34 bytes behind",
        "follower.x": 1, "follower.2.held": 5,
    }  # fmt: skip
    local = {"a": LocalReplica(1, 100, serves=True, said=said)}
    found = status_of(PLACE, a_view(RECORD, "a", "b", "c"), local)
    assert [each.lag_bytes for each in found.replicas] == [0, 12, 34, None]
    assert [each.epoch for each in found.replicas] == [3, None, None, None]
    assert found.serves


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1_000, "1 kB"), (420_300_000, "420 MB"),
        (1_500_000_000, "1.5 GB"), (None, "an unknown number of bytes"),
    ],
)  # fmt: skip
def test_bytes_as_people_say_them(count: int | None, text: str) -> None:
    assert sized(count) == text


def test_a_record_that_is_none_is_said() -> None:
    with pytest.raises(ConfigError, match="the group's record cannot be read"):
        status_of(PLACE, View(Stored(b"{", 1), frozenset(), 0.0), {})


# --- changes --------------------------------------------------------------------------------------


def test_what_happened_is_told_in_lines() -> None:
    before = status_of(PLACE, a_view(RECORD, "a", "b", "c"), {})
    assert list(changes(None, before)) == [
        "group g, epoch 3: a is master; in sync: a, b",
        "c: it has not joined yet",
        "d: it was never started",
    ]
    assert list(changes(before, before)) == []
    gone = status_of(PLACE, a_view(RECORD, "b", "c"), {})
    assert list(changes(before, gone)) == [
        "there is no master; it was a",
        "a is away: it has no session with the engine: it is not running, or cannot reach it",
        "no messages are taken: the master a is away, and no other one is elected yet",
    ]
    after = with_changes(epoch=4, master="b", iss=("b", "c"))
    elected = status_of(PLACE, a_view(after, "b", "c"), {})
    assert list(changes(gone, elected)) == [
        "b is the master of epoch 4",
        "c is in sync",
        "messages are taken: group g, epoch 4: b is master; in sync: b, c",
    ]
    smaller = with_changes(epoch=4, master="b", iss=("b",), elr=("c",))
    del smaller.replicas["d"]
    left = status_of(PLACE, a_view(smaller, "a", "b", "c"), {})
    assert list(changes(elected, left)) == [
        "a is there: it has not joined yet",
        "c is no longer in sync: it left while too few were in sync, and is to join again",
        "d was removed",
        "no messages are taken: in sync: 1, needed: 2",
    ]
    assert list(changes(left, elected))[-2:] == [
        "d was added at h:4",
        "messages are taken: group g, epoch 4: b is master; in sync: b, c",
    ]


def test_a_terminal_of_80_columns_shows_it_whole(
    served: FakeMembers,
    looker: Looker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served.end("n2")
    found = looker.look()
    shown = Console(width=80, file=io.StringIO())
    monkeypatch.setattr(cluster_look, "console", lambda: shown)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    cluster_look._print(found, "table")
    assert isinstance(shown.file, io.StringIO)
    lines = [line.split() for line in shown.file.getvalue().splitlines()]
    for each in found.replicas:
        (line,) = (line for line in lines if line[:1] == [each.name])
        assert line[1:3] == [each.role, str(each.in_sync).lower()]
        assert line[-1] == each.address
    (away,) = (each for each in found.replicas if each.why)
    assert f"{away.name}: {away.why}" in capsys.readouterr().out.splitlines()
