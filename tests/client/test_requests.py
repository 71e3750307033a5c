"""Requests and replies, with a real broker: threads, asyncio, polls, time, and who is gone."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from patience import patient
from still import stop
from waiting import until

from cometmq import Broker, errors
from cometmq.client import AsyncConsumer, AsyncProducer, Consumer, Message, Producer
from cometmq.protocol.commands import AwaitReplies, Replies, SendReply
from cometmq.protocol.replies import CORRELATION_ID, REPLY_TO_CLIENT, requester_of
from cometmq.protocol.wire.channel import Channel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "request-reply.md"
WAIT_S = patient(60)
REPLIES = "DefaultCluster_REPLY_TOPIC"


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "requests-" + "".join(each if each.isalnum() else "-" for each in request.node.name)[:90]


@contextmanager
def handling(server: str, topic: str, handler: Callable[[Message], Any]) -> Iterator[Consumer]:
    with Consumer(server, f"group-{topic}", topic) as consumer:
        thread = threading.Thread(target=consumer.run, args=(handler,))
        thread.start()
        try:
            yield consumer
        finally:
            consumer.close()
            thread.join(WAIT_S)
            assert not thread.is_alive()


def next_request(consumer: Consumer) -> Message:
    (message,) = consumer.poll(1, WAIT_S)
    return message


def test_a_request_is_answered(broker: Broker, topic: str) -> None:
    """With RocketMQ's properties; and the reply is stored in RocketMQ's topic."""
    seen: list[Message] = []

    def handler(message: Message) -> None:
        seen.append(message)
        message.reply(b"re: " + message.body, properties={"unit": "kg"})

    with handling(broker.name_server, topic, handler), broker.producer() as producer:
        reply = producer.request(topic, b"apples", timeout_s=WAIT_S, tags="fruit", keys="k")
        assert reply.body == b"re: apples"
        asked = seen[0].properties
        assert (seen[0].tags, asked["TTL"], asked["CLUSTER"]) == (
            "fruit",
            str(WAIT_S * 1000),
            "DefaultCluster",
        )
        kept = {name: asked[name] for name in (CORRELATION_ID, REPLY_TO_CLIENT, "TTL")}
        kept |= {"MSG_TYPE": "reply", "unit": "kg"}
        assert kept.items() <= reply.properties.items()
        assert reply.correlation_id == asked[CORRELATION_ID]
        assert reply.properties["PUSH_REPLY_TIME"] <= reply.properties["ARRIVE_TIME"]
    with broker.consumer(None) as reader:
        reader.assign(REPLIES)
        reader.seek("earliest")
        found: list[Message] = []
        while not any(each.properties[CORRELATION_ID] == reply.correlation_id for each in found):
            found += reader.poll(100, WAIT_S)
        stored = next(
            each for each in found if each.properties[CORRELATION_ID] == reply.correlation_id
        )
    assert stored.body == reply.body
    assert stored.properties == kept


def test_many_are_in_flight(broker: Broker, topic: str) -> None:
    """Of tasks, with asyncio handlers; each gets its own reply, a large one too."""

    async def main() -> None:
        async def handler(message: Message) -> None:
            count = int(message.body)
            await message.reply(bytes(200_000) if count == 7 else b"%d" % (2 * count))

        server = broker.name_server
        async with (
            AsyncConsumer(server, "many", topic) as consumer,
            AsyncProducer(server, linger_ms=1) as producer,
        ):
            running = asyncio.create_task(consumer.run(handler, concurrency=200))
            replies = await asyncio.gather(
                *(producer.request(topic, b"%d" % n, timeout_s=WAIT_S) for n in range(2_000))
            )
            await consumer.close()
            await running
            expected = [b"%d" % (2 * n) for n in range(2_000)]
            expected[7] = bytes(200_000)
            assert [reply.body for reply in replies] == expected
            assert producer.late_replies == 0

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_replies_of_every_size(broker: Broker, topic: str, transport: str) -> None:
    """Also those that fill more than one read of a local connection, with their properties."""

    def handler(message: Message) -> None:
        size = int(message.body)
        message.reply(bytes(size), properties={"\u00e4" * 100: "\u20ac" * 3_000})

    with (
        handling(broker.name_server, topic, handler),
        broker.producer(transport=transport) as producer,
    ):
        for size in (1, 30_000, 40_000, 49_000, 55_000, 65_000, 70_000, 4_194_304, 1):
            reply = producer.request(topic, b"%d" % size, timeout_s=WAIT_S)
            assert len(reply.body) == size
            assert reply.properties["\u00e4" * 100] == "\u20ac" * 3_000


def test_threads_share_a_producer(broker: Broker, topic: str) -> None:
    with (
        handling(broker.name_server, topic, lambda message: message.reply(message.body)),
        broker.producer() as producer,
        ThreadPoolExecutor(16) as pool,
    ):
        bodies = [b"%d" % number for number in range(300)]
        ask = pool.map(lambda body: producer.request(topic, body, timeout_s=WAIT_S), bodies)
        assert [reply.body for reply in ask] == bodies


def test_whoever_polls_replies(broker: Broker, topic: str) -> None:
    with (
        broker.producer() as producer,
        broker.consumer("poller", topic) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        reply = pool.submit(producer.request, topic, b"?", timeout_s=WAIT_S)
        next_request(consumer).reply(b"!")
        assert reply.result(WAIT_S).body == b"!"


def test_time_is_up(broker: Broker, topic: str) -> None:
    """The error names request and time; what comes later is counted, and its sender not refused."""
    with broker.producer() as producer, broker.consumer("late", topic) as consumer:
        with pytest.raises(errors.RequestTimeout, match=rf"in {topic} within 0\.05 s") as caught:
            producer.request(topic, b"?", timeout_s=0.05)
        assert isinstance(caught.value, TimeoutError)
        message = next_request(consumer)
        assert message.properties[CORRELATION_ID] in str(caught.value)
        message.reply(b"!")
        until(lambda: producer.late_replies == 1)

    async def main() -> None:
        async with AsyncProducer(broker.name_server) as late:
            with pytest.raises(errors.RequestTimeout, match=r"within 0\.05 s"):
                await late.request(topic, b"?", timeout_s=0.05)
            task = asyncio.create_task(late.request(topic, b"?", timeout_s=WAIT_S))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


@pytest.mark.slow
def test_a_closed_requester_is_gone(broker: Broker, topic: str) -> None:
    with broker.consumer("closed", topic) as consumer:
        producer = broker.producer()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.request, topic, b"?", timeout_s=WAIT_S)
            message = next_request(consumer)
            producer.close()
            with pytest.raises(errors.NotConfirmed, match=r"closed before a reply to request"):
                waiting.result(WAIT_S)
        with pytest.raises((errors.RequesterGone, errors.SystemBusy)) as caught:
            until(lambda: message.reply(b"!", timeout_s=WAIT_S))
        assert isinstance(caught.value, errors.RequesterGone)
        assert message.properties[CORRELATION_ID] in str(caught.value)


def test_a_killed_requester_is_gone(broker: Broker, topic: str) -> None:
    asks = f"""if True:
        from cometmq import Producer
        Producer({broker.name_server!r}).request({topic!r}, b"?", timeout_s={patient(600)})
    """
    with broker.consumer("killed", topic) as consumer:
        with subprocess.Popen([sys.executable, "-c", asks]) as child:
            message = next_request(consumer)
            child.send_signal(signal.SIGKILL)
            child.wait()
        with pytest.raises(errors.RequesterGone, match="is gone"):
            message.reply(b"!", timeout_s=WAIT_S)


def test_a_commitlog_process_is_killed(tmp_path: Path) -> None:
    """Between request and reply, and while replies are on their way: they come all the same."""
    with RunningBroker(tmp_path / "store", {"storeReplyMessageEnable": False}) as running:
        server = running.ready.name_server
        with (
            Producer(server) as producer,
            Consumer(server, "group", "topic") as consumer,
            ThreadPoolExecutor(1) as pool,
        ):
            for _ in range(2):
                reply = pool.submit(producer.request, "topic", b"?", timeout_s=WAIT_S)
                message = next_request(consumer)
                running.kill("commitlog")
                message.reply(b"!", timeout_s=WAIT_S)
                assert reply.result(WAIT_S).body == b"!"
        assert running.read_queue(REPLIES, 0) == []


def test_nobody_else_takes_part(tmp_path: Path) -> None:
    """The commitlog process alone hands replies out and stores them, also where what the
    coordinator and the dispatcher do for queues that are there has to wait."""
    with (
        RunningBroker(tmp_path / "store") as running,
        Producer(running.ready.name_server) as producer,
        handling(running.ready.name_server, "topic", lambda message: message.reply(b"!")),
    ):
        producer.request("topic", b"first", timeout_s=WAIT_S, queue_id=0)
        pids = running.pids()
        others = [pids[role] for role in ("coordinator", "dispatcher")]
        for pid in others:
            stop(pid)
        try:
            again = producer.request("topic", b"again", timeout_s=WAIT_S, queue_id=0)
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
        assert again.body == b"!"


def test_strangers_get_nothing(broker: Broker, topic: str) -> None:
    """Whoever reads a request can answer it, and not fetch what others answer."""
    with (
        broker.producer() as producer,
        broker.consumer("stranger", topic) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        reply = pool.submit(producer.request, topic, b"?", timeout_s=WAIT_S)
        message = next_request(consumer)
        requester = message.properties[REPLY_TO_CLIENT]
        endpoint = producer._sender.routes.masters()[0].commitlog
        with Channel(endpoint) as channel:

            def ask(command: Any, payload: Any = ()) -> Any:
                return channel.ask(command, payload, timeout_s=WAIT_S)[0]

            answer = ask(AwaitReplies(REPLIES, requester))  # its name is no secret, nor a box of it
            assert isinstance(answer, Replies)
            assert requester_of(requester) != requester
            foreign = SendReply(REPLIES, requester, "not-its-own", {"a": "b"})
            ask(foreign, [b"!"])
            assert producer.late_replies == 1  # dropped, and only then confirmed
            assert not reply.done()
            for command, payload, error in (
                (SendReply(topic, requester, "id", {}), [b"!"], errors.ArgumentIllegal),
                (SendReply(REPLIES, requester, "", {}), [b"!"], errors.ArgumentIllegal),
                (SendReply(REPLIES, "x" * 256, "id", {}), [b"!"], errors.ArgumentIllegal),
                (SendReply(REPLIES, requester, "id", {}), [], errors.MessageIllegal),
                (SendReply(REPLIES, requester, "id", {}), [b""], errors.MessageIllegal),
                (
                    SendReply(REPLIES, requester, "id", {"a\x01": "b"}),
                    [b"!"],
                    errors.MessageIllegal,
                ),
                (
                    SendReply(REPLIES, requester, "id", {"a": "b" * 40_000}),
                    [b"!"],
                    errors.MessageIllegal,
                ),
                (
                    SendReply(REPLIES, requester, "id", {}),
                    [bytes(5_000_000)],
                    errors.MessageTooLarge,
                ),
                (AwaitReplies(REPLIES, "short"), (), errors.ArgumentIllegal),
                (AwaitReplies(REPLIES, "x" * 129), (), errors.ArgumentIllegal),
                (AwaitReplies(topic, "x" * 32), (), errors.ArgumentIllegal),
            ):
                with pytest.raises(error):
                    ask(command, payload)
            for number in range(63):
                ask(AwaitReplies(REPLIES, f"{number:032}"))
            with pytest.raises(errors.SystemBusy, match="64 requesters come by one connection"):
                ask(AwaitReplies(REPLIES, "y" * 32))
        message.reply(b"!")
        assert reply.result(WAIT_S).body == b"!"


def test_what_cannot_be_replied_to(broker: Broker, topic: str) -> None:
    with broker.producer() as producer, broker.consumer("no", topic) as consumer:
        producer.send(topic, b"plain")
        message = next_request(consumer)
        with pytest.raises(errors.ArgumentIllegal, match=rf"{topic}/\d+ offset 0 is no request"):
            message.reply(b"!")
        with pytest.raises(errors.RequestTimeout):
            producer.request(topic, b"?", timeout_s=0.001)
        request = next_request(consumer)
        for body, error in ((b"", errors.MessageIllegal), ("text", errors.ArgumentIllegal)):
            with pytest.raises(error):
                request.reply(body)  # type: ignore[arg-type]
        with pytest.raises(errors.MessageIllegal, match="TTL"):
            request.reply(b"!", properties={"TTL": "1"})
        for wrong in (0, -1, float("nan"), float("inf"), 1e9, "3"):
            with pytest.raises(errors.ArgumentIllegal, match="timeout_s"):
                producer.request(topic, b"?", timeout_s=wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.MessageIllegal, match=CORRELATION_ID):
            producer.request(topic, b"?", properties={CORRELATION_ID: "mine"})


def test_the_page_runs(broker: Broker, tmp_path: Path) -> None:
    """docs/request-reply.md, as it stands."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "prices.py"
    path.write_text(program.replace("tcp://127.0.0.1:9876", broker.name_server))
    names = runpy.run_path(str(path))
    consumer = names["serve"]()
    try:
        assert names["price_of"]("apples") == 3
        assert names["price_of"]("gold") is None
    finally:
        consumer.close()
