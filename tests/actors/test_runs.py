"""A replica changes its role: one run of its processes ends by kill -9, and another begins."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import output_of
from family import RunningBroker
from patience import patient
from scripted_ha import ALL, CONFIRM, DIE, FLAG, GROUP, Replica, Script

from cometmq import Broker, Consumer, PopConsumer, Producer
from cometmq.actors.launch.addresses import address_of
from cometmq.actors.runtime.gate import Gate
from cometmq.errors import (
    CometError,
    ConfigError,
    InSyncReplicasNotEnough,
    NotConfirmed,
    NotMaster,
)
from cometmq.protocol.commands import (
    BeginRun,
    BrokerEndpoints,
    BrokerList,
    Command,
    CreateTopic,
    DescribeGroup,
    GetMessageAt,
    GetQueueRange,
    GroupDescription,
    GroupShare,
    JoinGroup,
    ListBrokers,
    PopMessages,
    PullMessages,
    PullResult,
    PullStatus,
    QueryMessages,
    QueryResult,
    QueueRange,
    Subscription,
    TopicInfo,
)
from cometmq.protocol.errors import BadRequest, MessageNotFound, ServiceNotAvailable, UnknownCommand
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import Counter, Service
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.state.laid_books import stage_books
from cometmq.shm.state.ledger_mark import Mark, mark_text

ROLES = ("commitlog", "dispatcher", "flush", "allocator", "cleaner", "coordinator", "reader-0")


@pytest.fixture(params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def flush(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    """The master of epoch 1, with a topic."""
    with Replica(tmp_path / "store") as replica:
        replica.run(1)
        replica.create_topic("t")
        yield replica


def visible(replica: Replica, queue_id: int = 0) -> int:
    found = replica.reader.ask(GetQueueRange("t", queue_id), timeout_s=patient(30))[0]
    assert isinstance(found, QueueRange)
    return int(found.max_queue_offset)


def pull(replica: Replica, queue_offset: int) -> PullResult:
    command = PullMessages("t", 0, queue_offset, 32, 1 << 20)
    answer, _ = replica.reader.ask(command, timeout_s=patient(30))
    assert isinstance(answer, PullResult)
    return answer


# --- roles ---


@pytest.mark.slow
def test_a_follower_serves_what_is_confirmed_and_a_master_goes_on(
    tmp_path: Path, flush: str
) -> None:
    with Replica(tmp_path / "store", {"flushDiskType": flush}) as replica:
        assert replica.run(1) == 0
        replica.create_topic("t")
        sent = [one for n in range(4) for one in replica.send("t", n % 2, [b"%d" % n] * 10)]
        end = replica.counter(Counter.WROTE)
        ports = replica.ready
        assert (left := replica.run(0)) >= end  # the coordinator writes as well
        assert replica.ready == ports
        replica.assert_stored(sent)
        with pytest.raises(NotMaster):
            replica.send("t", 0, [b"no"])
        with pytest.raises(NotMaster):
            replica.create_topic("u")
        assert "scheduler" not in replica.pids()
        assert replica.run(7) == left
        sent += replica.send("t", 0, [b"more"])
        assert sent[-1].queue_offset == 20
        replica.assert_stored(sent)
        assert replica.statistics()["restarts"] == 0
    with Replica(tmp_path / "store") as replica:  # it has ended in order, and follows again
        replica.wait_run(0)
        replica.assert_stored(sent)


@pytest.mark.slow
def test_a_producer_sends_through_changes_of_runs(replica: Replica) -> None:
    """Every message that was acknowledged is there once and in order; unanswered ones may be."""
    over, failures, sent = threading.Event(), [], []

    def produce() -> None:
        try:
            with Producer(replica.ready.name_server, timeout_s=patient(60)) as producer:
                while not over.wait(0.002):
                    body = b"%d" % len(sent)
                    producer.send("t", body, queue_id=0)
                    sent.append(body)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for epoch in (2, 0, 3, 4, 0, 5):
            replica.run(epoch)
            count = len(sent)
            while epoch and len(sent) < count + 20 and not failures:
                time.sleep(0.001)
    finally:
        over.set()
        thread.join(patient(60))
    assert not failures, failures
    bodies = [message.body for message in replica.read_queue("t", 0, len(sent))]
    assert bodies == sent


def test_two_orders_at_once_and_one_of_a_process_that_has_died(replica: Replica) -> None:
    sent = replica.send("t", 0, [b"one"])
    end = replica.counter(Counter.WROTE)
    ends: list[int] = []
    threads = [
        threading.Thread(target=lambda epoch=epoch: ends.append(replica.order(epoch)))
        for epoch in (2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert len(ends) == 3
    assert min(ends) >= end
    with Channel(address_of(replica.token, "broker")) as supervisor:
        with pytest.raises(BadRequest, match="is not the `ha` process any more"):
            supervisor.ask(BeginRun(9, pid=1), timeout_s=patient(30))
        with pytest.raises(BadRequest, match="no segment"):
            supervisor.ask(BeginRun(9, begin_at=1), timeout_s=patient(30))
    replica.run(5)
    replica.assert_stored(sent + replica.send("t", 0, [b"two"]))


def test_only_the_family_orders_runs_and_only_in_a_group(tmp_path: Path, replica: Replica) -> None:
    for line in (replica.coordinator, replica.commitlog):
        with pytest.raises(UnknownCommand):
            line.ask(BeginRun(9), timeout_s=patient(30))
    with (
        RunningBroker(tmp_path / "other") as broker,
        pytest.raises(BadRequest, match="no replica of a group"),
    ):
        broker.ask("broker", BeginRun(1))


def test_a_service_that_appends_by_itself_is_no_replica(tmp_path: Path) -> None:
    settings = dict(GROUP)
    with pytest.raises(ConfigError, match="has the writer in its own process"):
        Broker(tmp_path / "store", settings=settings, writer="here")


# --- the log ---


@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.slow
def test_what_is_cut_was_never_there(replica: Replica, rolled: bool) -> None:
    """Its places, in the log and in its queues, are others' then."""
    sent = replica.send("t", 0, [b"kept"])
    confirmed = replica.counter(Counter.WROTE)
    replica.tell(confirm=confirmed)
    with pytest.raises(NotConfirmed, match="not confirmed by the group") as raised:
        replica.send("t", 0, [b"x" * 200_000 if rolled else b"cut"])
    assert (
        raised.type is NotConfirmed
    )  # no client takes it for stored, as what a slave is late with
    for n in range(6 * rolled):
        with suppress(NotConfirmed):
            replica.send("t", n % 4, [b"x" * 200_000])
    end = replica.counter(Counter.WROTE)
    assert end > confirmed
    assert replica.run(0, cut_to=confirmed) >= end
    assert replica.counter(Counter.WROTE) == confirmed
    replica.tell(confirm=ALL)
    replica.run(2)
    sent += replica.send("t", 0, [b"another"])
    assert sent[-1].queue_offset == 1
    assert [m.body for m in replica.read_queue("t", 0, 2)] == [b"kept", b"another"]
    assert visible(replica, 1) == 0


def test_a_log_that_is_dropped_begins_where_it_is_told(replica: Replica) -> None:
    begin = 3 * int(replica.settings["mappedFileSizeCommitLog"])
    replica.tell(confirm=0)
    stage_books(replica.store, {}, mark_text(Mark()), begin)  # as a master's would be
    replica.run(0, begin_at=begin)
    assert replica.counter(Counter.WROTE) == replica.counter(Counter.MIN_OFFSET) == begin


def test_counters_of_a_run_that_had_hardly_begun() -> None:
    before = LastRun(1000, 5, 800, 700, 600, 100)
    early = LastRun(1000, 5, 0, 0, 0, 100)
    assert early.going_on_from(before).redo_from == before.redo_from == 700
    later = LastRun(2000, 9, 1500, 1400, 0, 100)
    assert later.going_on_from(before) == later


# --- kills ---


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.slow
def test_a_process_is_killed_as_runs_change(replica: Replica, when: str) -> None:
    """Each of them in a change of its own."""
    sent = replica.send("t", 0, [b"one", b"two"])
    for epoch, role in enumerate(ROLES, 2):
        if when == "before":
            with suppress(ProcessLookupError):
                replica.end(replica.pids()[role], signal.SIGKILL)
            replica.order(epoch)
        else:
            replica.order(epoch)
            while not (pid := replica.pids()[role]):
                pass
            replica.end(pid, signal.SIGKILL)
        replica.wait_run(epoch)
        sent += replica.send("t", 0, [role.encode()])
        replica.assert_stored(sent)


@pytest.mark.slow
def test_without_its_ha_process_it_follows(replica: Replica) -> None:
    sent = replica.send("t", 0, [b"one"])
    before = replica.pids()
    replica.end(before["ha"], signal.SIGKILL)
    replica.wait_run(0)
    after = replica.pids()
    assert before["namesrv"] == after["namesrv"]
    assert not (before.keys() - {"namesrv"}) & {
        role for role, pid in after.items() if pid == before.get(role)
    }
    replica.run(2)
    replica.assert_stored(sent + replica.send("t", 0, [b"two"]))


@pytest.mark.parametrize("role", ["ha", "namesrv"])
@pytest.mark.slow
def test_what_outlives_runs_is_killed_while_one_ends(replica: Replica, role: str) -> None:
    sent = replica.send("t", 0, [b"one"])
    old = replica.pids()[role]
    thread = threading.Thread(target=lambda: suppress_lost(replica, 2))
    thread.start()
    replica.end(old, signal.SIGKILL)
    thread.join(patient(60))
    replica.wait_serves(role, not_pid=old)
    replica.run(3)
    replica.assert_stored(sent + replica.send("t", 0, [b"two"]))


def suppress_lost(replica: Replica, epoch: int) -> None:
    """The `ha` process may die before it has an answer, or before its order is taken up."""
    with suppress(EOFError, BadRequest):
        Script(replica.token).ask({"order": {"epoch": epoch}})


@pytest.mark.slow
def test_it_ends_in_order_in_the_middle_of_a_change(tmp_path: Path) -> None:
    with Replica(tmp_path / "store") as replica:
        replica.run(1)
        replica.create_topic("t")
        sent = replica.send("t", 0, [b"one"])
        replica.tell(confirm=0)
        replica.order(2)  # which never serves: nobody confirms
        assert replica.close() == 0
    with Replica(tmp_path / "store") as replica:
        replica.run(3)
        replica.assert_stored(sent)


@pytest.mark.parametrize("step", ["end_run", "cut_log", "create_control"])
@pytest.mark.slow
def test_the_supervisor_is_killed_as_it_cuts(tmp_path: Path, step: str) -> None:
    """The next one begins with the log as it is; whoever wanted it cut wants it again."""
    flag = tmp_path / "flag"
    store = tmp_path / "store"
    with Replica(store, environ={DIE: step, FLAG: str(flag)}) as replica:
        replica.run(1)
        replica.create_topic("t")
        replica.send("t", 0, [b"kept"])
        confirmed = replica.counter(Counter.WROTE)
        replica.tell(confirm=confirmed)
        with pytest.raises(NotConfirmed):
            replica.send("t", 0, [b"cut"] * 100)
        end = replica.counter(Counter.WROTE)
        flag.touch()
        with suppress(EOFError, NotConfirmed):
            replica.order(0, cut_to=confirmed)
        replica.wait_ended()
    with Replica(store, environ={CONFIRM: str(confirmed)}) as replica:
        found = replica.order(0, cut_to=confirmed)
        assert found >= end if step == "end_run" else found == confirmed
        replica.tell(confirm=ALL)
        replica.run(2)
        sent = replica.send("t", 0, [b"another"])
        assert sent[0].queue_offset == 1
        assert [m.body for m in replica.read_queue("t", 0, 2)] == [b"kept", b"another"]


# --- what is confirmed ---


@pytest.mark.slow
def test_nothing_is_readable_that_is_not_confirmed(replica: Replica) -> None:
    """Not pulled, not mapped, not by its place, not by its key."""
    replica.send("t", 0, [b"one"], keys="k1")
    address = replica.ready.name_server
    with Consumer(address, "g", "t", transport="mapped", auto_commit_ms=60_000) as mapped:
        assert [m.body for m in mapped.poll(1, timeout_s=patient(30))] == [b"one"]
        confirmed = replica.counter(Counter.REPLICATED)
        replica.tell(confirm=confirmed)
        with pytest.raises(NotConfirmed):
            replica.send("t", 0, [b"two"], keys="k2")
        assert not mapped.poll(1, timeout_s=0.2)
        assert visible(replica) == 1
        assert pull(replica, 1).status == PullStatus.NO_NEW_MESSAGE
        with pytest.raises(MessageNotFound):
            replica.reader.ask(GetMessageAt(confirmed), timeout_s=patient(30))
        query = QueryMessages("t", "k2", 32, 0, 1 << 62)
        answer, _ = replica.reader.ask(query, timeout_s=patient(30))
        assert isinstance(answer, QueryResult)
        assert answer.count == 0
        tail = output_of(
            "msg", "tail", "-t", "t", "--until-end", **{"COMETMQ_NAME_SERVER": address}
        )
        assert tail.split() == [b"one"]
        assert replica.counter(Counter.DISPATCHED) == confirmed
        replica.tell(confirm=ALL)
        assert [m.body for m in mapped.poll(1, timeout_s=patient(30))] == [b"two"]
    assert [m.body for m in replica.read_queue("t", 0, 2)] == [b"one", b"two"]


@pytest.mark.slow
def test_a_master_serves_once_all_that_it_had_is_confirmed(replica: Replica) -> None:
    sent = replica.send("t", 0, [b"one"])
    confirmed = replica.counter(Counter.WROTE)
    replica.tell(confirm=confirmed)
    with pytest.raises(NotConfirmed):
        replica.send("t", 0, [b"two"])
    replica.run(0)
    assert visible(replica) == 1
    replica.order(2)
    replica.wait_serves("reader-0", not_pid=0)
    assert visible(replica) == 1
    assert pull(replica, 2).status == PullStatus.NO_NEW_MESSAGE  # it may be there
    assert not replica.statistics()["serves"]
    replica.tell(confirm=ALL)
    replica.wait_run(2)
    assert [m.body for m in replica.read_queue("t", 0, 2)] == [b"one", b"two"]
    assert replica.send("t", 0, [b"three"])[0].queue_offset == 2
    replica.assert_stored(sent)


# --- what the master does for clients ---


def test_sends_are_taken_as_ha_says(replica: Replica) -> None:
    replica.tell(service=Service.SHORT)
    with pytest.raises(InSyncReplicasNotEnough, match="fewer than 2"):
        replica.send("t", 0, [b"short"])
    replica.tell(service=Service.DEPOSED)
    with pytest.raises(NotMaster):
        replica.send("t", 0, [b"deposed"])
    replica.tell(service=Service.UNSURE)
    replica.send("t", 0, [b"unsure"])
    replica.tell(service=Service.OPEN)
    replica.send("t", 0, [b"open"])
    assert [m.body for m in replica.read_queue("t", 0, 2)] == [b"unsure", b"open"]


def test_the_coordinator_keeps_nothing_that_the_log_does_not_take(replica: Replica) -> None:
    create = CreateTopic(TopicInfo("u", 1, 1))
    replica.tell(service=Service.SHORT)
    with pytest.raises(InSyncReplicasNotEnough):
        replica.coordinator.ask(create, timeout_s=patient(30))
    replica.tell(service=Service.DEPOSED)
    with pytest.raises(NotMaster):
        replica.coordinator.ask(create, timeout_s=patient(30))
    replica.tell(service=Service.OPEN)
    replica.coordinator.ask(create, timeout_s=patient(30))
    replica.run(2)
    replica.send("u", 0, [b"one"])


def test_nothing_is_popped_by_a_master_that_is_not_certain(replica: Replica) -> None:
    replica.send("t", 0, [b"one"])
    pop = PopMessages("g", "t", 1, 60_000)
    for service, error in (
        (Service.UNSURE, ServiceNotAvailable),
        (Service.SHORT, InSyncReplicasNotEnough),
        (Service.DEPOSED, NotMaster),
    ):
        replica.tell(service=service)
        with pytest.raises(error):
            replica.coordinator.ask(pop, timeout_s=patient(30))
    replica.tell(service=Service.OPEN)
    with PopConsumer(replica.ready.name_server, "g", "t") as consumer:
        assert [m.body for m in consumer.poll(1, timeout_s=patient(30))] == [b"one"]


@pytest.mark.slow
def test_no_member_is_told_that_it_owns_queues_by_a_master_that_is_not_certain(
    tmp_path: Path,
) -> None:
    """The next master gives them to others when the member has not been told for a session's time.
    Where there is none, and this one is certain again, nobody was silent."""
    session_s = 1
    with Replica(tmp_path / "store", {"consumerSessionTimeout": session_s * 1000}) as replica:
        replica.run(1)
        replica.create_topic("t")

        def ask(command: Command) -> Command:
            return replica.coordinator.ask(command, timeout_s=patient(30))[0]

        def members() -> list[str]:
            answer = ask(DescribeGroup("g"))
            assert isinstance(answer, GroupDescription)
            return answer.members

        join = JoinGroup("g", "m", [Subscription("t")])
        deadline = time.monotonic() + patient(60)
        while True:
            replica.tell(service=Service.OPEN)
            assert isinstance(ask(join), GroupShare)
            replica.tell(service=Service.UNSURE)
            with pytest.raises(ServiceNotAvailable, match="not certain to be the master"):
                ask(join)
            if members() == ["m"]:
                break
            assert time.monotonic() < deadline, "each time that took longer than its session"
        time.sleep(3 * session_s)  # the time itself is what is tested
        assert members() == ["m"]
        replica.tell(service=Service.OPEN)
        assert isinstance(ask(join), GroupShare)
        replica.tell(service=Service.DEPOSED)
        with pytest.raises(NotMaster):
            ask(join)


@pytest.mark.parametrize(
    ("service", "grants", "shares"),
    [
        (Service.NONE, False, False),
        (Service.OPEN, True, True),
        (Service.SHORT, False, True),  # it may own what it owns: nothing new is kept
        (Service.UNSURE, False, False),
        (Service.DEPOSED, False, False),
    ],
)
def test_what_is_for_a_time_ends_with_the_session(
    service: Service, grants: bool, shares: bool
) -> None:
    now_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    for until_ms in (now_ms + 600_000, now_ms):
        said: Any = SimpleNamespace(value=service)
        sure_until: Any = SimpleNamespace(value=until_ms)
        gate = Gate(said, sure_until, "group", 2, 2.0)
        held = until_ms > now_ms
        assert (gate.grants, gate.shares) == (grants and held, shares and held)
        assert (gate.why_not_granted() is None) == gate.grants
        assert (gate.why_not_shared() is None) == gate.shares


def test_derived_writes_go_on_when_there_are_enough_again(replica: Replica) -> None:
    with Producer(replica.ready.name_server) as producer:
        producer.send("t", b"later", delay_level=1, queue_id=0)
    replica.tell(service=Service.SHORT)
    due = time.monotonic() + 1.2
    while time.monotonic() < due or "goes on in" not in replica.log:
        assert time.monotonic() < due + 60, replica.log
        time.sleep(0.01)
    assert sum(visible(replica, n) for n in range(4)) == 0
    replica.tell(service=Service.OPEN)
    deadline = time.monotonic() + patient(60)
    while not sum(visible(replica, n) for n in range(4)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_change_that_the_group_does_not_confirm_is_not_told(replica: Replica) -> None:
    """It may be cut; and is made once there is confirmation."""
    replica.tell(confirm=replica.counter(Counter.WROTE))
    with pytest.raises(NotConfirmed):
        replica.coordinator.ask(CreateTopic(TopicInfo("u", 1, 1)), timeout_s=patient(30))
    replica.tell(confirm=ALL)
    deadline = time.monotonic() + patient(60)
    while True:
        try:
            replica.send("u", 0, [b"one"])
            return
        except CometError:
            assert time.monotonic() < deadline, replica.log
            time.sleep(0.01)


@pytest.mark.slow
def test_an_end_of_a_transaction_that_the_group_does_not_confirm_is_not_told(
    replica: Replica,
) -> None:
    """It may be cut, and the half message stand there again."""
    names = replica.ready.name_server
    with Producer(names, name="payments", timeout_s=2, wait_for_broker=patient(60)) as producer:
        with producer.transaction("t", b"what is pending is known then"):
            pass
        with (
            pytest.raises(NotConfirmed, match="not confirmed by the group"),
            producer.transaction("t", b"paid"),
        ):
            replica.tell(confirm=replica.counter(Counter.WROTE))
        replica.tell(confirm=ALL)
    with Consumer(names, "g", "t", transport="zmq") as consumer:
        found: list[bytes] = []
        while b"paid" not in found:
            found += [message.body for message in consumer.poll(1, timeout_s=patient(60))]
        assert found.count(b"paid") == 1


# --- clients ---


@pytest.mark.slow
def test_clients_follow_the_master_from_one_replica_to_another(
    tmp_path: Path, replica: Replica
) -> None:
    """What is sent meanwhile waits, and is sent to the new one."""
    names = replica.ready.name_server
    with (
        Producer(names, timeout_s=patient(60)) as producer,
        Consumer(names, "g", "t", auto_commit_ms=50) as consumer,
    ):
        producer.send("t", b"one", queue_id=0)
        assert [m.body for m in consumer.poll(1, timeout_s=patient(30))] == [b"one"]
        consumer.commit()
        replica.order(0)
        replica.wait_serves("coordinator", not_pid=0)
        sending = threading.Thread(target=lambda: producer.send("t", b"two", queue_id=0))
        sending.start()
        store = tmp_path / "other"
        for folder in ("commitlog", "config"):
            shutil.copytree(replica.store / folder, store / folder)
        shutil.copy(replica.store / "cometmq.ledger", store)
        (store / "abort").touch()
        settings = {"dLegerSelfId": "n1", "namesrvAddr": names.removeprefix("tcp://")}
        with Replica(store, settings) as other:
            other.order(2)
            sending.join(patient(60))
            assert not sending.is_alive(), other.log
            assert [m.body for m in consumer.poll(1, timeout_s=patient(60))] == [b"two"]
            assert [m.body for m in other.read_queue("t", 0, 2)] == [b"one", b"two"]
            ids = sorted(each.broker_id for each in brokers_at(names))
            assert ids == [0, 1]


def brokers_at(names: str) -> list[BrokerEndpoints]:
    with Channel(names) as line:
        found, _ = line.ask(ListBrokers(), timeout_s=patient(30))
    assert isinstance(found, BrokerList)
    return found.brokers
