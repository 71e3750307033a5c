"""Groups from RocketMQ's store with names that no client may use, and groups that are deleted while
they are listed: one bad group never ends a list (Fault 23)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cometmq import Admin, Broker, errors
from cometmq.cli.group_settings import delete
from cometmq.cli.groups import describe, list_groups
from cometmq.cli.spark.traffic import lag
from cometmq.spark.jobs.lag import LagSampler

COUNT = 5
# Keys of RocketMQ's table: the group is the part behind the first "@".
ODD = {
    "T@Group@broadcast": "Group@broadcast",
    "T@@": "@",
    "T@a b": "a b",
    "T@": "",
    "naked": "",
    "T@" + "x" * 300: "x" * 300,
    "T@ü/..": "ü/..",
    "no such topic@G": "G",
    "@H": "H",
}
GOOD = ["billing", "shipping"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store as RocketMQ leaves it, with a valid consumerOffset.json."""
    folder = tmp_path_factory.mktemp("odd") / "store"
    with Broker(folder, profile="test") as broker, broker.producer() as producer:
        producer.send_many("T", [b"x"] * COUNT, queue_id=0)
        producer.send("U", b"y")
    table = {key: {"0": 1} for key in (*ODD, *(f"T@{name}" for name in GOOD))}
    (folder / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    return folder


@pytest.fixture
def broker(store: Path, tmp_path: Path) -> Iterator[Broker]:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    with Broker(copy, profile="test") as running:
        yield running


def output_of(command: Any, *arguments: str, broker: Broker) -> Any:
    done = CliRunner().invoke(
        command, [*arguments, "-o", "json", "--name-server", broker.name_server]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def test_every_group_is_listed(broker: Broker) -> None:
    (rows,) = output_of(list_groups, broker=broker)
    lags = {row["group"]: row["lag"] for row in rows}
    assert set(lags) == {*ODD.values(), *GOOD}
    assert lags["billing"] == lags["Group@broadcast"] == lags["a b"] == COUNT - 1
    with Admin(broker.name_server) as admin:
        assert {each.group for each in admin.groups()} == set(lags)
        for group, wanted in lags.items():
            assert admin.describe_group(group).lag == wanted


def test_every_group_is_described(broker: Broker) -> None:
    for group in {*ODD.values(), *GOOD}:
        (found,) = output_of(describe, group, broker=broker)
        assert found["group"] == group


def test_every_group_has_a_lag_for_spark(broker: Broker) -> None:
    sampler = LagSampler(broker.name_server)
    try:
        rows = sampler.sample()
        assert sampler.refused == {}
    finally:
        sampler.close()
    first = {row.group: row for row in rows if (row.topic, row.queue_id) == ("T", 0)}
    assert first["Group@broadcast"].committed == first["billing"].committed == 1
    assert first["Group@broadcast"].lag_messages == COUNT - 1
    assert {row.group for row in rows} == {*ODD.values(), *GOOD}


@pytest.mark.parametrize("by", ["admin", "command line"])
def test_odd_group_can_be_deleted(store: Path, tmp_path: Path, by: str) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    odd = set(ODD.values())
    with Broker(copy, profile="test") as broker, Admin(broker.name_server) as admin:
        for group in sorted(odd):
            if by == "admin":
                admin.delete_group(group)
            else:
                done = CliRunner().invoke(
                    delete, ["-y", group, "--name-server", broker.name_server]
                )
                assert done.exit_code == 0, done.output
        assert [each.group for each in admin.groups()] == GOOD
        assert admin.describe_group("billing").lag == COUNT - 1
        for group in odd:
            with pytest.raises((errors.GroupNotExist, errors.NameIllegal)):
                admin.delete_group(group)
    with Broker(copy, profile="test") as broker, Admin(broker.name_server) as admin:
        assert [each.group for each in admin.groups()] == GOOD
    assert "broadcast" not in (copy / "config" / "consumerOffset.json").read_text()


def test_group_that_no_client_may_use_is_not_made(broker: Broker) -> None:
    """A group with an illegal name can be described and deleted, but not created."""
    with Admin(broker.name_server) as admin:
        for group in ("Group@broadcast", "a b"):
            with pytest.raises(errors.NameIllegal):
                admin.create_group(group)
            with pytest.raises(errors.NameIllegal):
                admin.update_group(group, {"consumeEnable": False})
            with pytest.raises(errors.NameIllegal):
                admin.reset_offsets(group, "T", "earliest")
            with pytest.raises(errors.NameIllegal):
                broker.consumer(group, "T")
        for group in ("never@there", "Z" * 400):
            with pytest.raises(errors.NameIllegal):
                admin.describe_group(group)
        with pytest.raises(errors.GroupNotExist):
            admin.describe_group("never-there")
        with pytest.raises(errors.NameIllegal, match="the broker's own"):
            admin.delete_group("CID_RMQ_SYS_TRANS")


@pytest.fixture
def deletes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete a group right after the groups are listed."""
    groups = Admin.groups

    def and_delete(self: Admin) -> Any:
        found = groups(self)
        if "billing" in [each.group for each in found]:
            self.delete_group("billing")
        return found

    monkeypatch.setattr(Admin, "groups", and_delete)


def test_group_that_is_deleted_meanwhile_is_left_out(
    broker: Broker, deletes_meanwhile: None
) -> None:
    (rows,) = output_of(list_groups, broker=broker)
    assert {row["group"] for row in rows} == {*ODD.values(), "shipping"}


def test_lag_of_a_group_that_is_deleted_meanwhile(broker: Broker, deletes_meanwhile: None) -> None:
    done = CliRunner().invoke(lag, ["-o", "json", "--name-server", broker.name_server])
    assert "group billing is omitted: group billing is unknown" in done.stderr
    assert '"shipping"' in done.stdout
    assert '"billing"' not in done.stdout


def test_named_group_that_goes_between_samples(broker: Broker) -> None:
    with (
        closing(LagSampler(broker.name_server, ["nobody"])) as unknown,
        pytest.raises(errors.GroupNotExist),
    ):
        unknown.sample()
    sampler = LagSampler(broker.name_server, ["billing", "shipping"])
    try:
        assert {row.group for row in sampler.sample()} == {"billing", "shipping"}
        with Admin(broker.name_server) as admin:
            admin.delete_group("billing")
        assert {row.group for row in sampler.sample()} == {"shipping"}
        assert list(sampler.refused) == ["billing"]
    finally:
        sampler.close()


def test_row_that_a_broker_refuses_ends_no_list(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lag that the broker refuses to report, such as an older one, is shown as unknown."""
    described = Admin.describe_group

    def refusing(self: Admin, group: str) -> Any:
        if group == "a b":
            raise errors.NameIllegal("group name 'a b': no")
        return described(self, group)

    monkeypatch.setattr(Admin, "describe_group", refusing)
    done = CliRunner().invoke(list_groups, ["-o", "json", "--name-server", broker.name_server])
    assert done.exit_code == 0
    rows = {row["group"]: row for row in json.loads(done.stdout)}
    assert rows["a b"]["lag"] is None
    assert rows["billing"]["lag"] == COUNT - 1
    assert "the lag of group a b is unknown: group name 'a b': no" in done.stderr
