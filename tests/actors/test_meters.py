"""Meters: declarations of all figures, and docs/statistics.md, which is printed from them.

After a change, docs/contributing.md says how the page is printed.
"""

from __future__ import annotations

from pathlib import Path

from cometmq.actors.runtime import meters
from cometmq.cli.stat_replication import slaves_in
from cometmq.cluster.looking import followers_in
from tests.actors.test_ha import master
from tests.kit.family import RunningBroker

ROOT = Path(__file__).parents[2]


def test_page_is_printed_from_the_declarations() -> None:
    assert (ROOT / "docs/statistics.md").read_text() == meters.as_markdown()


def test_no_key_is_that_of_two_figures() -> None:
    for meter in meters.METERS.values():
        for key in [meter.of("a.b").key, meter.of("0").key] if meter.label else [meter.key]:
            found = [
                each
                for each in meters.METERS.values()
                if (each.label_in(key) if each.label else each.key == key)
            ]
            assert found == [meter], key


def test_label_may_contain_any_character() -> None:
    for label in ("n0", "a.b", ".connected", "peer.x.address", "{replica}", ""):
        values = meters.values_of({meters.PEER_ADDRESS.of(label): "here"})
        found = meters.by_label(values, meters.PEER_ADDRESS, meters.PEER_CONNECTED)
        assert found == ({label: {"address": "here"}} if label else {})


def test_readers_of_replication_figures() -> None:
    values = meters.values_of(
        {
            meters.PID: 7,
            meters.SLAVES: 1,
            meters.SLAVE_ADDRESS.of(0): "10.0.0.1:1",
            meters.SLAVE_LAG_BYTES.of(0): 12,
            meters.FOLLOWER_REPLICA.of(3): "n3",
            meters.FOLLOWER_WHY.of(3): "12 bytes behind",
        }
    )
    slaves, rest = slaves_in(values)
    assert slaves == [{"address": "10.0.0.1:1", "lag_bytes": 12}]
    assert rest["slaves"] == 1
    assert "pid" not in rest
    assert followers_in(values) == {"n3": {"replica": "n3", "why": "12 bytes behind"}}


def test_processes_report_the_declared_figures(tmp_path: Path) -> None:
    with master(tmp_path / "store") as broker:
        check_figures(broker)


def check_figures(broker: RunningBroker) -> None:
    roles = [role for role in broker.statistics() if role.startswith("pid.")]
    assert len(roles) > 6
    for role in ("broker", *(each.removeprefix("pid.") for each in roles)):
        process = role.partition("-")[0]
        declared = {each for each in meters.METERS.values() if process in each.processes}
        for key, value in broker.statistics(role).items():
            kinds = {
                each.kind
                for each in declared
                if (each.label_in(key) if each.label else each.key == key)
            }
            assert kinds, (role, key)
            assert isinstance(value, str) == (kinds == {meters.Kind.TEXT}), (role, key)
