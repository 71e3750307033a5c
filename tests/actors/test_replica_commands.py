"""A replica that is not the master refuses commands with NotMaster, never as unknown commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import group_member
import msgspec
import pytest
from family import RunningBroker
from group_member import replica_settings
from msgspec import inspect
from patience import patient
from ports import free_ports

from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.replication.slaves.coordinator import SlaveCoordinatorActor
from cometmq.actors.replication.slaves.follower import FollowerActor
from cometmq.actors.runtime.roles import ROLES
from cometmq.actors.runtime.service import ServiceActor, doorman_of, handled_by
from cometmq.actors.writer.commitlog import CommitLogActor
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import (
    Answer,
    Audience,
    Command,
    Finish,
    OpenProducer,
    PassedHalf,
    PassHalves,
    ServedBy,
)
from cometmq.protocol.errors import CometError, NotMaster, UnknownCommand
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)
MASTERS: dict[str, type[ServiceActor]] = {
    "commitlog": CommitLogActor,
    "coordinator": CoordinatorActor,
}
SLAVES: dict[str, type[ServiceActor]] = {
    "commitlog": FollowerActor,
    "coordinator": SlaveCoordinatorActor,
}


def handled(actor: type[ServiceActor]) -> set[type[Command]]:
    """Return the commands that an actor of that class handles."""
    owners = (actor, *actor.part_types)
    return {kind for owner in owners for kind in handled_by(owner)}


def sample(kind: inspect.Type) -> Any:
    """Return an arbitrary value of that type."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(*(sample(field.type) for field in fields))
        case inspect.ListType(item_type=item):
            return [sample(item)]
        case inspect.DictType():
            return {}
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b""
        case inspect.BoolType():
            return False
        case inspect.UnionType(types=types):
            return None if any(isinstance(each, inspect.NoneType) for each in types) else 0
    return 0


def refused(role: str) -> list[type[Command]]:
    """Return the commands that the role handles only on a master."""
    found = [each for each in handled(MASTERS[role]) if each.access.served_by is not ServedBy.EVERY]
    return sorted(found, key=lambda each: each.__name__)


def test_every_actor_with_a_stand_in_is_looked_at() -> None:
    """Fault 19: the tables of this module have every role with an actor for slaves."""
    roles = {role.name for role in ROLES if role.slave_actor}
    assert roles == MASTERS.keys() == SLAVES.keys()
    for role in ROLES:
        if role.slave_actor:
            slave = BrokerSettings(
                broker_role="SLAVE", broker_id=1, broker_name="b", ha_master_address="127.0.0.1:1"
            )
            assert role.load(BrokerSettings()) is MASTERS[role.name]
            assert role.load(slave) is SLAVES[role.name]


@pytest.mark.parametrize("role", MASTERS)
def test_a_slave_admits_what_its_master_takes(role: str) -> None:
    """Fault 19: a slave admits the commands of its master's actor, from the same principals."""
    kinds = [
        (type_, *type_.part_types, *type_.masters_types())
        for type_ in (MASTERS[role], SLAVES[role])
    ]
    master, slave = (doorman_of(role, *each) for each in kinds)
    assert master._takes <= slave._takes
    assert master._from_outside <= slave._from_outside


def test_a_follower_handles_nothing_that_is_its_masters() -> None:
    """Fault 19: a follower has no handler for a command that only a master serves."""
    kinds = {each for each in handled(FollowerActor) if each.access.served_by is ServedBy.MASTER}
    assert kinds == set()


@pytest.fixture(scope="module", params=["follower", "slave"])
def replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningBroker]:
    """A replica of a group that elects its master, and a slave with a fixed master."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "follower":
            replica = RunningBroker(folder / "n0", replica_settings(), module=group_member.MODULE)
        else:
            port = free_ports(1)
            stack.enter_context(
                RunningBroker(folder / "master", {"haListenPort": port, "brokerName": "b"})
            )
            address = f"127.0.0.1:{port}"
            settings: dict[str, Any] = {"brokerRole": "SLAVE", "brokerId": 1, "brokerName": "b"}
            settings["haMasterAddress"] = address
            replica = RunningBroker(folder / "slave", settings)
        with replica:
            yield replica


@pytest.mark.slow
@pytest.mark.parametrize("role", MASTERS)
def test_all_of_it_is_refused_with_not_master(replica: RunningBroker, role: str) -> None:
    """Fault 19: all commands on the address for broker processes, and those of clients on the
    address for clients, are answered with NotMaster."""
    is_in_group = replica.settings.get("enableDLegerCommitLog", False)
    answered: dict[str, str] = {}
    with Channel(replica.address(role), role) as family:
        for kind in refused(role):
            if kind.access.served_by is ServedBy.SLAVE and not is_in_group:
                continue
            command = sample(inspect.type_info(kind))
            channels = {"family": family}
            if kind.access.audience is not Audience.FAMILY:
                channels["clients"] = getattr(replica, role)
            for name, channel in channels.items():
                payload = [b"x"] * len(getattr(command, "sections", ()))
                try:
                    answer = channel.ask(command, payload, timeout_s=WAIT_S)[0]
                    outcome = type(answer).__name__
                except CometError as error:
                    outcome = type(error).__name__
                answered[f"{kind.__name__} of {name}"] = outcome
    wrong = {key: name for key, name in answered.items() if name != "NotMaster"}
    assert not wrong
    assert len(answered) > len(refused(role))  # most are sent to both addresses


@pytest.mark.slow
def test_nothing_of_it_is_unknown(replica: RunningBroker) -> None:
    """Fault 19: commands that a hand-written list lacked are refused with NotMaster."""
    halves = PassHalves([PassedHalf(0, 0, 1, False)])
    for command in (OpenProducer("name", 1), OpenProducer("name", 1, 7), halves):
        with pytest.raises(NotMaster):
            replica.ask("commitlog", command)
    with pytest.raises(UnknownCommand, match="not taken from outside"):
        replica.commitlog.ask(halves, timeout_s=WAIT_S)


def test_what_every_replica_serves_is_declared() -> None:
    """Fault 19: a command without a declaration belongs to the master."""
    for kind in (CoordinatorActor, CommitLogActor):
        for command in handled(kind):
            assert not issubclass(command, Answer)
    assert Finish.access.served_by is ServedBy.EVERY
    assert OpenProducer.access.served_by is ServedBy.MASTER
    assert msgspec.msgpack.encode(Finish()) == b"\x91\x04"
