"""Producers with a producer_id: the newest has the name, and fences those before it."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from patience import patient

from cometmq import Admin, AsyncProducer, Producer
from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.actors.tables.producers import AHEAD_MAX_MS, EPOCH_MAX, deriver_of, note_of
from cometmq.protocol.commands import (
    AppendRecords,
    Derivation,
    OpenProducer,
    Position,
    ProducerOpened,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    NameIllegal,
    NotReachable,
    ProducerFenced,
    ProducerUnknown,
)
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)
_names = (f"producer-{number}" for number in itertools.count())


class Served(RunningBroker):
    """A broker, and what sends to it."""

    def producer(self, **options: Any) -> Producer:
        return Producer(self.ready.name_server, **options)

    def async_producer(self, **options: Any) -> AsyncProducer:
        return AsyncProducer(self.ready.name_server, **options)

    def open(self, **fields: Any) -> ProducerOpened:
        answer, _ = self.commitlog.ask(OpenProducer(**fields))
        assert isinstance(answer, ProducerOpened)
        return answer

    def bodies(self, topic: str) -> list[bytes]:
        return [message.body for message in self.read_queue(topic, 0)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("named") / "store") as running:
        _ = running.endpoints  # then its name server knows it
        yield running


@pytest.fixture
def name() -> str:
    return next(_names)


def epoch_of(producer: Producer) -> int:
    return producer._sender.delivery.identity.epoch


# --- fencing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "zmq", "local"])
@pytest.mark.parametrize("linger_ms", [0, 1])
def test_the_newer_one_fences_the_older(
    broker: Served, name: str, transport: str, linger_ms: int
) -> None:
    topic = f"t-{name}"
    options = {"producer_id": name, "transport": transport, "linger_ms": linger_ms}
    with broker.producer(**options) as old, broker.producer() as nobody:
        old.send(topic, b"old", queue_id=0).wait()
        with broker.producer(**options) as new:
            assert epoch_of(new) > epoch_of(old)
            new.send(topic, b"new", queue_id=0).wait()
            with pytest.raises(ProducerFenced) as caught:
                old.send(topic, b"late", queue_id=0).wait()
            for epoch in (epoch_of(old), epoch_of(new)):
                assert str(epoch) in str(caught.value)
            with pytest.raises(ProducerFenced, match=name):
                old.send_many(topic, [b"late", b"later"])
            with pytest.raises(ProducerFenced):
                old.send_async(topic, b"late").result(WAIT_S)
            old.send_oneway(topic, b"late")
            nobody.send(topic, b"another's", queue_id=0)
            assert not new.send(topic, b"still", queue_id=0).wait().queue_offset < 2
        if linger_ms:
            with pytest.raises(ProducerFenced):
                old.flush()
    assert broker.bodies(topic) == [b"old", b"new", b"another's", b"still"]


def test_transactions_are_fenced_and_groups_are_not(broker: Served, name: str) -> None:
    """Several live producers have one `name`, which is a group's; a producer_id has one."""
    both = {"name": "billing", "producer_id": name}
    with (
        broker.producer(**both) as old,
        broker.producer(name="billing") as beside,
        broker.producer(**both) as new,
    ):
        with pytest.raises(ProducerFenced), old.transaction("paid", b"late"):
            pass
        for producer in (beside, new):
            with producer.transaction("paid", b"x"):
                pass


def test_asyncio(broker: Served, name: str) -> None:
    async def work() -> None:
        async with broker.async_producer(producer_id=name) as old:
            await old.send("aio", b"old")
            new = broker.async_producer(producer_id=name)
            await old.send("aio", b"still")  # nobody is told before the first use
            await new.send("aio", b"new")
            with pytest.raises(ProducerFenced):
                await old.send("aio", b"late")
            with pytest.raises(ProducerFenced):
                await old.send_many("aio", [b"late"])
            await new.close()

    asyncio.run(work())


def test_a_thousand_of_one_name(broker: Served, name: str) -> None:
    """The last one has it; each other is told so with both epochs."""
    topic = f"t-{name}"
    producers = [broker.producer(producer_id=name, transport="zmq") for _ in range(40)]
    for sender in range(960):
        assert broker.open(producer_id=name, sender=sender).code == 0
    last = broker.producer(producer_id=name)
    try:
        epochs = [epoch_of(each) for each in producers]
        assert epochs == sorted(set(epochs))
        for producer in producers:
            with pytest.raises(ProducerFenced) as caught:
                producer.send(topic, b"late")
            found = [int(each) for each in re.findall(r"epoch (\d+)", str(caught.value))]
            assert found == [epoch_of(producer), epoch_of(last)]
        last.send(topic, b"last", queue_id=0)
    finally:
        for producer in (*producers, last):
            producer.close()
    assert broker.bodies(topic) == [b"last"]


def test_at_the_same_moment(broker: Served, name: str) -> None:
    """Of many that begin at once one is left."""
    producers: list[Producer] = []
    together = threading.Barrier(12)

    def begin() -> None:
        together.wait(WAIT_S)
        producers.append(broker.producer(producer_id=name))

    threads = [threading.Thread(target=begin) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len({epoch_of(each) for each in producers}) == 12
    newest = max(producers, key=epoch_of)
    for producer in producers:
        if producer is newest:
            producer.send("at-once", b"newest")
        else:
            with pytest.raises(ProducerFenced):
                producer.send("at-once", b"older")
        producer.close()


# --- what the command refuses ---------------------------------------------------------------------


def test_a_command_that_comes_again_is_answered_alike(broker: Served, name: str) -> None:
    first = broker.open(producer_id=name, sender=5)
    assert broker.open(producer_id=name, sender=5) == first
    raised = broker.open(producer_id=name, sender=5, epoch=first.epoch + 9)
    assert raised.epoch == first.epoch + 9
    assert broker.open(producer_id=name, sender=5, epoch=first.epoch) == raised
    for epoch in (first.epoch, raised.epoch):
        with pytest.raises(ProducerFenced):
            broker.open(producer_id=name, sender=6, epoch=epoch)
    assert broker.open(producer_id=name, sender=6).epoch > raised.epoch


@pytest.mark.parametrize("epoch", [-1, 1 << 62])
def test_epochs_that_can_be_none(broker: Served, name: str, epoch: int) -> None:
    with pytest.raises(ArgumentIllegal, match="epoch"):
        broker.open(producer_id=name, sender=1, epoch=epoch)


@pytest.mark.parametrize("claimed", [(1 << 62) - 1, (1 << 62) - 2, 1 << 53, 10**15, 10**13])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_epoch_that_no_broker_gave_out(
    broker: Served, name: str, claimed: int, is_known: bool
) -> None:
    """A claim of a very high epoch is refused; it fenced a producer_id for ever (Fault 17)."""
    if is_known:
        with broker.producer(producer_id=name) as before:
            before.send("claimed", b"before")
            for sender in (1, before._sender.delivery.identity.sender):  # its own as well
                with pytest.raises(ArgumentIllegal, match=f"{claimed}.*no broker has assigned it"):
                    broker.open(producer_id=name, sender=sender, epoch=claimed)
            before.send("claimed", b"still")
    else:
        with pytest.raises(ArgumentIllegal, match=f"{claimed}.*no broker has assigned it"):
            broker.open(producer_id=name, sender=1, epoch=claimed)
    with broker.producer(producer_id=name) as after:
        after.send("claimed", b"after")
        assert epoch_of(after) < claimed
        again = broker.open(
            producer_id=name, sender=after._sender.delivery.identity.sender, epoch=epoch_of(after)
        )
        assert again.epoch == epoch_of(after)


def test_the_last_epoch_that_may_be_claimed_fences_nobody_for_ever(
    broker: Served, name: str
) -> None:
    far = int(time.time() * 1000) + AHEAD_MAX_MS - 60_000
    for sender in range(1, 4):
        far += 1
        assert broker.open(producer_id=name, sender=sender, epoch=far).epoch == far
        with broker.producer(producer_id=name) as producer:
            producer.send("fenced", b"x")
            assert epoch_of(producer) == far + 1
            far += 1


def test_a_name_that_was_fenced_for_ever_is_free(broker: Served, name: str) -> None:
    """A producer_id that an older release let a client fence for ever can be opened."""
    fenced = Derivation(deriver_of(name), Position(), Position(EPOCH_MAX), note_of(1))
    with Channel(broker.address("commitlog")) as channel:
        channel.ask(AppendRecords([], 0, derived=fenced), [b""], timeout_s=patient(30))
    broker.kill("commitlog")
    with broker.producer(producer_id=name) as producer:
        producer.send("freed", b"x")
        assert epoch_of(producer) < EPOCH_MAX
    assert "is dropped, as no broker assigned it" in broker.log


@pytest.mark.parametrize("wrong", ["", "a b", "x" * 121, "ö", "a\n"])
def test_names_that_can_be_none(broker: Served, wrong: str) -> None:
    with pytest.raises(NameIllegal):
        broker.producer(producer_id=wrong)
    with pytest.raises(NameIllegal):
        broker.open(producer_id=wrong, sender=1)


def test_the_longest_name(broker: Served) -> None:
    with broker.producer(producer_id="x" * 120) as producer:
        producer.send("longest", b"x")


def test_without_a_broker_there_is_no_such_producer() -> None:
    with pytest.raises(NotReachable, match="alone"):
        Producer("127.0.0.1:1", producer_id="alone", timeout_s=0.3)

    async def work() -> None:
        async with AsyncProducer("127.0.0.1:1", producer_id="alone", timeout_s=0.3) as producer:
            await producer.send("t", b"x")

    with pytest.raises(NotReachable):
        asyncio.run(work())


def test_one_that_the_broker_has_forgotten_says_again_who_it_is(
    broker: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker.producer(producer_id=name) as producer:
        producer.send("forgotten", b"before")
        epoch = epoch_of(producer)
        identity = producer._sender.delivery.identity
        identity.epoch += 100  # as if the broker had lost a later one
        assert producer.send("forgotten", b"after").status == "SEND_OK"
        assert broker.open(producer_id=name, sender=identity.sender).epoch == epoch + 100
    with broker.producer(producer_id=name, retry_max=0) as once:
        once._sender.delivery.identity.epoch += 1
        with pytest.raises(ProducerUnknown, match=name):
            once.send("forgotten", b"not stored")


def test_a_broker_remembers_those_that_were_opened_last(tmp_path: Path) -> None:
    """In a log of small segments a few; one that is forgotten says again who it is."""
    settings = {"mappedFileSizeCommitLog": 64 << 10, "maxMessageSize": 4 << 10}
    with Served(tmp_path / "store", settings) as broker:
        _ = broker.endpoints
        broker.create_topic("t", 1)
        with broker.producer(producer_id="first") as first:
            first.send("t", b"a")
            for number in range(100):
                assert broker.open(producer_id=f"other-{number}", sender=number).code == 0
            remembered = broker.statistics("commitlog")["named_producers"]
            assert 5 < remembered < 50
            assert first.send("t", b"b").queue_offset == 1
            broker.kill("commitlog")
            assert broker.statistics("commitlog")["named_producers"] in (remembered, remembered - 1)
            assert first.send("t", b"c").queue_offset == 2
            with broker.producer(producer_id="first") as second:
                second.send("t", b"d")
                with pytest.raises(ProducerFenced):
                    first.send("t", b"late")
            with pytest.raises(ProducerFenced):
                broker.open(producer_id="other-99", sender=1, epoch=1)


@pytest.mark.slow
def test_several_brokers(tmp_path: Path) -> None:
    """One epoch at all of them; one that was away hears of the newer producer before it stores
    anything of it. And all messages of a key have one broker."""
    server = NameServerActor.start(bind=[("tcp://127.0.0.1:*", False)])
    address = server.proxy().addresses.get()[0]
    names = "ab"
    brokers = {
        name: RunningBroker(tmp_path / name, {"brokerName": name, "namesrvAddr": address})
        for name in names
    }
    options = {"producer_id": "spread", "timeout_s": patient(10)}
    try:
        with Admin(address) as admin:
            admin.create_topic("t", queues=2)
            assert {each.broker for each in admin.brokers()} == set(names)
        with Producer(address, **options) as old:
            assert {old.send("t", b"x").broker for _ in range(8)} == set(names)
            brokers["b"].kill_all()
            with Producer(address, **options) as new:
                assert epoch_of(new) > epoch_of(old)
                brokers["b"] = RunningBroker(brokers["b"].store, brokers["b"].settings)
                assert new.send("t", b"x", queue_id=0).broker == "a"
                while new.send("t", b"x").broker != "b":  # it is avoided for some seconds
                    pass
                for _ in range(8):
                    with pytest.raises(ProducerFenced):
                        old.send("t", b"late")
        with Producer(address, dedup="keys") as producer:
            places = {key: producer.send("t", b"x", keys=key).broker for key in map(str, range(20))}
            assert set(places.values()) == set(names)
            for key, broker in places.items():
                again = producer.send("t", b"x", keys=key)
                assert (again.duplicate, again.broker) == (True, broker)
    finally:
        for each in brokers.values():
            each.close()
        server.stop()
