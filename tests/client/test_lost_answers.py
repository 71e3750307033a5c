"""A lost answer on an open connection never blocks a client for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from client_fakes import FakeBroker, Handle
from patience import patient

from cometmq.actors.runtime.service import Request
from cometmq.client import Consumer, PopConsumer, Producer
from cometmq.client.receiving import membership, pulling
from cometmq.client.routes import Routes
from cometmq.client.sending import checks, loop_transaction, requests
from cometmq.client.sending.loop_transaction import LoopChecker
from cometmq.protocol.commands import (
    AwaitChecks,
    AwaitReplies,
    Command,
    GetRoute,
    JoinGroup,
    PopMessages,
    PullMessages,
    Replies,
    TransactionChecks,
)
from cometmq.protocol.errors import NotConfirmed
from cometmq.protocol.wire import long_poll

WAIT_S = patient(60)
LATE_S = 0.3


class Forgetful(FakeBroker):
    """A broker that never answers the first matching command of each kind.

    Args:
        kinds: command types, each with a function that says whether a command matches.
    """

    def __init__(self, kinds: dict[type[Command], Callable[[Any], bool]]) -> None:
        super().__init__(topics=["t"])
        self._kinds = dict(kinds)

    def handle(self, request: Request) -> None:
        command = request.command
        is_lost = self._kinds.get(type(command), lambda _: False)(command)
        if not is_lost:
            super().handle(request)
            return
        del self._kinds[type(command)]
        with self.heard:
            self.commands.append(command)
            self.heard.notify_all()

    def on_await_checks(self, _command: AwaitChecks, _request: Request) -> Command:
        return TransactionChecks([])

    def on_await_replies(self, _command: AwaitReplies, _request: Request) -> Command:
        return Replies(1, 1, [])


def any_of_them(_command: object) -> bool:
    return True


def held(command: Any) -> bool:
    return bool(command.wait_ms)


# --- clients that send these commands ---


def checker(stack: ExitStack, address: str) -> None:
    stack.enter_context(Producer(address, name="g", checker=lambda _pending: None))


def requester(stack: ExitStack, address: str) -> None:
    producer = stack.enter_context(Producer(address, timeout_s=1))
    threading.Thread(target=ask, args=(producer,), daemon=True).start()


def ask(producer: Producer) -> None:
    with pytest.raises(Exception, match=r"no reply|closed"):
        producer.request("t", b"x", timeout_s=WAIT_S)


def member(stack: ExitStack, address: str) -> None:
    stack.enter_context(Consumer(address, "g", "t", transport="zmq"))


def reader(stack: ExitStack, address: str) -> None:
    polling(stack.enter_context(Consumer(address, "g", "t", transport="zmq")))


def popper(stack: ExitStack, address: str) -> None:
    polling(stack.enter_context(PopConsumer(address, "g", "t", timeout_s=LATE_S)))


def polling(consumer: Consumer | PopConsumer) -> None:
    def poll() -> None:
        while True:
            try:
                consumer.poll(1, timeout_s=LATE_S)
            except NotConfirmed:
                continue
            except Exception:
                return  # it is closed

    threading.Thread(target=poll, daemon=True).start()


LOST: dict[str, tuple[type[Command], Callable[[Any], bool], Callable[[ExitStack, str], None]]] = {
    "checks": (AwaitChecks, any_of_them, checker),
    "the first poll for replies": (AwaitReplies, any_of_them, requester),
    "a held poll for replies": (AwaitReplies, held, requester),
    "the first heartbeat": (JoinGroup, any_of_them, member),
    "a held heartbeat": (JoinGroup, held, member),
    "a pull": (PullMessages, any_of_them, reader),
    "a pop": (PopMessages, any_of_them, popper),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times for which brokers hold commands."""
    for module in (checks, requests):
        monkeypatch.setattr(module, "WAIT_MS", 100)
    for late in (long_poll, requests):
        monkeypatch.setattr(late, "LATE_S", LATE_S)
    monkeypatch.setattr(membership, "SESSION_MS", 1_000)
    monkeypatch.setattr(pulling, "SUSPEND_MS", 100)
    monkeypatch.setattr(pulling, "CHECK_S", LATE_S)


@pytest.mark.parametrize("name", LOST)
def test_it_is_asked_again(name: str) -> None:
    """Fault 8: a client sends the command again on the same connection after a lost answer."""
    kind, is_lost, client = LOST[name]
    handle = Handle(Forgetful.start({kind: is_lost}))
    with ExitStack() as stack:
        stack.callback(handle.stop)
        client(stack, handle.address)
        deadline = time.monotonic() + WAIT_S
        while len(found := handle.asked(kind)) < 3 or not any(map(is_lost, found)):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)


def test_a_route_is_refreshed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 8: an unanswered route request is given up and removed from the channel."""
    handle = Handle(Forgetful.start({}))
    with closing(Routes(handle.address)) as routes:
        routes.topic("t")
        handle.do(lambda fake: fake._kinds.update({GetRoute: any_of_them}))
        monkeypatch.setattr("cometmq.client.routes.REFRESH_S", 0.0)
        monkeypatch.setattr("cometmq.client.routes.ASK_S", LATE_S)
        routes.known("t")
        handle.wait_for(lambda _: len(handle.asked(GetRoute)) == 2)
        channel = routes.channel(handle.address)
        deadline = time.monotonic() + WAIT_S
        while channel._requests:
            assert time.monotonic() < deadline, "it waits for ever"
            time.sleep(0.02)
    handle.stop()


# --- checkers without a decision ---


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def begun(loop: asyncio.AbstractEventLoop, checker: Any) -> LoopChecker:
    found = LoopChecker(checker)

    async def begin() -> None:
        found.begin()

    asyncio.run_coroutine_threadsafe(begin(), loop).result(WAIT_S)
    return found


def test_a_checker_without_an_end_is_cancelled(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 8: the check ends with TimeoutError, so the thread of the checks is not blocked."""
    monkeypatch.setattr(loop_transaction, "CHECK_S", 0.05)
    cancelled = threading.Event()

    async def waits(_pending: object) -> bool:
        try:
            await asyncio.sleep(3_600)
        finally:
            cancelled.set()
        return True

    with pytest.raises(TimeoutError, match=r"has not decided within 0\.05 s"):
        begun(loop, waits).check(None)  # type: ignore[arg-type]
    assert cancelled.wait(WAIT_S)


def test_a_loop_that_stands_still_is_not_waited_for(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 8: a blocked event loop ends the check with TimeoutError; later checks work."""
    monkeypatch.setattr(loop_transaction, "CHECK_S", 0.05)
    goes_on = threading.Event()

    async def decides(_pending: object) -> bool:
        return True

    checker = begun(loop, decides)
    loop.call_soon_threadsafe(goes_on.wait)
    try:
        with pytest.raises(TimeoutError, match="stands still"):
            checker.check(None)  # type: ignore[arg-type]
    finally:
        goes_on.set()
    monkeypatch.setattr(loop_transaction, "CHECK_S", WAIT_S)
    assert checker.check(None) is True  # type: ignore[arg-type]


def test_a_checkers_own_timeout_is_its_error(loop: asyncio.AbstractEventLoop) -> None:
    """Fault 8: a TimeoutError from the checker itself is raised unchanged."""

    async def fails(_pending: object) -> bool:
        raise TimeoutError("the database")

    with pytest.raises(TimeoutError, match="the database"):
        begun(loop, fails).check(None)  # type: ignore[arg-type]
