"""Whatever a handler does, for each kind of consumer, in order or not: its message is done, comes
again or is dead, and no thread or task ends of it; what wants the process to end ends the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from inside import wait_dispatched
from patience import patient
from waiting import until

from cometmq import Admin, Broker, Reject, Retry
from cometmq.client import AsyncConsumer, AsyncPopConsumer, Consumer, Message, PopConsumer

WAIT_S = patient(60)
HANGS_S = 3 * WAIT_S  # of a whole course
POLICY = {
    "groupRetryPolicy": {
        "type": "EXPONENTIAL",
        "exponentialRetryPolicy": {"initial": 1, "multiplier": 1, "max": 1_000},
    }
}
AGAIN = [(b"0", 0), (b"0", 1), (b"1", 0)]
ONCE = [(b"0", 0), (b"1", 0)]
ENDS = "ends"


class Odd:
    """Nothing can be asked of it."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("who asks?")

    def __bool__(self) -> bool:
        raise RuntimeError("who asks?")

    __eq__ = __hash__ = __bool__  # type: ignore[assignment]


class Ending(BaseException):
    """No Exception, and nobody knows it."""


def raises(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


SAYS: dict[str, tuple[Callable[[], Any], Any]] = {
    "nothing": (lambda: None, ONCE),
    "nonsense": (Odd, ONCE),
    "a generator": (lambda: (each for each in "nobody runs this"), AGAIN),
    "Retry": (lambda: Retry(after=0.01), AGAIN),
    "an error": (raises(ValueError("odd")), AGAIN),
    "the class of Reject": (lambda: Reject, ONCE),
    "SystemExit": (raises(SystemExit(3)), ENDS),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), ENDS),
    "what nobody knows": (raises(Ending()), ENDS),
}


class Work:
    """Two messages of a queue; the first one is handled oddly, the first time."""

    def __init__(self, broker: Broker, name: str, say: Callable[[], Any]) -> None:
        self.seen: list[tuple[bytes, int]] = []
        self._broker, self._name, self._say = broker, name, say
        self._is_first = True
        self._lock = threading.Lock()
        with Admin(broker.name_server) as admin, broker.producer() as producer:
            admin.create_topic(name, queues=1)
            admin.create_group(name, POLICY)
            producer.send_many(name, [b"0", b"1"], queue_id=0)

    def handle(self, message: Message) -> Any:
        with self._lock:
            self.seen.append((message.body, message.reconsume_times))
            is_first = self._is_first and message.body == b"0"
            self._is_first = self._is_first and not is_first
        return self._say() if is_first else None

    @property
    def has_come_again(self) -> bool:
        return len([each for each in self.seen if each[0] == b"0"]) > 1

    def wait_again(self) -> None:
        until(lambda: self.has_come_again)

    def wait(self, wanted: list[tuple[bytes, int]]) -> None:
        """Until it has come to that, and nothing is left."""
        with Admin(self._broker.name_server) as admin:
            until(
                lambda: (
                    sorted(self.seen) == wanted
                    and not any(each.lag for each in admin.describe_group(self._name).queues)
                )
            )


@pytest.mark.parametrize("what", SAYS)
@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer, PopConsumer, AsyncPopConsumer])
@pytest.mark.slow
def test_whatever_a_handler_does(broker: Broker, kind: type[Any], orderly: bool, what: str) -> None:
    say, outcome = SAYS[what]
    name = f"{kind.__name__}-{orderly}-{list(SAYS).index(what)}"
    work = Work(broker, name, say)
    pops = kind in (PopConsumer, AsyncPopConsumer)
    made: dict[str, Any] = {"orderly": orderly} if pops else {"auto_commit_ms": 20}
    options: dict[str, Any] = {"concurrency": 2}
    if pops and outcome is ENDS:
        made["invisible_s"] = 2  # what it had come again before its end, and was not begun
    if not pops:
        options |= {"orderly": orderly, "suspend_s": 0.01}

    async def main() -> None:
        async with kind(broker.name_server, name, name, **made) as consumer:

            async def handle(message: Message) -> Any:
                return work.handle(message)

            run = asyncio.create_task(consumer.run(handle, **options))
            if outcome is not ENDS:
                await asyncio.to_thread(work.wait, outcome)
                await consumer.close()
            await run

    def run() -> None:
        consumer = kind(broker.name_server, name, name, **made)
        with consumer:
            waits = threading.Thread(target=close, args=(consumer, lambda: work.wait(outcome)))
            if outcome is not ENDS:
                waits.start()
            consumer.run(work.handle, **options)
        if outcome is not ENDS:
            waits.join()

    def whole() -> None:
        if kind in (AsyncConsumer, AsyncPopConsumer):
            asyncio.run(asyncio.wait_for(main(), HANGS_S))
        else:
            run()

    if outcome is not ENDS:
        whole()
        wait_dispatched(broker)  # letters are read by their queues
        with Admin(broker.name_server) as admin:
            assert len(admin.dead_letters(name)) == (what == "the class of Reject")
        return
    with pytest.raises((SystemExit, KeyboardInterrupt, Ending)):
        whole()
    if work.has_come_again:  # it was as quick as the end
        return
    with _next(broker, name, pops, made) as consumer:
        closes = threading.Thread(target=close, args=(consumer, work.wait_again))
        closes.start()
        consumer.run(work.handle, **options)
        closes.join()


def close(consumer: Any, wait: Callable[[], object]) -> None:
    """After that, also where it is in vain: nothing hangs of it."""
    try:
        wait()
    finally:
        consumer.close()


def _next(broker: Broker, name: str, pops: bool, made: dict[str, Any]) -> Any:
    return (PopConsumer if pops else Consumer)(broker.name_server, name, name, **made)
