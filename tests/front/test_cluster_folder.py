"""The folder of a cluster on one machine, and how its group is formed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from members import make_cluster

from cometmq.actors.replication.core.record import encode_record
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.peers.secret import load_secret
from cometmq.cluster import folder
from cometmq.cluster.administration import form
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.running import check_new, ensure_formed
from cometmq.errors import (
    ArgumentIllegal,
    ConfigError,
    StoreError,
    StoreLocked,
)
from cometmq.shm.os.durable import replace_file

# --- the folder -----------------------------------------------------------------------------------


def test_a_folder_has_what_each_replica_needs(made: ClusterFolder) -> None:
    file = made.file
    assert [each.name for each in made.replicas] == ["n0", "n1", "n2"]
    assert len({file.name_server, *(each.address for each in made.replicas)}) == 4
    for each in made.replicas:
        settings = made.settings_of(each.name)
        assert settings.own_peer == (each.name, each.address)
        assert settings.group_name == settings.broker_name == "orders"
        assert settings.min_iss == 2
        assert settings.name_servers == (file.name_server,)
        assert settings.store_path_root_dir == made.path / each.name / "store"
        secret = Path(settings.group_secret_file)
        assert load_secret(secret)
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert ClusterFolder(made.path).file == file


def test_ports_follow_the_name_servers(tmp_path: Path) -> None:
    file = make_cluster(tmp_path / "c", port=30_000).file
    assert file.name_server == "127.0.0.1:30000"
    assert [each.address for each in file.replicas] == [f"127.0.0.1:3000{n}" for n in (1, 2, 3)]
    with pytest.raises(ConfigError, match="would go up to 65536"):
        make_cluster(tmp_path / "d", port=65_533)
    make_cluster(tmp_path / "e", port=65_532)


@pytest.mark.parametrize("name", ["a\\tb", "ü und 消息", "a=b:c #!", "{}%"])
def test_any_folder_name_comes_back(tmp_path: Path, name: str) -> None:
    made = make_cluster(tmp_path / name)
    assert made.settings_of("n1").store_path_root_dir == tmp_path / name / "n1/store"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "a.b"}, "dLegerGroup = a.b: a group's name is 1 to 120 of"),
        ({"group": "x" * 121}, "a group's name is 1 to 120 of"),
        ({"min_in_sync": 4}, "min_iss = 4, but there are 3 replicas"),
        ({"replicas": 2}, "2 replicas: a group that fails over by itself has 3 to 15"),
        ({"replicas": 16}, "16 replicas"),
        ({"settings": {"brokerName": "x"}}, "--set brokerName: the cluster says that"),
        ({"settings": {"noSuchKey": "x"}}, "--set noSuchKey: there is no such setting"),
        ({"settings": {"groupEngineUser": "x"}}, "--set groupEngineUser: of an engine elsewhere"),
        ({"settings": {"haListenPort": "1"}}, "haListenPort = 1: a group has no other slaves"),
        ({"settings": {"flushDiskType": "SOMETIMES"}}, "flushDiskType = SOMETIMES"),
    ],
)
def test_what_cannot_be_made_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        make_cluster(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_settings_of_users_are_in_each_broker_conf(tmp_path: Path) -> None:
    made = make_cluster(tmp_path / "c", settings={"flushDiskType": "SYNC_FLUSH"})
    assert made.settings_of("n2").flush_disk_type.value == "SYNC_FLUSH"
    made.add("n3", None)
    assert made.settings_of("n3").flush_disk_type.value == "SYNC_FLUSH"


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("2026")
    with pytest.raises(StoreError, match=r"has other things in it: thesis\.tex"):
        make_cluster(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("writes", range(4))
def test_a_folder_that_is_half_made_is_gone_on_with(
    tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each of its files."""
    left = [writes]

    def dying(*arguments: Any, **more: Any) -> None:
        if left[0] == 0:
            raise InterruptedError
        left[0] -= 1
        replace_file(*arguments, **more)

    monkeypatch.setattr(folder, "replace_file", dying)
    with pytest.raises(InterruptedError):
        make_cluster(tmp_path / "c")
    assert not ClusterFolder.is_at(tmp_path / "c")
    monkeypatch.setattr(folder, "replace_file", replace_file)
    made = make_cluster(tmp_path / "c")
    assert [made.settings_of(each.name).d_leger_self_id for each in made.replicas] == [
        "n0", "n1", "n2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read"),
        (b"{}", "cannot be read"),
        (b"[" * 60_000, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"version": 2', "cannot be read"),
    ],
)
def test_a_file_that_is_none(made: ClusterFolder, content: bytes, says: str) -> None:
    (made.path / "cluster.json").write_bytes(content)
    with pytest.raises(StoreError, match=says):
        ClusterFolder(made.path)


def test_a_later_version_is_not_guessed_at(made: ClusterFolder) -> None:
    path = made.path / "cluster.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(StoreError, match="is of version 2, this is 1"):
        ClusterFolder(made.path)


def test_a_folder_that_was_moved_is_not_run(made: ClusterFolder, tmp_path: Path) -> None:
    made.path.rename(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"was made in .*try, and what it names is there"):
        ClusterFolder(tmp_path / "moved")
    (tmp_path / "try").symlink_to(tmp_path / "moved")
    ClusterFolder(tmp_path / "try")


def test_one_process_runs_a_cluster(made: ClusterFolder) -> None:
    second = ClusterFolder(made.path)
    told = pytest.raises(StoreLocked, match=f"process {os.getpid()} runs this cluster")
    with made.lock(), told, second.lock():
        pass
    with ClusterFolder(made.path).lock():
        pass


def test_replicas_that_are_added_and_removed_keep_their_places(made: ClusterFolder) -> None:
    """Their place in dLegerPeers is their brokerId."""
    place = made.add("n3", None)
    assert made.add("n3", None) == place  # an attempt that did not come to its end
    made.remove("n1")
    made.add("n4", "127.0.0.1:39999")
    found = ClusterFolder(made.path)
    assert [each.name for each in found.replicas] == ["n0", "n2", "n3", "n4"]
    peers = [peer.replica for peer in found.settings_of("n4").group_peers]
    assert peers == ["n0", "n1", "n2", "n3", "n4"]
    with pytest.raises(ArgumentIllegal, match="no replica 'n1', but n0, n2, n3, n4"):
        found.replica("n1")
    assert found.add("n1", None).name == "n1"
    assert [each.name for each in found.replicas] == ["n0", "n1", "n2", "n3", "n4"]


def test_a_replica_begins_with_an_empty_store(made: ClusterFolder) -> None:
    made.remove("n1")
    made.store_of("n1").mkdir()
    (made.store_of("n1") / "commitlog").mkdir()
    with pytest.raises(StoreError, match="begins with an empty store"):
        made.add("n1", None)


# --- the record -----------------------------------------------------------------------------------


def test_a_group_is_formed_once(made: ClusterFolder) -> None:
    with open_engine(made.file.engine) as engine:
        check_new(made.file.engine, "orders")
        pairs = [(each.name, each.address) for each in made.replicas]
        record = form(engine, "orders", pairs, 2)  # and killed before it was noted
        ensure_formed(made, engine)
        assert ClusterFolder(made.path).file.formed
        stored = engine.get("orders")
        assert stored is not None
        assert stored.record == encode_record(record)
        ensure_formed(made, engine)
        assert engine.get("orders") == stored
        with pytest.raises(ConfigError, match="has a group orders already"):
            check_new(made.file.engine, "orders")
        with pytest.raises(ConfigError, match="has a group orders already, of n0 at "):
            form(engine, "orders", [(f"n{n}", f"elsewhere:{n + 1}") for n in range(3)], 2)


def test_a_record_that_was_lost_is_not_made_anew(made: ClusterFolder) -> None:
    """Its first replica would be master, whatever the others have acknowledged."""
    with open_engine(made.file.engine) as engine:
        ensure_formed(made, engine)
        stored = engine.get("orders")
        assert stored is not None
        engine.delete("orders", stored.version)
        with pytest.raises(StoreError, match="has lost the record of group orders"):
            ensure_formed(made, engine)
        assert engine.get("orders") is None
