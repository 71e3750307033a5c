"""`cometmq cluster` without brokers: its folder, how a group stands, what an operator decides.

The engine is a real one (SQLite); the replicas are sessions and control files, see kit/members.py.
Whole brokers are in tests/e2e/test_cluster.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_process import json_of, output_of, run, start
from members import FakeMembers
from patience import patient

from cometmq.actors.replication.core.record import GroupRecord, encode_record
from cometmq.actors.replication.engines.engine import (
    Applied,
    Engine,
    Outcome,
    Refused,
    Stored,
    Unknown,
)
from cometmq.actors.replication.engines.errors import EngineUnreachable
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.cluster import administration
from cometmq.cluster.administration import (
    FailOver,
    add,
    change,
    longest,
    remove,
    wait_heard,
)
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.looking import GroupStatus, Looker
from cometmq.cluster.running import LOOK_S, ensure_formed
from cometmq.errors import (
    CometError,
    ConfigError,
    NotReachable,
)
from cometmq.protocol.commands import BrokerEndpoints, RegisterBroker, TopicList
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import Service

# --- changes of the record ------------------------------------------------------------------------


class Losing:
    """An engine that loses answers to changes: of those that it makes, or makes late, or never."""

    def __init__(self, engine: Engine, *courses: str) -> None:
        self._engine = engine
        self._courses = list(courses)
        self._late: tuple[int | None, bytes] | None = None
        self.where = "losing"

    def get(self, group: str) -> Stored | None:
        return self._engine.get(group)

    def cas(self, group: str, expected: int | None, record: bytes) -> Outcome:
        course = self._courses.pop(0) if self._courses else ""
        late, self._late = self._late, None
        if late is not None:
            self._engine.cas(group, *late)
        if course == "late":
            self._late = expected, record
            return Unknown("no answer came")
        if course == "never":
            return Unknown("no answer came")
        if course == "overtaken":
            stored = self._engine.get(group)
            assert stored is not None
            assert isinstance(self._engine.cas(group, stored.version, stored.record), Applied)
        outcome = self._engine.cas(group, expected, record)
        return Unknown("no answer came") if course == "lost" else outcome


@pytest.mark.parametrize(
    "courses",
    [
        [],
        ["lost"],
        ["never"],
        ["late"],
        ["overtaken"],
        ["never", "lost"],
        ["late", "late", "overtaken"],
        ["overtaken", "lost"],
        ["never", "overtaken", "late", "lost"],
    ],
)
def test_a_change_is_made_once_whatever_answers_are_lost(
    members: FakeMembers, courses: list[str]
) -> None:
    calls = []

    def one_more(record: GroupRecord) -> GroupRecord:
        calls.append(record.epoch)
        return GroupRecord(
            group=record.group, epoch=record.epoch + 1, replicas=record.replicas, iss=record.iss,
            min_iss=record.min_iss,
        )  # fmt: skip

    losing: Any = Losing(members.engine, *courses)
    record, version = change(losing, "orders", one_more)
    stored = members.engine.get("orders")
    assert stored == Stored(encode_record(record), version)
    assert record.epoch == 1
    assert set(calls) == {0}


def test_a_change_that_never_comes_is_not_waited_for_for_ever(
    members: FakeMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "CHANGE_S", 0.05)
    losing: Any = Losing(members.engine, *["never"] * 1_000)
    with pytest.raises(EngineUnreachable, match="no answer came; look before you repeat"):
        add(losing, "orders", "n3", "host:1")
    busy: Any = Losing(members.engine, *["overtaken"] * 1_000)
    with pytest.raises(EngineUnreachable, match="others change the record"):
        add(busy, "orders", "n3", "host:1")


def test_a_group_that_is_not_there_is_not_changed(made: ClusterFolder) -> None:
    told = pytest.raises(ConfigError, match="there is no record of a group orders")
    with open_engine(made.file.engine) as engine, told:
        remove(engine, "orders", "n0")


# --- another master -------------------------------------------------------------------------------


def test_the_longest_log_goes_first(served: FakeMembers, looker: Looker) -> None:
    assert longest(looker.look()) == "n2"
    change_of = FailOver(served.engine, looker, None)
    assert (change_of.was, change_of.to, change_of.epoch) == ("n0", "n2", 2)
    record = served.record
    assert (record.master, record.epoch, record.iss) == ("n2", 2, ("n0", "n1", "n2"))
    served.log("n2", 5_000, service=Service.OPEN)
    assert 0 < change_of.wait_served(30) < 30


class Behind:
    """Looks as another does; but a replica has heard of an epoch, and of the next one only later.

    Args:
        looks: how many times it has not.
    """

    def __init__(self, looker: Looker, replica: str, epoch: int, looks: int) -> None:
        self._looker = looker
        self._replica = replica
        self._epoch = epoch
        self.looks = looks

    def look(self) -> GroupStatus:
        found = self._looker.look()
        self.looks -= 1
        epoch = self._epoch + (self.looks < 0)
        return replace(
            found,
            replicas=tuple(
                replace(each, epoch=epoch) if each.name == self._replica else each
                for each in found.replicas
            ),
        )


def test_the_former_master_is_waited_for_until_it_knows(
    served: FakeMembers, looker: Looker
) -> None:
    """Until then it tells members that queues are theirs."""
    behind: Any = Behind(looker, "n0", 1, 1)  # the look before the change
    change_of = FailOver(served.engine, behind, "n1")
    served.log("n1", 5_000, service=Service.OPEN)
    behind.looks = 3
    change_of.wait_served(30)
    assert behind.looks == -1
    behind.looks = 1_000_000
    with pytest.raises(NotReachable, match="n0 has not heard yet that it is the master no more"):
        change_of.wait_served(0.05)


def test_a_former_master_is_removed_once_it_knows(served: FakeMembers, looker: Looker) -> None:
    behind: Any = Behind(looker, "n0", 1, 3)
    served.elect("n1")
    wait_heard(behind, "n0", 30)
    assert behind.looks == -1
    wait_heard(behind, "n9", 30)  # nobody of that name: whoever removes it is told
    behind.looks = 1_000_000
    with pytest.raises(NotReachable, match="n0 has not heard yet"):
        wait_heard(behind, "n0", 0.05)


def test_who_does_not_serve_is_not_waited_for_for_ever(served: FakeMembers, looker: Looker) -> None:
    change_of = FailOver(served.engine, looker, "n1")
    with pytest.raises(NotReachable, match="n1 is the master of epoch 2, and takes no messages"):
        change_of.wait_served(0.05)
    served.elect("n0")
    with pytest.raises(CometError, match="n1 was named, but then n0 was elected, of epoch 3"):
        change_of.wait_served(30)


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("n0", "n0 is the master already"),
        ("n1", "n1 is not in sync, and may lack acknowledged messages"),
        ("n2", "n2 has no session with the engine"),
        ("n7", "orders has no replica n7, but n0, n1, n2"),
        (None, "nobody but the master is in sync: n1: 1 kB behind; n2: "),
    ],
)
def test_who_is_not_named(served: FakeMembers, looker: Looker, to: str | None, says: str) -> None:
    served.leave("n1")
    served.end("n2")
    with pytest.raises(ConfigError, match=says):
        FailOver(served.engine, looker, to)
    assert served.record.epoch == 1


def test_who_is_named_is_looked_at_again_when_the_record_has_changed(
    served: FakeMembers, looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the change the replica left the set."""
    real = served.engine.cas

    def first(group: str, expected: int | None, record: bytes) -> Outcome:
        monkeypatch.setattr(served.engine, "cas", real)
        served.leave("n1")
        outcome = real(group, expected, record)
        assert isinstance(outcome, Refused)
        return outcome

    monkeypatch.setattr(served.engine, "cas", first)
    with pytest.raises(ConfigError, match="n1 is not in sync"):
        FailOver(served.engine, looker, "n1")
    assert served.record.master == "n0"


# --- the command line -----------------------------------------------------------------------------


def said_by(*arguments: str) -> tuple[int, str]:
    done = run("cluster", *arguments)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--engine", "etcd://h:1"],
        ["status", "--group", "g"],
        ["watch", "--store", "x", "--group", "g", "--engine", "etcd://h:1"],
        ["failover", "--store", "x", "-c", "y"],
        ["status", "--store", "x", "--set", "groupEngineUser=me"],
        ["init"],
        ["init", "--store", "x", "--replicas", "2"],
        ["init", "--store", "x", "--replicas", "16"],
        ["init", "--store", "x", "--min-in-sync", "1"],
        ["remove", "--store", "x"],
        ["add", "n3", "--engine", "etcd://h:1", "--group", "g"],
        ["start"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    code, said = said_by(*arguments)
    assert code == 2, said


def test_no_cluster_is_there(tmp_path: Path) -> None:
    for command in (["status"], ["watch"], ["failover"], ["run"], ["remove", "n1"]):
        code, said = said_by(*command, "--store", str(tmp_path))
        assert (code, "`cometmq cluster init` makes one" in said) == (1, True)
    engine = tmp_path / "engine"
    code, said = said_by("status", "--engine", f"sqlite:{engine}", "--group", "g")
    assert (code, "no engine is there" in said) == (3, True)
    assert not engine.exists()


def test_status_of_a_cluster_that_was_never_run(made: ClusterFolder) -> None:
    with open_engine(made.file.engine):
        pass
    done = run("cluster", "status", "--store", str(made.path), "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["version"], found["replicas"]) == (0, [])
    with open_engine(made.file.engine) as engine:
        ensure_formed(made, engine)
    done = run("cluster", "status", "--store", str(made.path), "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert "start n0" in done.stderr.decode()
    assert found["name_server"] == f"tcp://{made.file.name_server}"
    assert (found["group"], found["epoch"], found["master"], found["serves"]) == (
        "orders", 0, None, False,
    )  # fmt: skip
    assert [each["why"] for each in found["replicas"]] == ["it was never started"] * 3


def test_status_of_one_that_serves(served: FakeMembers) -> None:
    store = str(served.folder.path)
    found = json_of("cluster", "status", "--store", store)
    assert set(found) >= {
        "name_server", "group", "epoch", "master", "min_in_sync", "version", "replicas",
    }  # fmt: skip
    assert set(found["replicas"][1]) == {
        "name", "role", "address", "pid", "epoch", "in_sync", "lag_bytes", "lag_s", "why",
    }  # fmt: skip
    lines = output_of("cluster", "status", "--store", store).decode().splitlines()
    assert lines[0].split("\t")[:3] == ["replica", "role", "in_sync"]
    assert [line.split("\t")[:3] for line in lines[1:]] == [
        ["n0", "master", "true"],
        ["n1", "follower", "true"],
        ["n2", "follower", "true"],
    ]
    conf = str(served.folder.path / "n1/broker.conf")
    assert json_of("cluster", "status", "-c", conf)["master"] == "n0"
    engine = served.folder.file.engine
    assert json_of("cluster", "status", "--engine", engine, "--group", "orders")["serves"]


def test_watch_tells_what_happens(served: FakeMembers) -> None:
    process = start("cluster", "watch", "--store", str(served.folder.path), "-o", "json")
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["changes"] == [
            "group orders, epoch 1: n0 is master; in sync: n0, n1, n2"
        ]
        served.leave("n2")
        assert json.loads(process.stdout.readline())["changes"] == [
            "n2 is no longer in sync: it has not joined yet"
        ]
        served.end("n0")
        found = json.loads(process.stdout.readline())
        assert found["changes"][0] == "there is no master; it was n0"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=patient(60))
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


def test_failover_by_hand(served: FakeMembers) -> None:
    store = str(served.folder.path)
    code, said = said_by("failover", "--store", store, "--to", "n0")
    assert (code, "n0 is the master already" in said) == (1, True)
    served.log("n1", 5_000, service=Service.OPEN)
    out = output_of("cluster", "failover", "--store", store, "--to", "n1").decode()
    assert out.startswith("n1 serves; messages were not taken for ")
    assert served.record.master == "n1"
    engine = served.folder.file.engine
    out = output_of("cluster", "failover", "--engine", engine, "--group", "orders").decode()
    assert "is the master of epoch 3, it was n1; whether it serves yet" in out


@pytest.mark.slow
def test_replicas_are_added_and_removed_by_hand(served: FakeMembers) -> None:
    path = served.folder.path
    code, said = said_by("add", "--store", str(path), "n3")
    assert (code, f"cometmq cluster run --store {path} n3" in said) == (0, True)
    assert served.record.replicas["n3"].address == ClusterFolder(path).replica("n3").address
    assert said_by("add", "--store", str(path), "n3")[0] == 1
    code, said = said_by("remove", "--store", str(path), "n0")
    assert (code, "n0 is the master: name another one first" in said) == (1, True)
    assert said_by("remove", "--store", str(path), "n1")[0] == 0
    assert set(served.record.replicas) == {"n0", "n2", "n3"}
    assert [each.name for each in ClusterFolder(path).replicas] == ["n0", "n2", "n3"]
    code, said = said_by("remove", "--store", str(path), "n3")
    assert (code, "2 replicas: a group that fails over" in said) == (1, True)


def test_a_removal_that_came_half_way_is_gone_on_with(served: FakeMembers) -> None:
    """Killed between the group's record and the folder; an addition between folder and record."""
    path = served.folder.path
    served.folder.add("n3", None)
    assert said_by("add", "--store", str(path), "n3")[0] == 0
    remove(served.engine, "orders", "n1")
    assert said_by("remove", "--store", str(path), "n1")[0] == 0
    assert [each.name for each in ClusterFolder(path).replicas] == ["n0", "n2", "n3"]
    code, said = said_by("remove", "--store", str(path), "n1")
    assert (code, "orders has no replica n1" in said) == (1, True)


def test_a_cluster_that_is_there_stays_as_it_was_made(made: ClusterFolder) -> None:
    for option, value in [
        ("--replicas", "5"), ("--min-in-sync", "3"), ("--port", "30000"), ("--group", "other"),
        ("--engine", "etcd://h:1"), ("--set", "flushDiskType=SYNC_FLUSH"),
    ]:  # fmt: skip
        code, said = said_by("init", "--store", str(made.path), option, value)
        assert (code, option in said) == (1, True), said


def test_a_group_of_another_cluster_is_not_taken(served: FakeMembers, tmp_path: Path) -> None:
    more = ["--engine", served.folder.file.engine, "--group", "orders"]
    code, said = said_by("init", "--store", str(tmp_path / "second"), *more)
    assert (code, "has a group orders already" in said) == (1, True)
    assert not (tmp_path / "second").exists()


def test_the_name_servers_port_is_taken(made: ClusterFolder) -> None:
    host, _, port = made.file.name_server.rpartition(":")
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        code, said = said_by("run", "--store", str(made.path))
    assert code == 1
    assert (
        f"the name server cannot listen on {made.file.name_server}: process {os.getpid()}" in said
    )


@pytest.mark.parametrize("url", ["sqlite:relative/folder", "postgres://127.0.0.1:5432"])
def test_a_broker_whose_engine_can_never_be_opened_does_not_start(
    made: ClusterFolder, url: str
) -> None:
    conf = made.path / "n0" / "broker.conf"
    conf.write_text(conf.read_text().replace(made.file.engine, url))
    done = run("broker", "-c", str(conf))
    assert done.returncode == 1
    assert f"engine = {url!r}: must be sqlite:/folder" in done.stderr.decode()
    assert b"ready" not in done.stdout


@pytest.mark.slow
def test_ready_is_said_once_the_name_server_knows_the_master(served: FakeMembers) -> None:
    """Who sends before that is told that there is none."""
    folder = served.folder
    server = f"tcp://{folder.file.name_server}"
    process = start("cluster", "run", "--store", str(folder.path), "-o", "json")
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        said = b""
        while said.count(b" runs already") < 3:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert not select.select([process.stdout], [], [], 3 * LOOK_S)[0]
        host, group = "tcp://127.0.0.1:1", folder.file.group
        with Channel(server) as channel:
            for broker_id in (1, 0):
                assert not select.select([process.stdout], [], [], 0)[0]
                ends = BrokerEndpoints(group, group, broker_id, host, [host], host)
                channel.ask(RegisterBroker(ends, TopicList([], run=1, version=0), 1 - broker_id))
        assert json.loads(process.stdout.readline())["master"] == "n0"
    finally:
        process.kill()  # at an orderly end it would end the replicas, which this process is
        process.communicate()


def test_replicas_that_do_not_start_are_told_and_ctrl_c_ends_it(made: ClusterFolder) -> None:
    made.store_of("n0").write_text("no folder")
    made.store_of("n1").write_text("no folder")
    conf = made.path / "n2/broker.conf"
    conf.write_text(conf.read_text().replace("dLegerSelfId=n2", "dLegerSelfId=n9"))
    process = start("cluster", "run", "--store", str(made.path))
    try:
        assert process.stderr is not None
        said = ""
        while said.count("to start it again: ") < 3:
            line = process.stderr.readline().decode()
            assert line, said
            said += line
        assert said.count(" does not start: ") == 3
        assert "n2 does not start: dLegerSelfId = n9: must be one of dLegerPeers" in said
        assert said.count(" has ended with status 1") == 2
        code, told = said_by("run", "--store", str(made.path))
        assert (code, f"process {process.pid} runs this cluster" in told) == (1, True)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=patient(60))
        assert (process.returncode, out) == (0, b"")
    finally:
        process.kill()
        process.communicate()
