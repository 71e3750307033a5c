"""Topics and routes: commands to the coordinator, and to the name server."""

from __future__ import annotations

from typing import Annotated

from cometmq.protocol.commands.root import (
    EVERY,
    Answer,
    Command,
    On,
    Part,
    ServedBy,
    Since,
    administer,
    by_brokers,
    by_clients,
    create,
    describe,
)
from cometmq.protocol.integers import Int32, Int64


class TopicInfo(Part, frozen=True, gc=False):
    topic: str
    read_queues: Int32 = 8
    write_queues: Int32 = 8
    perm: Int32 = 6  # 4 read, 2 write, 1 inherit


class BrokerEndpoints(Part, frozen=True):
    """Where the processes of one broker listen, as ZeroMQ addresses."""

    cluster: str
    broker: str
    broker_id: Int64
    commitlog: str
    readers: list[str]
    coordinator: str


class BrokerRoute(Part, frozen=True):
    endpoints: BrokerEndpoints
    info: TopicInfo


class TopicRoute(Answer, frozen=True, tag=30):
    """Which brokers serve a topic, and with how many queues."""

    topic: str
    brokers: list[BrokerRoute]


class EnsureTopic(Command, frozen=True, tag=31):
    """The topic's route on this broker; made with defaults if unknown and allowed. -> TopicRoute"""

    access = by_clients(create("topic"), later=True)

    topic: str


class GetRoute(Command, frozen=True, tag=62):
    """-> TopicRoute, or Failed(17). Brokers are listed by name."""

    access = by_clients(describe("topic"), served_by=ServedBy.EVERY)

    topic: str


class ListTopics(Command, frozen=True, tag=34):
    """The topics that have changed since a version: a page. -> TopicList

    Whoever has nothing begins with 0, 0. Without `paged`, what does not fit into one answer is
    refused.
    """

    access = by_clients(describe(EVERY), served_by=ServedBy.EVERY)

    run: Annotated[Int64, Since("0.2.0")] = 0  # of the coordinator that has given the version
    since: Annotated[Int64, Since("0.2.0")] = 0
    paged: Annotated[bool, Since("0.2.0")] = False


class TopicList(Answer, frozen=True, tag=35):
    """A page of a broker's topics: all changes in (since, version]; see protocol/topics.py."""

    topics: list[TopicInfo]
    removed: Annotated[list[str], Since("0.2.0")] = []
    # Versions of another run of the coordinator say nothing.
    run: Annotated[Int64, Since("0.2.0")] = 0
    # For whoever has this version; 0 = for anybody, it is the first page.
    since: Annotated[Int64, Since("0.2.0")] = 0
    version: Annotated[Int64, Since("0.2.0")] = 0
    complete: Annotated[bool, Since("0.2.0")] = True  # False: more pages follow


class TopicsKnown(Answer, frozen=True, tag=36):
    """How far the process that was told has come with the topics; 0, 0: it has none."""

    run: Int64
    version: Int64


class ListBrokers(Command, frozen=True, tag=63):
    """-> BrokerList"""

    access = by_clients(describe(EVERY, On.BROKER), served_by=ServedBy.EVERY)


class BrokerList(Answer, frozen=True, tag=64):
    brokers: list[BrokerEndpoints]


class RegisterBroker(Command, frozen=True, tag=65):
    """A broker, and a page of its topics; without news, the sign of life of every 30 s.

    -> TopicsKnown. Refused when another live broker has the same name and id at other endpoints,
    or, alive or not, a later epoch, by 1,000 at most. One of a later epoch replaces the other at
    once.

    Args:
        epoch: of a group that elects its master, that this broker is the master of; 0: of none; at
            most 2^40.
    """

    access = by_brokers(administer(EVERY, On.BROKER), later=True, served_by=ServedBy.EVERY)
    new_in = "0.2.0"

    endpoints: BrokerEndpoints
    topics: TopicList
    epoch: Annotated[Int64, Since("0.2.0")] = 0


class UnregisterBroker(Command, frozen=True, tag=61):
    """-> Done, also where it concerns an earlier epoch than the one that is registered."""

    access = by_brokers(administer(EVERY, On.BROKER), served_by=ServedBy.EVERY)

    cluster: str
    broker: str
    broker_id: Int64
    epoch: Annotated[Int64, Since("0.2.0")] = 0
