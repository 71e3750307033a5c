"""Handlers in broadcasting: every member is given everything, and what fails is dropped."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_children import handle_until_killed, offsets_in
from patience import patient
from waiting import until

from cometmq import Admin, AsyncConsumer, Broker, Consumer, Message, Reject, Retry
from cometmq.errors import ArgumentIllegal
from cometmq.testing import Sandbox

WAIT_S = patient(60)
COUNT = 100  # messages in each of two queues


@pytest.fixture
def topic(cometmq: Sandbox) -> str:
    name = cometmq.topic("cast", queues=2)
    fill(cometmq.broker, name, 0, COUNT)
    return name


def fill(broker: Broker, topic: str, first: int, end: int) -> None:
    """The body is the offset."""
    with broker.producer() as producer:
        for queue_id in range(2):
            bodies = [b"%d" % number for number in range(first, end)]
            producer.send_many(topic, bodies, queue_id=queue_id, keys="k")


def place(message: Message) -> tuple[int, int]:
    return message.queue_id, message.queue_offset


def kept(folder: Path, member: str = "m") -> dict[int, int]:
    """Where the file says that the member is."""
    return offsets_in(folder / member / "cast" / "offsets.json")


def commits(consumer: Consumer, folder: Path, expected: dict[int, int]) -> bool:
    consumer.commit()
    return kept(folder) == expected


def run(
    broker: Broker,
    topic: str,
    folder: Path,
    handler: Callable[[Any], object],
    count: int,
    *,
    member: str = "m",
    max_reconsume_times: int | None = None,
    **options: Any,
) -> None:
    """Until the handler was called so often."""
    left = iter(range(count - 1))

    def handle(unit: Any) -> object:
        if next(left, None) is None:
            consumer.close()
        return handler(unit)

    with broker.consumer(
        "cast", topic, broadcast=folder, member=member, max_reconsume_times=max_reconsume_times
    ) as consumer:
        consumer.run(handle, **options)


async def run_async(
    broker: Broker, topic: str, folder: Path, handler: Callable[[Any], object], count: int
) -> None:
    left = iter(range(count - 1))

    async def handle(message: Message) -> object:
        if next(left, None) is None:
            await consumer.close()
        return handler(message)

    async with AsyncConsumer(
        broker.name_server, "cast", topic, broadcast=folder, member="m"
    ) as consumer:
        await consumer.run(handle)


EVERYTHING = [(queue_id, offset) for queue_id in range(2) for offset in range(COUNT)]


def test_every_member_is_given_everything(broker: Broker, topic: str, tmp_path: Path) -> None:
    """Both at one time; a member that comes back goes on where it was, and the broker keeps
    nothing of them."""
    seen: dict[str, list[tuple[int, int]]] = {"one": [], "other": []}
    threads = [
        threading.Thread(
            target=run,
            args=(broker, topic, tmp_path, lambda each, into=into: into.append(place(each))),
            kwargs={"count": len(EVERYTHING), "member": member},
        )
        for member, into in seen.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for member, places in seen.items():
        assert sorted(places) == EVERYTHING
        assert kept(tmp_path, member) == {0: COUNT, 1: COUNT}
    fill(broker, topic, COUNT, COUNT + 1)
    run(broker, topic, tmp_path, lambda each: seen["one"].append(place(each)), 2, member="one")
    assert sorted(seen["one"][-2:]) == [(0, COUNT), (1, COUNT)]
    with Admin(broker.name_server) as admin:
        assert "cast" not in {each.group for each in admin.groups()}


@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_what_fails_is_dropped(
    broker: Broker, topic: str, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised; it is told, and done with."""
    seen: list[tuple[int, int]] = []
    errors = {3: ValueError("three"), 5: Retry(after=0.01), 7: Reject("seven")}

    def handle(message: Message) -> None:
        seen.append(place(message))
        error = errors.get(message.queue_offset) if message.queue_id == 0 else None
        if error is not None:
            raise error

    for count in (len(EVERYTHING), 2):
        if way == "threads":
            run(broker, topic, tmp_path, handle, count)
        else:
            asyncio.run(run_async(broker, topic, tmp_path, handle, count))
        if count > 2:
            assert kept(tmp_path) == {0: COUNT, 1: COUNT}
            fill(broker, topic, COUNT, COUNT + 1)
    assert sorted(seen) == sorted([*EVERYTHING, (0, COUNT), (1, COUNT)])
    told = {record.getMessage(): record for record in caplog.records}
    where = f"{topic}/0 offset %d keys k (attempt 1)"
    failed = told[f"the handler failed on {where % 3}, which is dropped"]
    assert failed.exc_info is not None
    assert told[f"{where % 5} is dropped: again after 0.01 s"].levelname == "WARNING"
    assert told[f"{where % 7} is dropped: seven"].levelname == "WARNING"
    with Admin(broker.name_server) as admin:
        assert not any("%" in each and "cast" in each for each in admin.topics())


def test_progress_does_not_pass_what_is_at_work(broker: Broker, topic: str, tmp_path: Path) -> None:
    """Nor does a run that ends meanwhile; what was not done comes again."""
    span = 50
    expected = COUNT + 5 + span - 1
    seen: list[tuple[int, int]] = []
    release = threading.Event()

    def handle(message: Message) -> None:
        if place(message) == (0, 5):
            release.wait(WAIT_S)
        seen.append(place(message))

    consumer = broker.consumer("cast", topic, broadcast=tmp_path, member="m")
    options = {"span": span, "concurrency": 4, "end_timeout_s": 0.01}
    thread = threading.Thread(target=consumer.run, args=(handle,), kwargs=options)
    thread.start()
    try:
        until(lambda: len(seen) == expected)
        until(lambda: commits(consumer, tmp_path, {0: 5, 1: COUNT}))
        assert len(seen) == expected  # bounded, however long it takes
        consumer.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        release.set()
        consumer.close()
    assert kept(tmp_path) == {0: 5, 1: COUNT}
    again: list[tuple[int, int]] = []
    run(broker, topic, tmp_path, lambda each: again.append(place(each)), COUNT - 5)
    assert sorted(again) == [(0, offset) for offset in range(5, COUNT)]


def test_a_kill_in_a_handler(broker: Broker, topic: str, tmp_path: Path) -> None:
    """What was at work comes again, whatever was done behind it."""
    context = multiprocessing.get_context("spawn")
    reads, writes = context.Pipe(duplex=False)
    child = context.Process(
        target=handle_until_killed, args=(broker.name_server, topic, str(tmp_path), writes)
    )
    child.start()
    assert reads.poll(WAIT_S)
    at_work = reads.recv()
    child.kill()
    child.join()
    assert kept(tmp_path) == {0: at_work, 1: COUNT}
    seen: list[tuple[int, int]] = []
    run(broker, topic, tmp_path, lambda each: seen.append(place(each)), COUNT - at_work)
    assert sorted(seen) == [(0, offset) for offset in range(at_work, COUNT)]


def test_batches_by_key(broker: Broker, topic: str, tmp_path: Path) -> None:
    """A batch that fails is dropped as a whole; one key is handled one after the other."""
    order: dict[int, list[int]] = defaultdict(list)

    def handle(messages: list[Message]) -> None:
        order[messages[0].queue_id] += [each.queue_offset for each in messages]
        if order[0][-1] == COUNT - 1 == order[1][-1]:
            consumer.close()
        raise ValueError("no")

    with broker.consumer("cast", topic, broadcast=tmp_path, member="m") as consumer:
        consumer.run(handle, batch=7, ordered_by=lambda message: message.queue_id)
    assert order == {queue_id: list(range(COUNT)) for queue_id in range(2)}
    assert kept(tmp_path) == {0: COUNT, 1: COUNT}


def test_a_key_that_fails(broker: Broker, topic: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def key(message: Message) -> object:
        return [] if message.queue_offset == 9 else message.keys  # no list has a hash

    def handle(message: Message) -> None:
        seen.append(place(message))

    run(broker, topic, tmp_path, handle, len(EVERYTHING) - 2, ordered_by=key)
    assert sorted(seen) == [each for each in EVERYTHING if each[1] != 9]
    assert kept(tmp_path) == {0: COUNT, 1: COUNT}


@pytest.mark.parametrize("most", [None, 2])
def test_a_queue_in_order(
    broker: Broker,
    topic: str,
    tmp_path: Path,
    most: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What fails is tried again in place: for ever, or so often; then it is dropped."""
    order: dict[int, list[int]] = defaultdict(list)

    def handle(message: Message) -> None:
        order[message.queue_id].append(message.queue_offset)
        if message.queue_offset == 3 and message.reconsume_times < (4 if most is None else 9):
            raise ValueError("not yet")
        if message.queue_offset == 4:
            raise Reject("never")

    times = 4 if most is None else most  # more than once
    count = 2 * (COUNT + times)
    options = {"orderly": True, "suspend_s": 0.01, "max_reconsume_times": most}
    run(broker, topic, tmp_path, handle, count, **options)
    expected = [0, 1, 2, *[3] * times, *range(3, COUNT)]
    assert order == {0: expected, 1: expected}
    assert kept(tmp_path) == {0: COUNT, 1: COUNT}
    assert f"{topic}/1 offset 4 keys k (attempt 1) is dropped: never" in caplog.text
    assert ("(attempt 3), which is dropped" in caplog.text) == (most == 2)


def test_a_handler_that_does_not_return(
    broker: Broker, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is dropped like any that fails, and its late end counts no longer."""
    release = threading.Event()

    def handle(message: Message) -> None:
        if place(message) == (0, 5):
            release.wait(WAIT_S)
            raise ValueError("too late")

    consumer = broker.consumer("cast", topic, broadcast=tmp_path, member="m")
    options = {"stuck_s": 0.1, "consume_timeout_s": 0.2}
    thread = threading.Thread(target=consumer.run, args=(handle,), kwargs=options)
    thread.start()
    try:
        until(lambda: commits(consumer, tmp_path, {0: COUNT, 1: COUNT}))
    finally:
        release.set()
        consumer.close()
        thread.join(WAIT_S)
    assert "offset 5 keys k (attempt 1) is dropped: not done within" in caplog.text
    assert "too late" not in caplog.text


def test_a_handler_that_wants_to_end(broker: Broker, topic: str, tmp_path: Path) -> None:
    """A failed delivery as well; what was not begun comes again."""

    def handle(message: Message) -> None:
        if place(message) == (0, 4):
            raise SystemExit(3)

    with broker.consumer("cast", broadcast=tmp_path, member="m") as consumer:
        consumer.assign([(broker.name, topic, 0)])
        with pytest.raises(SystemExit):
            consumer.run(handle, concurrency=1)
    assert kept(tmp_path) == {0: 5}


def test_who_has_no_retries_and_does_not_broadcast(broker: Broker, topic: str) -> None:
    with broker.consumer(None, topic) as consumer, pytest.raises(ArgumentIllegal, match="poll"):
        consumer.run(print)
    with broker.consumer("g") as consumer:
        consumer.assign(topic)
        with pytest.raises(ArgumentIllegal, match="poll"):
            consumer.run(print)
