"""Running consumers of a store that is restored, and so lost messages they have read (Fault 4)."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patient
from ports import free_ports

from cometmq import Admin, Broker
from cometmq.client import AsyncConsumer, Consumer, Message

WAIT_S = patient(60)
QUEUES = 2


class Site:
    """A broker whose store can be backed up and restored."""

    def __init__(self, folder: Path) -> None:
        self._store, self._copy = folder / "store", folder / "copy"
        self._port = free_ports(8)
        self._sent = 0
        self.running = self._start()

    def _start(self) -> Broker:
        settings = {"brokerName": "site"}
        return Broker(self._store, profile="test", port=self._port, settings=settings)

    @property
    def address(self) -> str:
        return self.running.name_server

    def send(self, count: int, tag: str = "") -> list[bytes]:
        bodies = [b"%05d" % number for number in range(self._sent, self._sent + count)]
        self._sent += count
        with self.running.producer() as producer:
            for number, body in enumerate(bodies):
                producer.send("t", body, tags=tag or None, queue_id=number % QUEUES)
        return bodies

    def back_up(self) -> None:
        self.running.close()
        shutil.copytree(self._store, self._copy)
        self.running = self._start()

    def restore(self) -> None:
        self.running.close()
        shutil.rmtree(self._store)
        shutil.copytree(self._copy, self._store)
        self.running = self._start()

    def lag(self, group: str) -> int:
        with Admin(self.address) as admin:
            return sum(each.lag for each in admin.describe_group(group).queues)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    with Admin(found.address) as admin:
        admin.create_topic("t", queues=QUEUES)
    yield found
    found.running.close()


def read(poll: Callable[[], list[Message]], wanted: set[bytes]) -> list[bytes]:
    """Return all messages that arrive until all wanted ones have arrived."""
    found: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while wanted - set(found):
        assert time.monotonic() < deadline, f"{len(wanted - set(found))} messages have not come"
        found += [message.body for message in poll()]
    return found


def consumer_of(site: Site, kind: str, transport: str, folder: Path) -> Consumer:
    options: dict[str, Any] = {"transport": transport, "start": "earliest"}
    if kind == "broadcast":
        options["broadcast"] = folder / "offsets"
    group = None if kind == "alone" else "g"
    consumer = Consumer(site.address, group, **options)
    if kind == "assigned":
        consumer.assign("t")
    else:
        consumer.subscribe("t")
    return consumer


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
@pytest.mark.parametrize("kind", ["group", "assigned", "alone", "broadcast"])
@pytest.mark.parametrize("count", [60, 300])
def test_new_messages_of_a_restored_store_are_delivered(
    site: Site, tmp_path: Path, kind: str, transport: str, count: int
) -> None:
    """New messages arrive once each, with queue ends below and above the consumer's positions."""
    with consumer_of(site, kind, transport, tmp_path) as consumer:

        def poll() -> list[Message]:
            messages = consumer.poll(timeout_s=0.2)
            if kind != "alone":
                consumer.ack(messages)
            return messages

        read(poll, set(site.send(50)))
        if kind != "alone":
            consumer.commit()
        site.back_up()
        read(poll, set(site.send(200)))
        if kind != "alone":
            consumer.commit()
        site.restore()
        new = site.send(count)
        found = read(poll, set(new))
        assert sorted(found) == new  # each once
        if kind != "alone":
            consumer.commit()
    if kind in ("group", "assigned"):
        assert site.lag("g") == 0


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_a_member_that_has_read_nothing_goes_by_its_group(site: Site, transport: str) -> None:
    """A member that only has positions from the broker receives all new messages."""
    with Consumer(site.address, "g", "t", start="earliest", transport=transport) as consumer:
        read(lambda: _acknowledged(consumer), set(site.send(50)))
    site.back_up()
    with Consumer(site.address, "g", "t", transport=transport) as consumer:
        read(lambda: _acknowledged(consumer), set(site.send(100)))
    with Consumer(site.address, "g", "t", transport=transport) as consumer:
        assert not consumer.poll(timeout_s=0.5)
        site.restore()
        new = site.send(60)
        assert sorted(read(lambda: _acknowledged(consumer), set(new))) == new


def _acknowledged(consumer: Consumer) -> list[Message]:
    messages = consumer.poll(timeout_s=0.2)
    consumer.ack(messages)
    return messages


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_lost_messages_of_other_tags_are_not_waited_for(site: Site, transport: str) -> None:
    """The last message that was read is there, and the position is beyond the end all the same."""
    with Consumer(site.address, "g", start="earliest", transport=transport) as consumer:
        consumer.subscribe("t", "a")
        read(lambda: _acknowledged(consumer), set(site.send(50, "a")))
        consumer.commit()
        site.back_up()
        site.send(200, "b")
        deadline = time.monotonic() + WAIT_S
        while [consumer.position(key) for key in consumer.assignment] != [125] * QUEUES:
            assert time.monotonic() < deadline
            _acknowledged(consumer)
        site.restore()
        new = site.send(60, "a")
        assert sorted(read(lambda: _acknowledged(consumer), set(new))) == new


def test_broadcast_progress_beyond_the_end(site: Site, tmp_path: Path) -> None:
    """A broadcasting consumer that was closed during the restore receives new messages."""
    options: dict[str, Any] = {"broadcast": tmp_path / "offsets", "start": "earliest"}
    with Consumer(site.address, "g", "t", **options) as consumer:
        read(lambda: _acknowledged(consumer), set(site.send(50)))
    site.back_up()
    with Consumer(site.address, "g", "t", **options) as consumer:
        read(lambda: _acknowledged(consumer), set(site.send(200)))
    site.restore()
    new = site.send(60)
    with Consumer(site.address, "g", "t", **options) as consumer:
        assert sorted(read(lambda: _acknowledged(consumer), set(new))) == new


def test_asyncio(site: Site) -> None:
    async def work() -> None:
        async with AsyncConsumer(site.address, "g", "t", start="earliest") as consumer:

            async def take(wanted: set[bytes]) -> list[bytes]:
                found: list[bytes] = []
                while wanted - set(found):
                    messages = await consumer.poll(timeout_s=0.2)
                    consumer.ack(messages)
                    found += [message.body for message in messages]
                return found

            await take(set(await asyncio.to_thread(site.send, 50)))
            await consumer.commit()
            await asyncio.to_thread(site.back_up)
            await take(set(await asyncio.to_thread(site.send, 100)))
            await consumer.commit()
            await asyncio.to_thread(site.restore)
            new = await asyncio.to_thread(site.send, 60)
            assert sorted(await take(set(new))) == new

    asyncio.run(asyncio.wait_for(work(), 3 * WAIT_S))


def test_acknowledgements_over_a_restart_are_committed(site: Site) -> None:
    """Acks before a restart with the same store are committed: no message arrives twice."""
    bodies = site.send(40)
    with Consumer(site.address, "g", "t", start="earliest", auto_commit_ms=3_600_000) as consumer:
        found: list[Message] = []
        while len(found) < len(bodies):
            found += consumer.poll(timeout_s=0.2)
        site.back_up()
        consumer.poll(timeout_s=1)
        consumer.ack(found)
    assert site.lag("g") == 0
