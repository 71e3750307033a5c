"""Subscription of a pykka actor: messages become the commands of an actor of your own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import pykka

from cometmq.client.consumer import Consumer
from cometmq.protocol.errors import CometError
from cometmq.protocol.retry import pause_s
from cometmq.shm.kernel.codec import Message

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 10.0
STOP_S: Final = 30.0  # for what the actor is at work on

QueueId = tuple[str, str, int]  # store host, topic, queue id


class _Backlog:
    """Messages of one queue that the actor has not worked through; the first of them failed."""

    __slots__ = ("due", "failures", "messages")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.failures = 0
        self.due = 0.0  # time.monotonic() of the next attempt


class ActorSubscription:
    """A thread that asks an actor to take messages, until `stop`. Made by `subscribe_actor`."""

    def __init__(
        self,
        actor: pykka.ActorRef[Any],
        consumer: Consumer,
        *,
        batch: bool,
        backlog_count_max: int,
    ) -> None:
        self._actor = actor
        self._consumer = consumer
        self._batch = batch
        self._backlog_count_max = backlog_count_max
        self._backlogs: dict[QueueId, _Backlog] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cometmq subscription", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """False after `stop`, when the actor is dead, or when the consumer was closed."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Returns when the actor has answered what it was asked last, or after 30 s.

        The consumer stays open.
        """
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                log.error("%s takes over %g s; not waited for", self._actor, STOP_S)

    def __enter__(self) -> ActorSubscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except pykka.ActorDeadError:
            log.warning("%s is dead: its subscription ends", self._actor)
        except CometError:
            log.exception("the subscription of %s ends", self._actor)
        except RuntimeError as error:  # the consumer is closed
            log.info("the subscription of %s ends: %s", self._actor, error)

    def _turn(self) -> None:
        for queue, backlog in list(self._backlogs.items()):
            if backlog.due <= time.monotonic():
                self._deliver(queue, backlog.messages)
        waiting = sum(len(each.messages) for each in self._backlogs.values())
        dues = [each.due - time.monotonic() for each in self._backlogs.values()]
        longest_s = max(0.0, min([0.5, *dues]))
        if waiting >= self._backlog_count_max:
            self._stopping.wait(longest_s)  # nothing more until some of it is done
            return
        for queue, messages in _by_queue(self._consumer.poll(256, longest_s)).items():
            known = self._backlogs.get(queue)
            if known is not None:
                known.messages += messages  # behind the one that failed
            elif not self._stopping.is_set():
                self._deliver(queue, messages)

    def _deliver(self, queue: QueueId, messages: list[Message]) -> None:
        """Ask the actor; what it takes is acknowledged, the rest stays and is tried again."""
        done = 0
        try:
            if self._batch:
                self._actor.ask(messages)
                done = len(messages)
            else:
                for message in messages:
                    if self._stopping.is_set():
                        break
                    self._actor.ask(message)
                    done += 1
        except pykka.ActorDeadError:
            raise
        except Exception:
            self._failed(queue, messages, done)
        else:
            self._backlogs.pop(queue, None)
        finally:
            self._consumer.ack(messages[:done])

    def _failed(self, queue: QueueId, messages: list[Message], done: int) -> None:
        backlog = self._backlogs.setdefault(queue, _Backlog())
        backlog.failures = 1 if done else backlog.failures + 1
        backlog.messages = messages[done:]
        pause = pause_s(backlog.failures, first_s=PAUSE_S, most_s=PAUSE_S_MAX)
        backlog.due = time.monotonic() + pause
        log.exception(
            "%s failed on %r, attempt %d; again in %g s",
            self._actor,
            backlog.messages[0],
            backlog.failures,
            pause,
        )


def _by_queue(messages: Sequence[Message]) -> dict[QueueId, list[Message]]:
    found: dict[QueueId, list[Message]] = {}
    for message in messages:
        key = (message.store_host, message.topic, message.queue_id)
        found.setdefault(key, []).append(message)
    return found


def subscribe_actor(
    actor: pykka.ActorRef[Any],
    consumer: Consumer,
    *,
    batch: bool = False,
    backlog_count_max: int = 4096,
) -> ActorSubscription:
    """Have a pykka actor of your own receive messages as its commands.

        class Billing(pykka.ThreadingActor):
            def on_receive(self, message):
                book(message.body)

        subscription = subscribe_actor(Billing.start(), broker.consumer("billing", "orders"))

    A thread polls the consumer and `ask`s the actor, one message (or with `batch` one list, of one
    queue) at a time. A message is acknowledged when `on_receive` has returned. When it raises, the
    error is logged and the message is not acknowledged: it is asked again after 0.1 s, 0.2 s ...
    10 s, and the later messages of its queue wait, so that a queue's order is kept; other queues
    go on. What the actor can never take has to be caught by the actor, else its queue stands still.

    A message may come twice: after an exception, and as `Consumer` says. With `batch` the whole
    list comes again. The consumer is used by this thread alone from now on; it is not closed.

    Args:
        backlog_count_max: messages that may wait behind failed ones before polling pauses.
    """
    return ActorSubscription(actor, consumer, batch=batch, backlog_count_max=backlog_count_max)
