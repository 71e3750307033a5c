"""What tests look at inside of producers and running brokers."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from family import RunningBroker
from patience import patient

from cometmq import Broker, Consumer, Message, PopConsumer, Producer
from cometmq.client.receiving.buffer import Queue
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter


def channel_of(producer: Producer) -> Channel:
    """The one to the commitlog actor."""
    topic, *_ = producer._sender.delivery.topics.values()
    return producer._sender.routes.commitlog(topic.lanes[0].endpoint, "the broker")


def has_line(producer: Producer) -> bool:
    return channel_of(producer)._shortcut.line is not None


def commits_by_line(consumer: Consumer) -> bool:
    """Whether it has a line to each coordinator that it commits to."""
    places = consumer._member._places.values()
    return bool(places) and all(each._channel._shortcut.line is not None for each in places)


def queues_of(consumer: Consumer) -> list[Queue]:
    """What it owns now."""
    return consumer._receiver.owned.find(None, None)


def ownership_of(consumer: Consumer, message: Message) -> int:
    """The epoch of the ownership that a handler of its `run` has been given this message under."""
    assert consumer._running is not None
    for seat in consumer._running._seats:
        if seat.unit is message and seat.track is not None:
            return seat.track.queue.ownership
    raise AssertionError("no handler has it")


def waiting_in(consumer: PopConsumer) -> int:
    """Messages that its `run` has popped, and no handler has begun."""
    return 0 if consumer._running is None else consumer._running._pops.waiting


def is_ending(consumer: Consumer | PopConsumer) -> bool:
    """Whether its `run` begins nothing more."""
    return consumer._running is not None and consumer._running._pool.is_over


def commitlog_of(broker: Broker) -> psutil.Process:
    (found,) = (
        each
        for each in psutil.Process(broker.pid).children(recursive=True)
        if each.name() == "cmq-commitlog"
    )
    return found


def wait_indexed(broker: RunningBroker) -> None:
    _wait(broker, Counter.INDEXED)


def wait_dispatched(broker: RunningBroker | Broker) -> None:
    """Until every queue has its files, and what is written by now is in them."""
    _wait(broker, Counter.DISPATCHED)


def _wait(broker: RunningBroker | Broker, counter: Counter) -> None:
    deadline = time.monotonic() + patient(60)
    is_embedded = isinstance(broker, Broker)
    store = Path(broker.settings.store_path_root_dir) if is_embedded else broker.store
    log = "" if is_embedded else broker.log
    control = ControlFile.open(store / CONTROL_FILE, writable=False)
    while control.read(counter).value < control.read(Counter.WROTE).value:
        assert time.monotonic() < deadline, f"{counter.name} stays behind:\n{log}"
        time.sleep(0.005)
