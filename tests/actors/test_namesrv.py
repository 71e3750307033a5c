"""The name server, through its socket."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pykka
import pytest
import zmq
from coordinator_child import ANYWHERE, INSIDE, address_of, coordinator, running
from patience import patient
from ports import free_ports

from cometmq.actors.coordination import namesrv
from cometmq.actors.coordination.namesrv import EPOCH_MAX, STALE_MAX, NameServerActor
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.commands import (
    BrokerEndpoints,
    BrokerList,
    Command,
    Done,
    GetRoute,
    GetStatistics,
    JoinGroup,
    ListBrokers,
    Ping,
    Pong,
    RegisterBroker,
    Statistics,
    TopicInfo,
    TopicList,
    TopicRoute,
    TopicsKnown,
    UnregisterBroker,
)
from cometmq.protocol.errors import (
    BadRequest,
    NameIllegal,
    Refused,
    SystemBusy,
    TopicNotExist,
    UnknownCommand,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.remote import RemoteRef

GONE = "tcp://127.0.0.1:1"


def test_a_name_server_that_is_away_is_told_of_and_when_it_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the broker says that it is ready: whoever asks there does not find it."""
    port = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    with coordinator(tmp_path, name_servers=[address], confirm_timeout_s=0.3):
        (said,) = [each.getMessage() for each in caplog.records if address in each.getMessage()]
        assert said.startswith(f"the name server {address} has not confirmed the topics: ")
        assert "clients that ask it do not find this broker (is namesrvAddr right?). It is" in said
        with running(NameServerActor.start(bind=[(address, False)])) as names:
            deadline = time.monotonic() + patient(30)
            while f"{address} answers, and has the topics" not in caplog.text:
                assert time.monotonic() < deadline, caplog.text
                time.sleep(0.02)
            assert isinstance(names.ask(ListBrokers()), BrokerList)


@pytest.fixture
def server() -> Iterator[RemoteRef]:
    with running(NameServerActor.start(bind=[(ANYWHERE, False)], ping_timeout_s=0.2)) as line:
        yield line


def broker(name: str = "b", *, broker_id: int = 0, coordinator: str = GONE) -> BrokerEndpoints:
    return BrokerEndpoints("c", name, broker_id, "tcp://127.0.0.1:2", ["ipc:///r"], coordinator)


def registration(endpoints: BrokerEndpoints, *topics: TopicInfo, epoch: int = 0) -> RegisterBroker:
    """Of all topics, in one page."""
    return RegisterBroker(endpoints, TopicList(list(topics), run=1, version=len(topics)), epoch)


def register(line: RemoteRef, endpoints: BrokerEndpoints, *topics: TopicInfo) -> None:
    assert line.ask(registration(endpoints, *topics)) == TopicsKnown(1, len(topics))


def brokers_at(line: RemoteRef) -> list[BrokerEndpoints]:
    answer = line.ask(ListBrokers())
    assert isinstance(answer, BrokerList)
    return answer.brokers


class FakeCoordinator(ServiceActor):
    """Answers Ping as a coordinator does."""

    role = "coordinator"


class Reader(ServiceActor):
    role = "reader"


def test_a_route_names_every_broker_of_the_topic(server: RemoteRef) -> None:
    register(server, broker("b2"), TopicInfo("t", 4, 4, 6), TopicInfo("u"))
    register(server, broker("b1"), TopicInfo("t", 8, 8, 4))
    route = server.ask(GetRoute("t"))
    assert isinstance(route, TopicRoute)
    assert [(r.endpoints.broker, r.info.read_queues, r.info.perm) for r in route.brokers] == [
        ("b1", 8, 4),
        ("b2", 4, 6),
    ]
    assert [endpoints.broker for endpoints in brokers_at(server)] == ["b1", "b2"]


def test_a_slave_is_read_only(server: RemoteRef) -> None:
    register(server, broker(), TopicInfo("t"))
    register(server, broker(broker_id=1, coordinator="tcp://127.0.0.1:9"), TopicInfo("t"))
    route = server.ask(GetRoute("t"))
    assert isinstance(route, TopicRoute)
    assert [(r.endpoints.broker_id, r.info.perm) for r in route.brokers] == [(0, 6), (1, 4)]


def test_a_registration_replaces_the_one_before(server: RemoteRef) -> None:
    register(server, broker(), TopicInfo("t"))
    register(server, broker(), TopicInfo("u"))
    assert isinstance(server.ask(GetRoute("u")), TopicRoute)
    with pytest.raises(TopicNotExist):
        server.ask(GetRoute("t"))


def test_an_unknown_topic_says_what_is_known(server: RemoteRef) -> None:
    with pytest.raises(TopicNotExist, match="no broker has registered here yet"):
        server.ask(GetRoute("t"))
    register(server, broker(), TopicInfo("u"))
    with pytest.raises(TopicNotExist, match=r"none of the 1 brokers .* \(b; 1 topics in all\)"):
        server.ask(GetRoute("t"))


def test_the_later_epoch_has_the_name_whoever_lives(server: RemoteRef) -> None:
    with running(actor := FakeCoordinator.start(bind=INSIDE)):
        alive = broker(coordinator=address_of(actor))
        server.ask(registration(alive, epoch=3))
        new = broker(coordinator="tcp://127.0.0.1:7")
        server.ask(registration(new, epoch=4))
        assert brokers_at(server) == [new]
        for epoch in (3, 0):
            with pytest.raises(Refused, match=rf"master of epoch 4; one of epoch {epoch} at"):
                server.ask(registration(alive, epoch=epoch))
        server.ask(registration(new, epoch=4))  # every 30 s
        with pytest.raises(Refused):  # a name that has no later epoch is as any other
            server.ask(registration(alive, epoch=3))
        server.ask(UnregisterBroker("c", "b", 0, 3))
        assert brokers_at(server) == [new]
        server.ask(UnregisterBroker("c", "b", 0, 4))
        assert brokers_at(server) == []


FAR = [(1 << 63) - 1, (1 << 62) - 1, 1 << 53, EPOCH_MAX + 1]


@pytest.mark.parametrize("claimed", FAR)
@pytest.mark.parametrize("known", [None, 0, 7])
def test_epoch_that_no_election_comes_to_is_refused(
    server: RemoteRef, claimed: int, known: int | None
) -> None:
    """One registration hid a master for as long as anybody repeated it (Fault 17)."""
    if known is not None:
        server.ask(registration(broker(), epoch=known))
    foreign = broker(coordinator="tcp://127.0.0.1:7")
    for endpoints in (foreign, broker()):
        with pytest.raises(BadRequest, match=f"epoch {claimed} of id 0: 0 to {EPOCH_MAX}"):
            server.ask(registration(endpoints, epoch=claimed))
    assert brokers_at(server) == ([] if known is None else [broker()])
    master = broker(coordinator="tcp://127.0.0.1:8")
    server.ask(registration(master, epoch=8))
    assert brokers_at(server) == [master]


@pytest.mark.parametrize("own", [0, 7])
@pytest.mark.parametrize("far", [EPOCH_MAX, 7 + STALE_MAX + 1])
def test_far_epoch_of_a_broker_that_does_not_answer_hides_no_master(
    server: RemoteRef, own: int, far: int
) -> None:
    """Whether it lives is asked, as for one epoch; afterwards all is as ever (Fault 17)."""
    master = broker(coordinator="tcp://127.0.0.1:7")
    server.ask(registration(master, TopicInfo("t"), epoch=own))
    foreign = broker()  # nobody is there
    server.ask(registration(foreign, epoch=far))
    assert brokers_at(server) == [foreign]
    server.ask(registration(master, TopicInfo("t"), epoch=own))
    assert brokers_at(server) == [master]
    assert isinstance(server.ask(GetRoute("t")), TopicRoute)
    later = broker(coordinator="tcp://127.0.0.1:8")
    server.ask(registration(later, epoch=own + 1))
    with pytest.raises(Refused, match=f"master of epoch {own + 1}; one of epoch {own} at"):
        server.ask(registration(master, epoch=own))


def test_far_epoch_of_a_broker_that_answers_keeps_its_name(server: RemoteRef) -> None:
    with running(actor := FakeCoordinator.start(bind=INSIDE)):
        alive = broker(coordinator=address_of(actor))
        server.ask(registration(alive, epoch=EPOCH_MAX))
        with pytest.raises(Refused, match="is alive; another of the same name"):
            server.ask(registration(broker(), epoch=7))
        assert brokers_at(server) == [alive]


def test_far_epoch_in_the_name_of_the_master_itself_is_forgotten(server: RemoteRef) -> None:
    """Somebody else has sent its addresses: the master's next registration counts (Fault 17)."""
    with running(actor := FakeCoordinator.start(bind=INSIDE)):
        master = broker(coordinator=address_of(actor))
        server.ask(registration(master, TopicInfo("t"), epoch=7))
        server.ask(registration(master, epoch=EPOCH_MAX))
        server.ask(registration(master, TopicInfo("t"), epoch=7))
        assert isinstance(server.ask(GetRoute("t")), TopicRoute)
        later = broker(coordinator="tcp://127.0.0.1:8")
        server.ask(registration(later, epoch=8))
        assert brokers_at(server) == [later]


def test_far_epoch_of_an_unregistration_bars_nobody(server: RemoteRef) -> None:
    server.ask(registration(broker(), epoch=7))
    server.ask(UnregisterBroker("c", "b", 0, (1 << 63) - 1))
    server.ask(registration(broker(), epoch=7))
    assert brokers_at(server) == [broker()]


def test_page_of_a_far_version_is_replaced_by_the_master_s(server: RemoteRef) -> None:
    """The first page of another run begins anew, and so does that of the same one (Fault 17)."""
    last = (1 << 63) - 1
    server.ask(registration(broker(), TopicInfo("t")))
    for run in (1, 2, last):
        for since in (0, 1):
            page = TopicList([TopicInfo("foreign")], run=run, since=since, version=last)
            server.ask(RegisterBroker(broker(), page))
            told = server.ask(RegisterBroker(broker(), TopicList([], run=1, since=1, version=1)))
            assert isinstance(told, TopicsKnown)
            if (told.run, told.version) != (1, 1):  # then the master begins at the beginning
                assert server.ask(registration(broker(), TopicInfo("t"))) == TopicsKnown(1, 1)
            assert isinstance(server.ask(GetRoute("t")), TopicRoute)
            with pytest.raises(TopicNotExist):
                server.ask(GetRoute("foreign"))


def test_a_later_epoch_comes_while_somebody_is_asked() -> None:
    """Who claimed the name before hears that it is too late."""
    actor = NameServerActor.start(bind=INSIDE, ping_timeout_s=patient(30))
    with running(actor) as server, Channel(address_of(actor)) as line:
        with zmq.Context.instance().socket(zmq.ROUTER) as silent:
            silent.linger = 0
            port = silent.bind_to_random_port("tcp://127.0.0.1")
            known = broker(coordinator=f"tcp://127.0.0.1:{port}")
            server.ask(registration(known, epoch=3))
            claim = line.request(registration(broker(coordinator="tcp://127.0.0.1:7"), epoch=3))
            silent.recv_multipart()  # so it is asked, and does not answer
            new = broker(coordinator="tcp://127.0.0.1:8")
            server.ask(registration(new, epoch=4))
            assert brokers_at(server) == [new]
        assert line.wait(claim, patient(30), keep=True)
        with pytest.raises(Refused, match="master of epoch 4"):
            claim.result()
        assert brokers_at(server) == [new]


def test_a_connection_has_a_limit_of_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of claims to a name whose broker is silent, half of all places are one connection's."""
    monkeypatch.setattr(namesrv, "CLAIMS_MAX", 4)
    actor = NameServerActor.start(bind=INSIDE, ping_timeout_s=patient(30))
    with (
        running(actor) as server,
        Channel(address_of(actor)) as line,
        zmq.Context.instance().socket(zmq.ROUTER) as silent,
    ):
        silent.linger = 0
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        server.ask(registration(broker(coordinator=f"tcp://127.0.0.1:{port}")))
        held = [
            line.request(registration(broker(coordinator=f"tcp://127.0.0.1:{number}")))
            for number in (7, 8)
        ]
        refused = registration(broker(coordinator="tcp://127.0.0.1:9"))
        with pytest.raises(SystemBusy, match="2 of them of this connection, at most 2"):
            line.ask(refused, timeout_s=patient(10))
        assert not any(pending.done for pending in held)


def test_a_replica_has_one_id(server: RemoteRef) -> None:
    at = "tcp://127.0.0.1:7"
    server.ask(registration(broker(broker_id=2, coordinator=at), TopicInfo("t")))
    server.ask(registration(broker(coordinator=at), TopicInfo("t"), epoch=1))
    other = broker(broker_id=3, coordinator="tcp://127.0.0.1:8")
    server.ask(registration(other, TopicInfo("t")))
    assert [each.broker_id for each in brokers_at(server)] == [0, 3]
    server.ask(registration(broker(broker_id=2, coordinator=at), TopicInfo("t")))
    assert [each.broker_id for each in brokers_at(server)] == [2, 3]
    with pytest.raises(BadRequest, match="masters have one"):
        server.ask(registration(other, epoch=1))


def test_a_claim_of_a_run_that_has_ended_does_not_take_the_next_one_s_place() -> None:
    """A follower asks for a name whose former holder is just being pinged, and becomes master."""
    actor = NameServerActor.start(bind=INSIDE, ping_timeout_s=1.0)
    with running(actor) as server, Channel(address_of(actor)) as line:
        with zmq.Context.instance().socket(zmq.ROUTER) as silent:
            silent.linger = 0
            port = silent.bind_to_random_port("tcp://127.0.0.1")
            server.ask(registration(broker(broker_id=3, coordinator=f"tcp://127.0.0.1:{port}")))
            own = "tcp://127.0.0.1:7"
            claim = line.request(registration(broker(broker_id=3, coordinator=own)))
            silent.recv_multipart()  # so the former holder is asked, and does not answer
            other = broker(broker_id=3, coordinator="tcp://127.0.0.1:8")
            later = line.request(registration(other))
            master = broker(coordinator=own)
            server.ask(registration(master, epoch=2))
            assert line.wait(claim, patient(30), keep=True)
            with pytest.raises(Refused, match="has registered since"):
                claim.result()
            assert line.wait(later, patient(30), keep=True)  # after the time-out of the ping
            later.result()
        assert brokers_at(server) == [master, other]


def test_unregister(server: RemoteRef) -> None:
    register(server, broker(), TopicInfo("t"))
    assert server.ask(UnregisterBroker("c", "b", 0)) == Done()
    assert server.ask(UnregisterBroker("c", "b", 0)) == Done()
    assert brokers_at(server) == []


class Logged(logging.Handler):
    """Sets an event when a line with some words is logged."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.seen.set()


def test_a_silent_broker_is_dropped_and_logged() -> None:
    logged = Logged("broker b (id 0) of cluster c at tcp://127.0.0.1:1 is dropped: silent")
    logger = logging.getLogger("cometmq.actors.coordination.namesrv")
    logger.addHandler(logged)
    try:
        with running(NameServerActor.start(bind=INSIDE, broker_silence_s=0.1)) as line:
            register(line, broker(), TopicInfo("t"))
            assert logged.seen.wait(patient(60))
            assert brokers_at(line) == []
    finally:
        logger.removeHandler(logged)


# --- two brokers of one name ---


def test_a_name_in_use_is_refused(server: RemoteRef) -> None:
    with running(actor := FakeCoordinator.start(bind=INSIDE)):
        register(server, broker(coordinator=address_of(actor)), TopicInfo("t"))
        with pytest.raises(Refused, match="is alive"):
            server.ask(registration(broker()))
        assert [known.coordinator for known in brokers_at(server)] == [address_of(actor)]


@pytest.mark.parametrize("heir", [None, Reader])
def test_the_name_of_a_dead_broker_is_free_at_once(
    server: RemoteRef, heir: type[ServiceActor] | None
) -> None:
    """Even if something else listens at its old address now."""
    old = GONE
    if heir is None:
        register(server, broker(coordinator=old))
        register(server, broker(coordinator="tcp://127.0.0.1:3"), TopicInfo("t"))
    else:
        with running(actor := heir.start(bind=INSIDE)):
            register(server, broker(coordinator=address_of(actor)))
            register(server, broker(coordinator="tcp://127.0.0.1:3"), TopicInfo("t"))
    assert [known.coordinator for known in brokers_at(server)] == ["tcp://127.0.0.1:3"]


def test_of_two_that_claim_a_dead_ones_name_the_first_has_it(server: RemoteRef) -> None:
    register(server, broker())
    outcomes: list[Any] = []
    done = threading.Semaphore(0)

    def on_done(pending: Any) -> None:
        outcomes.append(pending.answer)
        done.release()

    for port in (3, 4):
        claim = registration(broker(coordinator=f"tcp://127.0.0.1:{port}"))
        server._channel.request(claim, on_done=on_done)
    assert done.acquire(timeout=patient(10))
    assert done.acquire(timeout=patient(10))
    assert [type(outcome).__name__ for outcome in outcomes] == ["TopicsKnown", "Failed"]
    assert [known.coordinator for known in brokers_at(server)] == ["tcp://127.0.0.1:3"]


def test_other_endpoints_of_the_same_coordinator_are_taken(server: RemoteRef) -> None:
    register(server, broker())
    moved = BrokerEndpoints("c", "b", 0, "tcp://127.0.0.1:9", [], GONE)
    register(server, moved)
    assert brokers_at(server) == [moved]


# --- hostile input ---


@pytest.mark.parametrize(
    ("endpoints", "topics"),
    [
        (broker(""), []),
        (broker("../b"), []),
        (broker("b", broker_id=-1), []),
        (broker(coordinator="inproc://x"), []),
        (broker(coordinator="tcp://a\nb"), []),
        (broker(), [TopicInfo("../t")]),
        (broker(), [TopicInfo("t", -1)]),
        (broker(), [TopicInfo("t", 1, 1, 99)]),
    ],
)
def test_a_bad_registration_is_refused(
    server: RemoteRef, endpoints: BrokerEndpoints, topics: list[TopicInfo]
) -> None:
    with pytest.raises((BadRequest, NameIllegal)):
        server.ask(registration(endpoints, *topics))
    assert brokers_at(server) == []


@pytest.mark.parametrize("command", [GetRoute(""), GetRoute("../x"), GetRoute("a b")])
def test_a_bad_topic_name_is_refused(server: RemoteRef, command: Command) -> None:
    with pytest.raises(NameIllegal):
        server.ask(command)


def test_rubbish_does_not_stop_it() -> None:
    with running(actor := NameServerActor.start(bind=INSIDE)) as line:
        socket: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(address_of(actor))
            for frames in ([b""], [b"x" * 50], [b"\x01" + bytes(8) + b"\x91\x3e"], [b""] * 9):
                socket.send_multipart(frames)
            for _ in range(4):
                assert socket.poll(patient(10_000))
                socket.recv_multipart()
        with pytest.raises(UnknownCommand):
            line.ask(JoinGroup("g", "m", []))
        assert isinstance(line.ask(Ping()), Pong)


def test_what_is_answered_later_is_not_asked_within_the_process() -> None:
    actor: pykka.ActorRef[NameServerActor] = NameServerActor.start()
    try:
        with pytest.raises(UnknownCommand, match="through a socket only"):
            actor.ask(registration(broker()))
        assert actor.ask(ListBrokers()) == BrokerList([])
    finally:
        actor.stop()


def test_statistics(server: RemoteRef) -> None:
    register(server, broker(), TopicInfo("t"))
    answer = server.ask(GetStatistics())
    assert isinstance(answer, Statistics)
    assert answer.values["brokers"] == 1
    assert answer.values["topics"] == 1
