"""Handlers, with a real broker: what fails comes again, order, the end, and what takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inside import queues_of
from patience import patient
from ports import free_ports
from shared_data import data_path
from waiting import until

import cometmq.client.handling.dispatcher as dispatching
import cometmq.client.handling.returns as returning
import cometmq.client.handling.work as working
from cometmq import Broker, Reject, Retry
from cometmq.client import Admin, AsyncConsumer, AsyncPopConsumer, Consumer, Message
from cometmq.client.handling import stuck
from cometmq.client.handling.failures import BURST
from cometmq.client.handling.options import Handling
from cometmq.client.handling.outcomes import check_awaited
from cometmq.client.receiving.buffer import OVER
from cometmq.protocol import errors
from cometmq.protocol.commands import GiveBackMessages
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "handlers-" + "".join(each if each.isalnum() else "-" for each in request.node.name)[:90]


def fill(broker: Broker, topic: str, count: int, queues: int = 1) -> None:
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic(topic, queues=queues)
        for queue_id in range(queues):
            bodies = [b"%d" % number for number in range(count)]
            producer.send_many(topic, bodies, queue_id=queue_id, keys="k")


@contextmanager
def running(consumer: Consumer, handler: Callable[[Any], Any], **options: Any) -> Iterator[None]:
    """In a thread of its own; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            consumer.run(handler, **options)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


def committed(broker: Broker, topic: str, group: str = "g") -> dict[int, int]:
    with Admin(broker.name_server) as admin:
        return {queue: offset for (_, queue), offset in admin.committed(group, topic).items()}


def count_in(broker: Broker, topic: str) -> int:
    with Admin(broker.name_server) as admin:
        return sum(
            len(admin.queue_range(topic, each.queue_id))
            for each in admin.describe_topic(topic).queues
        )


class Rule:
    """Every 7th line fails twice, every 101st for ever."""

    def __init__(self) -> None:
        self.attempts: Counter[int] = Counter()
        self.done: set[int] = set()
        self._lock = threading.Lock()

    def handle(self, message: Message) -> None:
        number = message.flag
        with self._lock:
            assert message.reconsume_times == self.attempts[number]
            self.attempts[number] += 1
            attempts = self.attempts[number]
        assert not message.topic.startswith("%")
        if number % 101 == 0 or (number % 7 == 0 and attempts <= 2):
            raise ValueError("by rule")
        with self._lock:
            self.done.add(number)


@pytest.mark.parametrize("way", ["threads", "tasks"])
@pytest.mark.slow
def test_failures_by_rule(
    broker: Broker, topic: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Exact counts in the topic, its retries and the dead letters."""
    lines = data_path("loghub", "Linux.log").read_bytes().splitlines()[:400]
    with broker.producer(linger_ms=5) as producer:
        for number, line in enumerate(lines):
            producer.send_async(topic, line or b" ", flag=number)
        producer.flush()
    dead = {number for number in range(len(lines)) if number % 101 == 0}
    twice = {number for number in range(len(lines)) if number % 7 == 0} - dead
    rule, group = Rule(), f"rule-{way}"

    def is_over() -> bool:
        return len(rule.done) == len(lines) - len(dead) and all(
            rule.attempts[number] == 4 for number in dead
        )

    if way == "threads":
        with (
            broker.consumer(group, topic, max_reconsume_times=3) as consumer,
            running(consumer, rule.handle),
        ):
            until(is_over)
    else:
        asyncio.run(in_tasks(broker, group, topic, rule, is_over))
    assert Counter(rule.attempts.values()) == {
        1: len(lines) - len(dead) - len(twice), 3: len(twice), 4: len(dead),
    }  # fmt: skip
    failures = [each for each in caplog.records if each.msg.startswith("the handler failed")]
    told = [each for each in failures if each.exc_info]
    # "(N more like it ..." beside one that is told, and "failed N more times" at the end.
    untold = sum(
        int(count)
        for each in failures
        for count in re.findall(r"(?:\(|failed )(\d+) more", each.getMessage())
    )
    assert len(told) >= BURST
    assert len(told) + untold == 2 * len(twice) + 4 * len(dead)
    assert count_in(broker, topic) == len(lines)
    assert count_in(broker, f"%RETRY%{group}") == 2 * len(twice) + 3 * len(dead)
    until(lambda: count_in(broker, f"%DLQ%{group}") == len(dead))
    with broker.consumer("looks", f"%DLQ%{group}") as consumer:
        found: list[Message] = []
        until(lambda: found.extend(consumer.poll(100, 0.1)) or len(found) >= len(dead))
    assert sorted(each.body for each in found) == sorted(lines[number] for number in dead)


async def in_tasks(
    broker: Broker, group: str, topic: str, rule: Rule, is_over: Callable[[], bool]
) -> None:
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        rule.handle(message)

    async with broker.async_consumer(group, topic, max_reconsume_times=3) as consumer:
        task = asyncio.create_task(consumer.run(handle))
        deadline = time.monotonic() + WAIT_S
        while not is_over():
            assert time.monotonic() < deadline
            assert not task.done()
            await asyncio.sleep(0.02)
        await consumer.close()
        await task


def test_what_a_handler_says(broker: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    """Raised or returned: Retry and Reject; other values acknowledge; a coroutine is an error."""
    fill(broker, topic, 6)
    caplog.set_level(logging.INFO)
    came: dict[int, list[float]] = defaultdict(list)

    async def nobody_awaits() -> None:
        raise AssertionError

    def handle(message: Message) -> object:
        number = int(message.body)
        came[number].append(time.monotonic())
        if len(came[number]) > 1:
            return None
        if number == 1:
            raise Retry(after=timedelta(milliseconds=700))
        if number == 4:
            raise Reject("of no use")
        if number == 5:
            return nobody_awaits()
        return {0: False, 2: Retry(after=0.5), 3: Reject}[number]

    with broker.consumer("says", topic) as consumer, running(consumer, handle):
        until(lambda: all(len(came[number]) == 2 for number in (1, 2, 5)))
        until(lambda: count_in(broker, "%DLQ%says") == 2)
    assert [len(came[number]) for number in range(6)] == [1, 2, 2, 1, 1, 2]
    assert came[1][1] - came[1][0] > 0.7
    assert "coroutine" in caplog.text
    assert "again after 0.7 s" in caplog.text
    assert committed(broker, topic, "says") == {0: 6}


@pytest.mark.parametrize("after", [-1, float("nan"), "1", True, timedelta(days=-1)])
def test_no_time(after: Any) -> None:
    with pytest.raises(errors.ArgumentIllegal, match="Retry"):
        Retry(after)


@pytest.mark.parametrize(
    ("given", "named"), [(("why",), {"after": 3}), (("why", 3), {}), ((), {"afer": 3})]
)
def test_other_arguments_of_retry_are_refused_with_its_parameter(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(errors.ArgumentIllegal, match="only parameter is `after`"):
        Retry(*given, **named)


def test_what_is_refused_at_once(broker: Broker, topic: str) -> None:
    async def handle(message: Message) -> None: ...

    def begun(message: Message) -> Iterator[None]:
        yield

    with broker.consumer("refused", topic) as consumer:
        wrong: list[tuple[Any, dict[str, Any]]] = [
            (handle, {}),
            (begun, {}),
            (3, {}),
            (print, {"concurrency": 0}),
            (print, {"batch": 0}),
            (print, {"suspend_s": 31}),
            (print, {"orderly": True, "ordered_by": str}),
            (print, {"middleware": [lambda handler: None]}),
            (print, {"colour": "red"}),
        ]
        for handler, options in wrong:
            with pytest.raises(errors.ArgumentIllegal):
                consumer.run(handler, **options)
    with pytest.raises(RuntimeError, match="closed"):
        consumer.run(print)


class Called:
    async def __call__(self, message: Message) -> None: ...


async def awaited(message: Message) -> None: ...


def plain(message: Message) -> None: ...


def times(_count: int, message: Message) -> None: ...


@functools.wraps(awaited)
def counted(message: Message) -> Awaitable[None]:
    return awaited(message)


@pytest.mark.parametrize("pops", [False, True])
def test_the_wrong_kind_of_handler_is_refused_at_once(
    broker: Broker, topic: str, pops: bool
) -> None:
    """A plain function was called once for each message in a loop of tasks, which awaited None; and
    all its messages became dead letters."""
    fill(broker, topic, 1)
    seen: list[bytes] = []

    async def main() -> None:
        consumer: AsyncConsumer | AsyncPopConsumer = (
            broker.async_pop_consumer(topic, topic) if pops else broker.async_consumer(topic, topic)
        )
        async with consumer:
            for handler in (plain, seen.append, print, lambda message: None, partial(times, 1)):
                with pytest.raises(errors.ArgumentIllegal, match="not `async def`"):
                    await consumer.run(handler)

            def ends(handler: Callable[[Message], Awaitable[None]]) -> Callable[[Message], Any]:
                def call(message: Message) -> Awaitable[None]:
                    seen.append(message.body)
                    closing.append(asyncio.create_task(consumer.close()))
                    return handler(message)

                return call

            closing: list[asyncio.Task[None]] = []
            for handler in (counted, Called(), partial(awaited)):
                check_awaited(handler)
            await consumer.run(counted, middleware=[ends])
            await closing[0]

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert seen == [b"0"]
    sync = broker.pop_consumer(topic, topic) if pops else broker.consumer(topic, topic)
    with sync as consumer:
        for handler in (awaited, Called(), partial(awaited)):
            with pytest.raises(errors.ArgumentIllegal, match="AsyncPopConsumer takes it"):
                consumer.run(handler)


class Unbound:
    """As a proxy of a web framework is, outside of a request."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("nothing is there that this stands for")


class Later(Retry):
    def __init__(self, after_s: Any = None) -> None:
        if after_s is not None:
            self.after_s = after_s


def wrong_time() -> None:
    raise Later("soon")


def no_time() -> None:
    raise Later


@pytest.mark.parametrize(
    ("say", "times"),
    [
        (Unbound, 1),
        (no_time, 2),
        (wrong_time, 2),
        (lambda: (each for each in "nobody runs this"), 2),
    ],
)
@pytest.mark.slow
def test_nonsense_ends_no_thread(
    broker: Broker, topic: str, say: Callable[[], Any], times: int
) -> None:
    """Whatever a handler says: its message is done or comes again, and the thread goes on."""
    fill(broker, topic, 3)
    seen: Counter[bytes] = Counter()

    def handle(message: Message) -> Any:
        seen[message.body] += 1
        return say() if seen[message.body] == 1 else None

    with (
        broker.consumer(topic, topic) as consumer,
        running(consumer, handle, concurrency=1),
    ):
        until(lambda: seen == {b"0": times, b"1": times, b"2": times})
        until(lambda: committed(broker, topic, topic) == {0: 3})


def test_batches_fail_as_a_whole(broker: Broker, topic: str) -> None:
    fill(broker, topic, 50)
    sizes: list[int] = []
    times: Counter[int] = Counter()
    lock = threading.Lock()

    def handle(messages: list[Message]) -> None:
        with lock:
            sizes.append(len(messages))
            times.update(int(each.body) for each in messages)
            first_time = all(each.reconsume_times == 0 for each in messages)
        if first_time and any(int(each.body) == 13 for each in messages):
            raise ValueError("thirteen")

    with broker.consumer("batches", topic) as consumer, running(consumer, handle, batch=8):
        until(lambda: times[13] == 2 and sum(times.values()) >= 58)
    assert max(sizes) == 8
    assert [number for number in range(50) if times[number] == 2] == list(range(8, 16))
    assert committed(broker, topic, "batches") == {0: 50}


@pytest.mark.parametrize("room", [100, 0])
@pytest.mark.parametrize("pops", [False, True])
@pytest.mark.slow
def test_properties_without_room_for_more(
    broker: Broker, topic: str, room: int, pops: bool
) -> None:
    """No copy could be made of it: it was handled for ever, or, popped, never again."""
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic(topic, queues=1)
        admin.create_group(topic, {"retryMaxTimes": 2})
        sent = {"a": "v" * (32_767 - len(f"UNIQ_KEY\1{'0' * 32}\2a\1\2") - room)}
        producer.send(topic, b"1", properties=sent)
        producer.send(topic, b"2")
    seen: list[tuple[bytes, int, int]] = []

    def handle(message: Message) -> None:
        length = len(message.properties.get("a", ""))
        seen.append((message.body, message.reconsume_times, length))
        raise ValueError("nobody can do this")

    consumer = broker.pop_consumer(topic, topic) if pops else broker.consumer(topic, topic)
    with Admin(broker.name_server) as admin, consumer, running(consumer, handle):
        until(lambda: len(admin.dead_letters(topic)) == 2)
        big, small = sorted(admin.dead_letters(topic), key=lambda each: each.message.body)
    length = len(sent["a"])
    assert [each for each in seen if each[0] == b"1"] == [(b"1", n, length) for n in range(3)]
    assert (big.attempts, small.attempts) == (3, 3)
    assert big.message.properties["a"] == sent["a"]
    assert big.topic == (topic if room else f"%DLQ%{topic}")


def test_one_key_after_the_other(broker: Broker, topic: str) -> None:
    """Keys in parallel: the handler of one key waits for that of another."""
    with broker.producer(linger_ms=5) as producer:
        for number in range(200):
            producer.send_async(topic, b"%d" % number, keys=f"k{number % 5}", ordering_key="one")
        producer.flush()
    order: dict[str, list[int]] = defaultdict(list)
    at_work: set[str] = set()
    both = threading.Barrier(2)
    lock = threading.Lock()

    def handle(message: Message) -> None:
        key, number = str(message.keys), int(message.body)
        with lock:
            assert key not in at_work
            at_work.add(key)
        if number in (0, 1):
            both.wait(WAIT_S)
        with lock:
            order[key].append(number)
            at_work.remove(key)

    with (
        broker.consumer("keys", topic) as consumer,
        running(consumer, handle, ordered_by=lambda message: message.keys, concurrency=4),
    ):
        until(lambda: sum(map(len, order.values())) == 200)
    assert order == {f"k{key}": list(range(key, 200, 5)) for key in range(5)}


def test_a_queue_in_order(broker: Broker, topic: str) -> None:
    """What fails is tried again in place, and so often goes to the dead letters; then on."""
    fill(broker, topic, 20, queues=2)
    order: dict[int, list[int]] = defaultdict(list)

    def handle(message: Message) -> None:
        number = int(message.body)
        order[message.queue_id].append(number)
        if number == 7 and message.reconsume_times < 2:
            raise Retry(after=0.01)
        if number == 11:
            raise ValueError("never")

    with (
        broker.consumer("orderly", topic, max_reconsume_times=3) as consumer,
        running(consumer, handle, orderly=True, suspend_s=0.01),
    ):
        until(lambda: all(order[queue][-1:] == [19] for queue in range(2)))
    wanted = [*range(7), 7, 7, 7, 8, 9, 10, 11, 11, 11, 11, *range(12, 20)]
    assert order == {0: wanted, 1: wanted}
    assert count_in(broker, "%DLQ%orderly") == 2
    assert committed(broker, topic, "orderly") == {0: 20, 1: 20}


@pytest.mark.parametrize("fails_as", ["again", "dead", "later"])
def test_a_worker_that_is_held_up_behind_a_failure(
    fails_as: str, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has gone on meanwhile, and another worker has it: never two."""
    fill(broker, topic, 30)
    held_up = threading.Event()
    order: list[int] = []
    at_work = most = 0
    lock = threading.Lock()
    failed, keep_back = dispatching.Dispatcher.failed, dispatching.Dispatcher.keep_back

    def wait_until_put(work: Any) -> None:
        if not held_up.is_set():
            held_up.set()
            until(lambda: not work.resting)

    def failed_slowly(self: Any, work: Any, *rest: Any) -> Any:
        found = failed(self, work, *rest)
        wait_until_put(work)
        return found

    def keep_back_slowly(self: Any, work: Any, *rest: Any) -> Any:
        found = keep_back(self, work, *rest)
        wait_until_put(work)
        return found

    def handle(message: Message) -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
            order.append(int(message.body))
            first = order == [0]
        time.sleep(0.002)  # so that two would be seen
        with lock:
            at_work -= 1
        if first and fails_as == "later":
            queues_of(consumer)[0].lease = OVER  # for a while nobody knows whose it is
            threading.Timer(0.1, lambda: setattr(queues_of(consumer)[0], "lease", lease)).start()
        elif first:
            raise Retry(after=0.01) if fails_as == "again" else Reject()

    monkeypatch.setattr(dispatching.Dispatcher, "failed", failed_slowly)
    monkeypatch.setattr(dispatching.Dispatcher, "keep_back", keep_back_slowly)
    with broker.consumer("held-up", topic) as consumer:
        until(lambda: queues_of(consumer))
        lease = queues_of(consumer)[0].lease
        with running(consumer, handle, orderly=True, suspend_s=0.01, concurrency=4):
            until(lambda: 29 in order)
    assert held_up.is_set()
    assert most == 1
    assert order == [0] * (fails_as == "again") + list(range(30))


def test_a_task_that_is_held_up_behind_a_failure(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above: the broker has the dead letter before the task goes on."""
    fill(broker, topic, 30)
    at_work = most = 0
    order: list[int] = []
    failed = dispatching.Dispatcher.failed

    def failed_slowly(self: Any, work: Any, *rest: Any) -> Any:
        found = failed(self, work, *rest)
        until(lambda: not work.resting)
        return found

    monkeypatch.setattr(dispatching.Dispatcher, "failed", failed_slowly)

    async def main() -> None:
        async with AsyncConsumer(broker.name_server, "held-up-tasks", topic) as consumer:

            async def handle(message: Message) -> None:
                nonlocal at_work, most
                at_work += 1
                most = max(most, at_work)
                order.append(int(message.body))
                await asyncio.sleep(0.002)
                at_work -= 1
                if message.queue_offset == 29:
                    await consumer.close()
                if message.queue_offset == 0:
                    raise Reject

            await consumer.run(handle, orderly=True, concurrency=4)

    asyncio.run(main())
    assert most == 1
    assert order == list(range(30))


def test_progress_and_span(broker: Broker, topic: str) -> None:
    """The first message is not done: the others are, so far ahead, and nothing is committed."""
    fill(broker, topic, 300)
    told = threading.Event()
    done: set[int] = set()

    def handle(message: Message) -> None:
        if message.queue_offset == 0:
            assert told.wait(WAIT_S)
        done.add(message.queue_offset)

    with (
        broker.consumer("span", topic, auto_commit_ms=20) as consumer,
        running(consumer, handle, span=100),
    ):
        until(lambda: len(done) == 99)
        consumer.commit()
        with pytest.raises(AssertionError):
            assert committed(broker, topic, "span")[0] > 0
        assert done == set(range(1, 100))
        told.set()
        until(lambda: len(done) == 300)
    assert committed(broker, topic, "span") == {0: 300}


def test_a_handler_that_does_not_return(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported, given back, and its late end counts no longer."""
    fill(broker, topic, 3)
    told = threading.Event()
    came: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        came.append((message.queue_offset, message.reconsume_times))
        if int(message.body) == 1 and message.reconsume_times == 0:
            told.wait(WAIT_S)
            raise ValueError("too late")

    with (
        broker.consumer("stuck", topic) as consumer,
        running(consumer, handle, stuck_s=0.2, consume_timeout_s=0.6),
    ):
        until(lambda: (0, 1) in came)
        until(lambda: committed(broker, topic, "stuck") == {0: 3} or consumer.commit())
        told.set()
    assert sorted(came) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert f"the handler has had {topic}/0 offset 1 keys k (attempt 1) for" in caplog.text
    assert "is given back: not done within" in caplog.text
    assert "too late" not in caplog.text


class Late(logging.Filter):
    """Between the look at a handler and what comes of it: the handler returns."""

    def __init__(self, returns: threading.Event, has_ended: Callable[[], object]) -> None:
        super().__init__()
        self._returns, self._has_ended = returns, has_ended

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("the handler has had") and not self._returns.is_set():
            self._returns.set()
            until(self._has_ended)
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_a_handler_that_returns_as_its_time_is_over(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What has ended is not given back as well: the pump had looked before, and did so after."""
    fill(broker, topic, 2)
    returns = threading.Event()
    came: list[tuple[int, int]] = []
    given_back: list[int] = []
    put = returning.Returns.put

    def noted(self: Any, failure: Any) -> None:
        given_back.extend(each.queue_offset for each in failure.messages)
        put(self, failure)

    def handle(message: Message) -> None:
        came.append((message.queue_offset, message.reconsume_times))
        if message.queue_offset == 0 and not message.reconsume_times:
            returns.wait(WAIT_S)
            if fails:
                raise ValueError("at the last moment")

    monkeypatch.setattr(returning.Returns, "put", noted)
    # One thread: that it has begun with the second message says that it has ended the first.
    teller = Late(returns, lambda: (1, 0) in came)
    stuck.log.addFilter(teller)
    try:
        with (
            broker.consumer(topic, topic) as consumer,
            running(consumer, handle, concurrency=1, stuck_s=0.2, consume_timeout_s=0.2),
        ):
            until(lambda: committed(broker, topic, topic) == {0: 2} or consumer.commit())
            until(lambda: len(came) == 2 + fails)
    finally:
        stuck.log.removeFilter(teller)
    assert given_back == [0] * fails
    assert sorted(came) == [(0, 0), *[(0, 1)] * fails, (1, 0)]


def test_a_handler_whose_time_is_over_as_it_has_returned(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pump looks between its return and the note of that."""
    fill(broker, topic, 1)
    came: list[int] = []
    run: list[Any] = []

    class Finished(deque[Any]):
        def append(self, unit: Any) -> None:
            if threading.current_thread().name.startswith("cometmq handler"):
                run[0]._watch(time.monotonic() + patient(3_600))
            super().append(unit)

    class Track(working.Track):
        def __init__(self, queue: Any) -> None:
            super().__init__(queue)
            self.finished = Finished()

    made = dispatching.Dispatcher.__init__

    def noted(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        run.append(self)

    monkeypatch.setattr(dispatching, "Track", Track)
    monkeypatch.setattr(dispatching.Dispatcher, "__init__", noted)
    with broker.consumer(topic, topic) as consumer:
        with running(consumer, lambda message: came.append(message.reconsume_times)):
            until(lambda: committed(broker, topic, topic) == {0: 1} or consumer.commit())
            until(lambda: run[0].in_hand <= 0)
        assert run[0].in_hand == 0
    assert came == [0]


def test_what_was_late_and_could_not_be_given_back(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again here, by the same thread perhaps, whose second end counts."""
    ask = Channel.ask

    def away(self: Channel, command: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(command, GiveBackMessages):
            told.set()
            raise errors.NotConfirmed("the broker is away")
        return ask(self, command, *arguments, **options)

    monkeypatch.setattr(Channel, "ask", away)
    monkeypatch.setattr(dispatching, "AGAIN_S", 0.01)
    fill(broker, topic, 1)
    told = threading.Event()
    times: list[int] = []

    def handle(message: Message) -> None:
        times.append(message.reconsume_times)
        if len(times) == 1:
            told.wait(WAIT_S)

    with (
        broker.consumer(topic, topic) as consumer,
        running(consumer, handle, concurrency=1, consume_timeout_s=0.2),
    ):
        until(lambda: committed(broker, topic, topic) == {0: 1} or consumer.commit())
    assert times == [0, 1]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_handler_that_wants_to_end(broker: Broker, topic: str, error: BaseException) -> None:
    """The delivery has failed, the run ends and raises it, and what is left comes again."""
    fill(broker, topic, 10)
    group, seen = f"ends-{type(error).__name__}", []

    def handle(message: Message) -> None:
        if int(message.body) == 4 and message.reconsume_times == 0:
            raise error
        seen.append(int(message.body))

    with broker.consumer(group, topic) as consumer:
        with pytest.raises(type(error)):
            consumer.run(handle, concurrency=1)
        assert seen == [0, 1, 2, 3]
        with running(consumer, handle):
            until(lambda: sorted(seen) == list(range(10)))


def test_a_handler_may_close(broker: Broker, topic: str) -> None:
    fill(broker, topic, 10)
    with broker.consumer("closes", topic) as consumer:
        consumer.run(lambda message: consumer.close(), concurrency=1)
    assert committed(broker, topic, "closes") == {0: 1}


def test_middleware_wraps(broker: Broker, topic: str) -> None:
    fill(broker, topic, 1)
    calls: list[str] = []

    def named(name: str) -> Callable[[Callable[[Message], Any]], Callable[[Message], Any]]:
        def wrap(handler: Callable[[Message], Any]) -> Callable[[Message], Any]:
            def call(message: Message) -> Any:
                calls.append(name)
                return handler(message)

            return call

        return wrap

    with broker.consumer("wrapped", topic) as consumer:
        consumer.run(
            lambda message: (calls.append("handler"), consumer.close()),
            middleware=[named("outer"), named("inner")],
        )
    assert calls == ["outer", "inner", "handler"]


def test_what_cannot_be_given_back(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again here, and is not acknowledged before it is done."""
    ask = Channel.ask

    def away(self: Channel, command: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(command, GiveBackMessages):
            raise errors.NotConfirmed("the broker is away")
        return ask(self, command, *arguments, **options)

    monkeypatch.setattr(Channel, "ask", away)
    monkeypatch.setattr(dispatching, "AGAIN_S", 0.01)
    fill(broker, topic, 3)
    times: list[int] = []

    def handle(message: Message) -> None:
        if int(message.body) == 0:
            times.append(message.reconsume_times)
            if len(times) < 5:
                raise ValueError("not yet")
            consumer.close()

    with broker.consumer("away", topic) as consumer:
        consumer.run(handle)
    assert times == [0, 1, 2, 3, 4]
    assert caplog.text.count("cannot be given back (the broker is away)") == 1
    assert committed(broker, topic, "away") == {0: 3}


def test_a_task_that_is_cancelled(broker: Broker, topic: str) -> None:
    """So are its handlers, at once. What is done all the same is acknowledged, and whoever comes
    next gets the rest, without an attempt more."""
    fill(broker, topic, 10)
    cancelled: list[bytes] = []

    async def work() -> None:
        begun = asyncio.Semaphore(0)

        async def handle(message: Message) -> None:
            begun.release()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.body)
                if message.body != b"0":
                    raise

        consumer: AsyncConsumer = broker.async_consumer("cancelled", topic)
        async with consumer:
            task = asyncio.create_task(consumer.run(handle, concurrency=4, end_timeout_s=1_000))
            for _ in range(4):
                await begun.acquire()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert sorted(cancelled) == [b"0", b"1", b"2", b"3"]
    assert committed(broker, topic, "cancelled") == {0: 1}
    with broker.consumer("cancelled", topic) as other:
        found = [(each.body, each.reconsume_times) for each in itertools.islice(other, 9)]
    assert found == [(b"%d" % number, 0) for number in range(1, 10)]


def test_a_handler_that_does_not_heed_its_cancellation(broker: Broker, topic: str) -> None:
    """It is left, after `end_timeout_s`."""
    fill(broker, topic, 1)

    async def work() -> None:
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def handle(_message: Message) -> None:
            begun.set()
            while not goes_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await goes_on.wait()

        consumer: AsyncConsumer = broker.async_consumer("heedless", topic)
        async with consumer:
            task = asyncio.create_task(consumer.run(handle, end_timeout_s=0.1))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            goes_on.set()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert committed(broker, topic, "heedless") == {0: -1}


@pytest.mark.slow
def test_a_broker_that_is_started_again(tmp_path: Path) -> None:
    """In the middle of retries: nothing is lost, and no attempt is forgotten."""
    settings = {"messageDelayLevel": "1s 1s 1s 1s"}
    options: dict[str, Any] = {"profile": "test", "settings": settings}
    tries: Counter[int] = Counter()
    done: set[int] = set()

    def handle(message: Message) -> None:
        number = int(message.body)
        tries[number] = max(tries[number], message.reconsume_times + 1)
        if number % 10 == 0 and message.reconsume_times < 2:
            raise Retry
        done.add(number)

    port = free_ports(20)
    with Broker(tmp_path / "store", port=port, **options) as first:
        fill(first, "t", 100)
        consumer = Consumer(first.name_server, "g", "t")
        with running(consumer, handle):
            until(lambda: len(done) >= 90)
            first.close()
            with Broker(tmp_path / "store", port=port, **options) as second:
                until(lambda: len(done) == 100)
                consumer.commit()
                assert committed(second, "t") == {0: 100}
                consumer.close()
    assert Counter(tries.values()) == {1: 90, 3: 10}


def test_the_defaults_of_both_twins_are_the_same() -> None:
    """Those of threads stand where a reader of `Consumer.run` looks, those of tasks in Handling."""
    parameters = inspect.signature(Consumer.run).parameters
    told = {name: each.default for name, each in parameters.items()}
    del told["self"], told["handler"]
    assert told == Handling._field_defaults
