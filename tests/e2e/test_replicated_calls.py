"""Every call of a client to a master, with brokers that have replicas: a healthy group of three,
and a master with its slave; before and after a fail-over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_process import output_of
from family import RunningBroker, encode_batch, left_behind
from forked import RUN
from patience import patient
from ports import free_ports
from replicas import RunningCluster, ctrl_c

from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.client import (
    Admin,
    AsyncConsumer,
    AsyncPopConsumer,
    AsyncProducer,
    Consumer,
    Message,
    PopConsumer,
    Producer,
    Retry,
)
from cometmq.client.sending.staging import SinkLine, StageWriter
from cometmq.conf.option import as_text
from cometmq.protocol.commands import COMMANDS, Answer, Audience, Command, ServedBy
from cometmq.protocol.errors import GroupInUse
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.live.control import Counter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = patient(90)
CHECKS = {"transactionTimeOut": 300, "transactionCheckInterval": 300}
RETRY_S = 0.1

Call = Callable[[str, str], object]
CALLS: dict[str, Call] = {}


def call(function: Call) -> Call:
    """Add a row to the table: called with the name server, and a name that no other call has."""
    CALLS[function.__name__] = function
    return function


def take(consumer: Consumer | PopConsumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        found += consumer.poll(count - len(found), timeout_s=1)
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def send(names: str, topic: str, count: int, **options: Any) -> None:
    with Producer(names, timeout_s=WAIT_S) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, **options).wait()


@contextmanager
def replying(names: str, topic: str, **options: Any) -> Iterator[None]:
    """Run a consumer that replies to every message."""
    with Consumer(names, f"re-{topic}", topic, **options) as consumer:
        thread = threading.Thread(
            target=consumer.run, args=(lambda message: message.reply(b"re: " + message.body),)
        )
        thread.start()
        try:
            yield
        finally:
            consumer.close()
            thread.join()


# --- sending ---


@call
def sends(names: str, name: str) -> None:
    with Producer(names, timeout_s=WAIT_S) as producer:
        for options in ({}, {"ordering_key": "k"}, {"queue_id": 1}, {"delay_level": 1}):
            assert producer.send(name, b"x", **options).wait().queue_offset >= 0  # type: ignore[arg-type]
        assert len(producer.send_many(name, [b"a", b"b"])) == 2
        producer.send_oneway(name, b"x")
    with Producer(names, linger_ms=2, timeout_s=WAIT_S, dedup="keys") as producer:
        producer.send_async(name, b"x", keys="k").result(WAIT_S)


@call
def sends_in_a_loop(names: str, name: str) -> None:
    async def main() -> None:
        async with AsyncProducer(names, timeout_s=WAIT_S, producer_id=name, name=name) as producer:
            await producer.send(name, b"x")
            async with producer.transaction(name, b"y"):
                pass

    asyncio.run(main())


@call
def named_producers(names: str, name: str) -> None:
    for _ in range(2):
        with Producer(names, producer_id=name, timeout_s=WAIT_S) as producer:
            producer.send(name, b"x").wait()


@call
def recalls(names: str, name: str) -> None:
    with Producer(names, timeout_s=WAIT_S) as producer:
        receipt = producer.send(name, b"x", deliver_after=3_600).wait()
        producer.recall(receipt).wait()


@call
def begins_at_the_end(names: str, name: str) -> None:
    send(names, name, 1)
    with Consumer(names, name, name, start="latest") as consumer:
        send(names, name, 2)
        assert [each.body for each in take(consumer, 1)] in ([b"0"], [b"1"])


@call
def transactions(names: str, name: str) -> None:
    with Producer(names, name=name, timeout_s=WAIT_S) as producer:
        with producer.transaction(name, b"committed"):
            pass
        with contextlib.suppress(KeyError), producer.transaction(name, b"rolled back"):
            raise KeyError
    with Consumer(names, None) as consumer:
        consumer.assign(name)
        assert [each.body for each in take(consumer, 1)] == [b"committed"]


@call
def checkers(names: str, name: str) -> None:
    """Check a transaction with another producer than the one that began it."""
    checked = threading.Event()

    def check(_pending: object) -> bool:
        checked.set()
        return True

    with Producer(names, name=name, timeout_s=WAIT_S) as begins:
        transaction = begins.transaction(name, b"x").__enter__()
        with Producer(names, name=name, checker=check, timeout_s=WAIT_S):
            assert checked.wait(WAIT_S)
            with Consumer(names, None) as consumer:
                consumer.assign(name)
                assert [each.body for each in take(consumer, 1)] == [b"x"]
        transaction.__exit__(None, None, None)  # as the checker has said


@call
def stages(names: str, name: str) -> None:
    with Admin(names) as admin:
        admin.create_topic(name, 1)
    with SinkLine(names, name, timeout_s=WAIT_S) as line:
        for stage in ("kept", "dropped"):
            writer = StageWriter(line, 0, stage)
            writer.queues(name)
            writer.send(name, 0, encode_batch([b"x"]), 1)
            writer.finish()
        line.drop(0, ["dropped"])
        assert not line.commit(0, ["kept"]).already


# --- requests ---


@call
def requests(names: str, name: str) -> None:
    with replying(names, name), Producer(names, timeout_s=WAIT_S) as producer:
        for number in range(20):
            body = b"%d" % number
            assert producer.request(name, body, timeout_s=WAIT_S).body == b"re: " + body


@call
def requests_by_the_wire(names: str, name: str) -> None:
    with (
        replying(names, name, transport="zmq"),
        Producer(names, timeout_s=WAIT_S, transport="zmq") as producer,
    ):
        assert producer.request(name, b"x", timeout_s=WAIT_S).body == b"re: x"


@call
def requests_in_a_loop(names: str, name: str) -> None:
    async def reply(message: Message) -> None:
        await message.reply(b"re: " + message.body)  # type: ignore[misc]

    async def main() -> None:
        async with (
            AsyncConsumer(names, f"re-{name}", name) as consumer,
            AsyncProducer(names, timeout_s=WAIT_S) as producer,
        ):
            running = asyncio.create_task(consumer.run(reply))
            answers = await asyncio.gather(
                *(producer.request(name, b"%d" % n, timeout_s=WAIT_S) for n in range(20))
            )
            assert [each.body for each in answers] == [b"re: %d" % n for n in range(20)]
            await consumer.close()
            await running

    asyncio.run(main())


@call
def requests_to_who_pops(names: str, name: str) -> None:
    with (
        PopConsumer(names, name, name, wait_for_broker=WAIT_S) as consumer,
        Producer(names, timeout_s=WAIT_S) as producer,
        ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(producer.request, name, b"x", timeout_s=WAIT_S)
        (message,) = take(consumer, 1)
        message.reply(b"re: x")
        consumer.ack(message)
        assert asked.result().body == b"re: x"


@call
def requests_to_who_has_no_group(names: str, name: str) -> None:
    with (
        Consumer(names, None, transport="zmq") as consumer,
        Producer(names, timeout_s=WAIT_S) as producer,
        ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(producer.request, name, b"x", timeout_s=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        with Admin(names) as admin:
            while name not in admin.topics():
                assert time.monotonic() < deadline
        consumer.assign(name)
        (message,) = take(consumer, 1)
        message.reply(b"re: x")
        assert asked.result().body == b"re: x"


# --- consuming ---


@call
def groups(names: str, name: str) -> None:
    send(names, name, 8)
    with Consumer(names, name, name) as consumer:
        found = take(consumer, 8)
        consumer.ack(found)
        consumer.commit()
        consumer.seek("earliest")
        assert len(take(consumer, 8)) == 8
    with Admin(names) as admin:
        assert admin.describe_group(name).lag == 8


@call
def retries(names: str, name: str) -> None:
    send(names, name, 1)
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.reconsume_times)
        if len(seen) == 1:
            raise Retry(after=RETRY_S)
        consumer.close()

    with Consumer(names, name, name) as consumer:
        consumer.run(handle)
    assert seen == [0, 1]


@call
def pops(names: str, name: str) -> None:
    send(names, name, 4, queue_id=0)
    with PopConsumer(names, name, name, invisible_s=WAIT_S) as consumer:
        consumer.release(*take(consumer, 4))
        first, second, *rest = take(consumer, 4)
        consumer.ack(first, *rest)
        consumer.extend(second, WAIT_S)
        consumer.nack(second, after=RETRY_S)
        (again,) = take(consumer, 1)
        assert again.reconsume_times == 1
        consumer.reject(again)
    with Admin(names) as admin:
        deadline = time.monotonic() + WAIT_S
        while len(admin.dead_letters(name)) < 1:
            assert time.monotonic() < deadline
        (resent,) = admin.resend_dead_letters(name)
        assert resent.error is None
        assert admin.purge_dead_letters(name) == 0


@call
def pops_in_order(names: str, name: str) -> None:
    send(names, name, 4, queue_id=0)
    with PopConsumer(names, name, name, orderly=True) as consumer:
        for queue_offset in range(4):
            (message,) = take(consumer, 1)
            assert message.queue_offset == queue_offset
            consumer.ack(message)


@call
def pops_in_a_loop(names: str, name: str) -> None:
    send(names, name, 1)

    async def main() -> None:
        async with AsyncPopConsumer(names, name, name) as consumer:
            found: list[Message] = []
            while not found:
                found = await consumer.poll(1, timeout_s=WAIT_S)
            await consumer.ack(*found)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


# --- administration ---


@call
def topics(names: str, name: str) -> None:
    with Admin(names) as admin:
        admin.create_topic(name, 2)
        admin.update_topic(name, queues=4)
        assert admin.create_topics([f"{name}-1", f"{name}-2"]) == []
        assert {name, f"{name}-1", f"{name}-2"} <= set(admin.topics())
        admin.delete_topic(f"{name}-1")


@call
def settings_of_groups(names: str, name: str) -> None:
    with Admin(names) as admin:
        admin.create_group(name, {"retryMaxTimes": 3})
        admin.update_group(name, {"retryMaxTimes": 4})
        admin.delete_group(name)


@call
def offsets_of_groups(names: str, name: str) -> None:
    send(names, name, 4, queue_id=0)
    with Consumer(names, name, name) as consumer:
        consumer.ack(take(consumer, 4))
        consumer.commit()
        with Admin(names) as admin, pytest.raises(GroupInUse):
            admin.delete_group(name)
    with Admin(names) as admin:
        assert set(admin.reset_offsets(name, name, "earliest").values()) == {0}
        admin.shift_offsets(name, name, 2, 0)
        assert 2 in admin.committed(name, name).values()
        assert admin.clone_offsets(name, f"{name}-2") > 0


@call
def holds(names: str, name: str) -> None:
    with Admin(names) as admin:
        admin.place_hold(name)
        assert name in {each.name for each in admin.holds()}
        assert name not in {each.name for each in admin.drop_hold(name)}
        admin.delete_expired()


# --- the brokers ---


class Asked:
    """Record of the commands that channels of this process sent, and that were not refused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kinds: set[type[Command]] = set()
        request, tell, settle = Channel.request, Channel.tell, Pending.settle
        sent: dict[int, type[Command]] = {}

        def requested(channel: Channel, command: Command, *more: Any, **named: Any) -> Pending:
            pending = request(channel, command, *more, **named)
            sent[id(pending)] = type(command)
            if pending.done and pending.error is None:
                self.kinds.add(type(command))
            return pending

        def told(channel: Channel, command: Command, *more: Any, **named: Any) -> None:
            tell(channel, command, *more, **named)
            self.kinds.add(type(command))

        def settled(pending: Pending, answer: Command | None, payload: Any, error: Any) -> None:
            settle(pending, answer, payload, error)
            kind = sent.pop(id(pending), None)
            if kind is not None and error is None and type(answer).__name__ != "Failed":
                self.kinds.add(kind)

        patch.setattr(Channel, "request", requested)
        patch.setattr(Channel, "tell", told)
        patch.setattr(Pending, "settle", settled)


class Group:
    """Three replicas that elect their master."""

    def __init__(self, folder: Path, mark: str) -> None:
        pairs = [f"{key}={as_text(value)}" for key, value in CHECKS.items()]
        options = [part for pair in pairs for part in ("--set", pair)]
        self.cluster = RunningCluster(folder / "group", mark, *options)
        self.cluster.until_all_in_sync()
        self.names = self.cluster.name_server

    def fail_over(self) -> None:
        """Fail over in order: the previous master stays alive, and follows."""
        found = self.cluster.status()
        other = next(each["name"] for each in found["replicas"] if each["name"] != found["master"])
        output_of("cluster", "failover", "--store", str(self.cluster.path), "--to", other)
        self.cluster.until_all_in_sync()

    def close(self) -> None:
        ctrl_c(self.cluster.init)


class Pair:
    """A master and its slave, which replaces the master."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = NameServerActor.start(bind=[("tcp://127.0.0.1:*", False)])
        self.names = self._server.proxy().addresses.get()[0]
        self._shared = {"brokerName": "pair", "namesrvAddr": self.names, **CHECKS}
        port = free_ports(1)
        self.master = self.start("master", brokerRole="ASYNC_MASTER", haListenPort=port)
        self.slave = self.start(
            "slave", brokerRole="SLAVE", brokerId=1, haMasterAddress=f"127.0.0.1:{port}"
        )

    def start(self, name: str, **settings: Any) -> RunningBroker:
        return RunningBroker(self._folder / name, self._shared | settings)

    def fail_over(self) -> None:
        end = self.master.counter(Counter.WROTE)
        deadline = time.monotonic() + WAIT_S
        while self.slave.counter(Counter.WROTE) < end:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.master.close()
        self.slave.close()
        port = free_ports(1)
        self.master = self.start("slave", brokerRole="ASYNC_MASTER", brokerId=0, haListenPort=port)
        self.slave = self.start(
            "new", brokerRole="SLAVE", brokerId=1, haMasterAddress=f"127.0.0.1:{port}"
        )

    def close(self) -> None:
        self.master.close()
        self.slave.close()
        self._server.stop()


@pytest.fixture(scope="module", params=["group", "pair"])
def replicated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group | Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    mark = f"{RUN}/{folder.name}"
    with ExitStack() as stack:
        stack.callback(end, mark)
        found: Group | Pair = Group(folder, mark) if request.param == "group" else Pair(folder)
        stack.callback(found.close)
        yield found


def end(mark: str) -> None:
    left = left_behind(mark)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, WAIT_S)


def call_all(names: str, when: str) -> Mapping[str, BaseException]:
    """Call each row, four at a time. Return the exceptions of those that failed."""
    failed: dict[str, BaseException] = {}
    with ThreadPoolExecutor(4) as pool:
        running = {
            name: pool.submit(function, names, f"{name.replace('_', '-')}-{when}")
            for name, function in CALLS.items()
        }
        for name, future in running.items():
            error = future.exception()
            if error is not None:
                failed[name] = error
    return failed


def test_a_master_serves_all_of_it(
    replicated: Group | Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 14: every call works before and after a fail-over; they cover all master commands."""
    asked = Asked(monkeypatch)
    assert call_all(replicated.names, "before") == {}
    before = asked.kinds.copy()
    replicated.fail_over()
    asked.kinds.clear()
    assert call_all(replicated.names, "after") == {}
    wanted = {
        kind
        for kind in COMMANDS
        if not issubclass(kind, Answer)
        and kind.access.audience in (Audience.CLIENT, Audience.ADMINISTRATOR)
        and kind.access.served_by is not ServedBy.EVERY
    }
    assert wanted - before == set()
    assert wanted - asked.kinds == set()


def test_requests_are_answered_through_fail_overs(replicated: Group | Pair) -> None:
    """Fault 14: a producer and a consumer from before a fail-over can still request and reply."""
    names = replicated.names
    with (
        replying(names, "through"),
        Producer(names, timeout_s=WAIT_S) as producer,
        Producer(names, timeout_s=WAIT_S, producer_id="through") as named,
    ):
        assert producer.request("through", b"x", timeout_s=WAIT_S).body == b"re: x"
        named.send("through-named", b"x").wait()
        for _ in range(2):
            with ThreadPoolExecutor() as pool:
                over = threading.Event()

                def ask(over: threading.Event = over) -> int:
                    count = 0
                    while not over.is_set():
                        assert producer.request("through", b"x", timeout_s=WAIT_S).body == b"re: x"
                        count += 1
                    return count

                asking = [pool.submit(ask) for _ in range(3)]
                replicated.fail_over()
                named.send("through-named", b"x").wait()
                for _ in range(20):
                    assert producer.request("through", b"x", timeout_s=WAIT_S).body == b"re: x"
                over.set()
                assert all(each.result() for each in asking)
