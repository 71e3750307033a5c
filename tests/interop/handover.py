"""One store, first with a broker of ours, then with a real RocketMQ, then with one of ours again,
each in the middle of its work. What was delivered when, by whom, is one history.

    handover = Handover(tmp_path, rocket, killed=True)
    handover.begin()  # ours
    handover.go_on()  # a real RocketMQ
    handover.come_back()  # ours again

Nothing hangs on how long anything takes: what a broker has not delivered the next one has to.
"""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from family import SMALL, RunningBroker
from interop.real import Event, RealRocketMQ
from patience import patient
from waiting import until

from cometmq import Consumer, Message, Producer, Reject, Retry
from cometmq.client import Admin, PendingTransaction
from cometmq.client.scheduled import Scheduled
from cometmq.shm.derived.timer_files import read_check
from cometmq.shm.state.fastjson import loads

WAIT_S: Final = patient(240.0)
LIMIT: Final = 4  # of redeliveries
FIRST_LEVEL: Final = 3  # of the first redelivery
HOLD_LEVEL, FAR_LEVEL = 8, 9
HOLD_S, FAR_S = 12, 7_200
OURS: Final = {
    "messageDelayLevel": f"1s 1s 1s 1s 1s 1s 1s {HOLD_S}s {FAR_S // 3600}h",
    "transactionTimeOut": 4_000,
    "transactionCheckInterval": 2_000,
    "transactionCheckMax": 1_000,
    "flushConsumerOffsetInterval": 1_000,
    "flushDelayOffsetInterval": 1_000,
    "mappedFileSizeTimerLog": 8_192,
}
_SHARED: Final = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize",
                  "maxHashSlotNum", "maxIndexNum")  # fmt: skip
THEIRS: Final = {
    **{key: SMALL[key] for key in _SHARED},
    **OURS,
    "timerWheelEnable": "true",
    # What it has not noted by the next check is checked again, and then committed twice.
    "transactionOpBatchInterval": 100,
    "transactionCheckInterval": 10_000,
}

WORKERS, OTHERS, PICKERS, LAST, SHOP = "workers", "others", "pickers", "last", "shop"
TOPICS: Final = {"work": 2, "later": 1, "timed": 1, "orders": 2, "picked": 1, "last": 1}
SQL: Final = "n > 5 AND n IS NOT NULL"  # by which PICKERS read `picked`
NUMBERS: Final = range(10)  # that are sent there by each
PICKED: Final = [number for number in NUMBERS if number > 5]
REJECT: Final = "-1"


@dataclass(frozen=True)
class Plan:
    """A message of `work`: it fails so many times. After the attempts `ours` and `theirs` it waits
    until the store is with the next broker."""

    fails: int
    ours: int | None = None
    theirs: int | None = None
    name: str = ""

    @property
    def body(self) -> str:
        return f"{self.name}{self.fails}, {self.ours}, {self.theirs}"

    @property
    def properties(self) -> dict[str, str]:
        holds = (str(hold) for hold in (self.ours, self.theirs) if hold is not None)
        return {"fails": str(self.fails), "holds": ",".join(holds)}

    @property
    def attempts(self) -> list[int]:
        """The reconsume times of all of its deliveries."""
        return list(range(min(self.fails, LIMIT) + 1))

    @property
    def is_dead(self) -> bool:
        return self.fails > LIMIT


def _held_once_or_twice() -> Iterator[Plan]:
    for fails in (1, 2, 3, 4, 99):
        for ours in range(min(fails, LIMIT)):
            yield Plan(fails, ours)
            for theirs in range(ours + 1, min(fails, LIMIT)):
                yield Plan(fails, ours, theirs)


EARLY: Final = [*_held_once_or_twice(), Plan(0)]
LATE: Final = [  # that RocketMQ delivers first
    Plan(fails, None, theirs, "late ")
    for fails, theirs in ((0, None), (2, None), (3, 1), (99, None), (99, 0), (99, 2), (99, 3))
]
# Sent when RocketMQ is done with all else: it waits yet when RocketMQ ends, however long that took.
LATEST: Final = Plan(1, None, 0, "latest ")
PLANS: Final = [*EARLY, *LATE, LATEST]


@dataclass(frozen=True)
class Delivery:
    """A message, handed to a consumer."""

    broker: str
    topic: str
    body: str
    reconsume_times: int
    consumed: bool
    born_ms: int
    stored_ms: int
    properties: Mapping[str, str]


@dataclass
class Found:
    """What RocketMQ has, by its own account."""

    state: dict[str, Any]
    records: dict[str, list[Event]] = field(default_factory=dict)  # by topic


class Handover:
    """
    Args:
        folder: of the store.
        killed: how our first broker ends; else in order.
    """

    def __init__(self, folder: Path, rocket: RealRocketMQ, *, killed: bool) -> None:
        self.killed = killed
        self.store = folder / "store"
        self.checked: list[tuple[str, str]] = []  # by which broker, body
        # By group, topic, queue id: before the store is given away, and at the end of all.
        self.before: dict[tuple[str, str, int], int] = {}
        self.committed: dict[tuple[str, str, int], int] = {}
        self.theirs_from: int  # where RocketMQ's records begin in the commit log, in bytes
        self.at_first: Found  # as RocketMQ takes the store over
        self.at_last: Found  # as it leaves it
        self.scheduled: list[Scheduled] = []
        self.lags: dict[str, int] = {}  # by group, at the end of all
        self._rocket = rocket
        self._history: list[Delivery] = []
        self._moved = threading.Condition()

    # --- what was delivered ---

    def of(self, topic: str, broker: str = "") -> list[Delivery]:
        """To a topic, by that broker, or by all."""
        with self._moved:
            return [
                each
                for each in self._history
                if each.topic == topic and broker in ("", each.broker)
            ]

    def bodies(self, topic: str, broker: str = "") -> list[str]:
        return sorted(each.body for each in self.of(topic, broker))

    def _note(self, delivery: Delivery) -> None:
        with self._moved:
            self._history.append(delivery)
            self._moved.notify_all()

    def _last_of(self, plan: Plan) -> Delivery | None:
        found = [each for each in self.of("work") if each.body == plan.body]
        return found[-1] if found else None

    def _waits_for(self, plan: Plan, hold: int | None) -> bool:
        """Whether that broker is done with it."""
        last = self._last_of(plan)
        return last is not None and (last.consumed or last.reconsume_times in (hold, LIMIT))

    # --- ours ---

    def begin(self) -> None:
        """A broker of ours, which ends in order, or is killed."""
        with RunningBroker(self.store, OURS) as broker:
            server = broker.ready.name_server
            with Admin(server) as admin, Producer(server, name=SHOP) as producer:
                for topic, queues in TOPICS.items():
                    admin.create_topic(topic, queues=queues)
                admin.create_group(WORKERS, {"retryMaxTimes": LIMIT, "retryQueueNums": 2})
                self._send_early(producer)
                with self._consuming(server, "ours"):
                    until(self._is_begun, says="all are held or done", timeout_s=WAIT_S)
                self.before = _committed(admin)
                until(self._files_are_current, says="the files have it", timeout_s=WAIT_S)
                _send_late(producer)
                _read_last(server, producer)
            if self.killed:
                broker.kill_all()

    def _send_early(self, producer: Producer) -> None:
        for plan in EARLY:
            producer.send(
                "work", plan.body.encode(), keys="k", tags="t", properties=plan.properties
            )
        producer.send("work", b"rejected", properties={"fails": REJECT})
        _send_numbers(producer, "early")
        producer.send("later", b"early", delay_level=1)
        producer.send("timed", b"early", deliver_after=1)
        with producer.transaction("orders", b"early, committed") as tx:
            tx.send("orders", b"early, committed too")
        with contextlib.suppress(KeyError), producer.transaction("orders", b"early, rolled back"):
            raise KeyError

    def _is_begun(self) -> bool:
        others = [len(self.of(topic)) for topic in ("later", "timed", "orders")]
        return (
            all(self._waits_for(plan, plan.ours) for plan in EARLY)
            and others == [1, 1, 2]
            and len(self.of("picked")) == len(PICKED)
            and "rejected" in self.bodies("work")
        )

    def _files_are_current(self) -> bool:
        """Whether config/ has all that was done: then RocketMQ repeats nothing."""
        config = self.store / "config"
        offsets: Any = loads((config / "consumerOffset.json").read_bytes())["offsetTable"]
        delays: Any = loads((config / "delayOffset.json").read_bytes())["offsetTable"]
        check = read_check(self.store)
        failed = [
            each.reconsume_times
            for each in self.of("work")
            if not each.consumed and each.body != "rejected"
        ]
        holds = [plan.ours for plan in EARLY]
        return (
            (config / "consumerFilter.json").exists()
            and all(
                offsets.get(f"{topic}@{group}", {}).get(queue_id) == offset
                for (group, topic, queue_id), offset in self.before.items()
            )
            and all(
                delays.get(FIRST_LEVEL + times, 0) == failed.count(times) - holds.count(times)
                for times in range(LIMIT)
            )
            and delays.get(1) == 1
            and check is not None
            and check.queue_offset == 1
            and check.read_ms > int(self.of("timed")[0].properties["TIMER_OUT_MS"])
        )

    @contextlib.contextmanager
    def _consuming(self, server: str, broker: str) -> Iterator[None]:
        def handle(message: Message) -> None:
            self._handle(broker, message)

        with (
            _running(Consumer(server, WORKERS, "work", max_reconsume_times=LIMIT), handle),
            _running(Consumer(server, PICKERS, "picked", sql=SQL), handle),
            Consumer(server, OTHERS) as others,
        ):
            for topic in ("later", "timed", "orders"):
                others.subscribe(topic)
            with _running(others, handle):
                yield

    def _handle(self, broker: str, message: Message) -> None:
        properties = dict(message.properties)
        fails = int(properties.get("fails", 0))
        consumed = message.reconsume_times >= fails >= 0
        self._note(
            Delivery(
                broker,
                message.topic,
                message.body.decode(),
                message.reconsume_times,
                consumed,
                message.born_timestamp_ms,
                message.store_timestamp_ms,
                properties,
            )
        )
        if fails < 0:
            raise Reject
        if not consumed:
            held = str(message.reconsume_times) in properties.get("holds", "").split(",")
            raise Retry(after=HOLD_S) if held else Retry

    # --- RocketMQ ---

    def go_on(self) -> None:
        """A real broker, which ends in order."""
        rocket = self._rocket
        self.theirs_from = rocket.start(self.store, THEIRS, "orders")
        self.at_first = Found(rocket.state())
        rocket.consume(WORKERS, {"work": ""}, maxReconsumeTimes=LIMIT, holdLevel=HOLD_LEVEL)
        rocket.consume(OTHERS, {"later": "", "timed": "", "orders": ""})
        rocket.consume(PICKERS, {"picked": SQL})
        rocket.consume(LAST, {"last": ""})
        rocket.produce(SHOP, "orders")
        taken = 0

        def is_done(events: list[Event]) -> bool:
            nonlocal taken
            for event in events[taken:]:
                self._take(event)
            taken = len(events)
            return self._is_passed_on()

        rocket.wait(is_done)
        rocket.send(SHOP, "work", LATEST.body, properties=LATEST.properties)
        rocket.wait(lambda events: is_done(events) and self._waits_for(LATEST, LATEST.theirs))
        # A consumer that is closed may have told of a message and not given it back yet.
        read = [(WORKERS, "work"), (WORKERS, f"%RETRY%{WORKERS}")]
        read += [(OTHERS, topic) for topic in ("later", "timed", "orders")]
        read += [(PICKERS, "picked"), (LAST, "last")]
        until(
            lambda: not any(rocket.lag(*each) for each in read),
            says="all is committed",
            timeout_s=WAIT_S,
        )
        rocket.close_clients()
        is_done(rocket.events)
        rocket.produce(SHOP, "orders")
        _send_theirs(rocket)
        names = ("SCHEDULE_TOPIC_XXXX", f"%RETRY%{WORKERS}", f"%DLQ%{WORKERS}", "work")
        self.at_last = Found(rocket.state(), {name: rocket.records(name) for name in names})
        rocket.stop()
        is_done(rocket.events)

    def _take(self, event: Event) -> None:
        body = base64.b64decode(event["body"]).decode()
        if event["kind"] == "checked":
            self.checked.append(("theirs", body))
            return
        self._note(
            Delivery(
                "theirs",
                event["topic"],
                body,
                event["reconsumeTimes"],
                event["kind"] == "consumed",
                event["bornTimestamp"],
                event["storeTimestamp"],
                event["properties"],
            )
        )

    def _is_passed_on(self) -> bool:
        theirs = {topic: self.bodies(topic, "theirs") for topic in TOPICS}
        return (
            all(self._waits_for(plan, plan.theirs) for plan in (*EARLY, *LATE))
            and len(theirs["later"]) >= 1
            and len(theirs["timed"]) >= 5
            and len(theirs["orders"]) >= 2
            and len(theirs["picked"]) >= len(PICKED)
            and "unread" in theirs["last"]
            and {body.split(",")[1] for _, body in self.checked} >= {" roll back", " undecided"}
        )

    # --- ours again ---

    def come_back(self) -> None:
        """A broker of ours, which ends in order."""
        with RunningBroker(self.store, OURS) as broker:
            server = broker.ready.name_server
            with (
                Admin(server) as admin,
                Producer(server, name=SHOP, checker=self._check),
                self._consuming(server, "ours again"),
            ):
                until(lambda: self._is_over(admin), says="all are done", timeout_s=WAIT_S)
                self.scheduled = admin.scheduled()
                self.committed = _committed(admin)

    def _check(self, pending: PendingTransaction) -> bool:
        self.checked.append(("ours again", pending.body.decode()))
        return pending.properties["fate"] != "roll back"

    def _is_over(self, admin: Admin) -> bool:
        self.lags = {group: admin.describe_group(group).lag for group in (WORKERS, OTHERS, PICKERS)}
        return (
            all(self._waits_for(plan, None) for plan in PLANS)
            and "theirs" in self.bodies("later")
            and "theirs" in self.bodies("timed")
            and len(self.of("picked", "ours again")) >= len(PICKED)
            and {"theirs, commit", "late, undecided too"} <= set(self.bodies("orders"))
            and not any(self.lags.values())
        )


def _send_late(producer: Producer) -> None:
    """What waits when ours ends."""
    for plan in LATE:
        producer.send("work", plan.body.encode(), keys="k", tags="t", properties=plan.properties)
    _send_numbers(producer, "late")
    producer.send("later", b"late", delay_level=HOLD_LEVEL)
    producer.send("later", b"far", delay_level=FAR_LEVEL)
    for number in range(5):
        producer.send("timed", b"late %d" % number, deliver_after=HOLD_S + number / 2)
    producer.send("timed", b"far", deliver_after=FAR_S)
    producer.recall(producer.send("timed", b"recalled", deliver_after=HOLD_S + 1))
    for fate in ("commit", "roll back", "undecided"):
        body, properties = f"late, {fate}".encode(), {"fate": fate}
        transaction = producer.transaction("orders", body, properties=properties)
        transaction.__enter__().send("orders", body + b" too", properties=properties)
    producer._transactions.open.clear()  # as if this process had died


def _send_numbers(producer: Producer, name: str) -> None:
    for number in NUMBERS:
        producer.send("picked", b"%b %d" % (name.encode(), number), properties={"n": str(number)})


def _read_last(server: str, producer: Producer) -> None:
    """What a group of which no file knows yet has read and committed just before the end."""
    producer.send_many("last", [b"read"] * 5, queue_id=0)
    with Consumer(server, LAST, "last") as consumer:
        for _, message in zip(range(5), consumer, strict=False):
            consumer.ack(message)
        consumer.commit()
    producer.send("last", b"unread", queue_id=0)


def _send_theirs(rocket: RealRocketMQ) -> None:
    """What waits when RocketMQ ends."""
    for number in NUMBERS:
        rocket.send(SHOP, "picked", f"theirs {number}", properties={"n": str(number)})
    rocket.send(SHOP, "later", "theirs", "level", level=HOLD_LEVEL)
    rocket.send(SHOP, "later", "far", "level", level=FAR_LEVEL)
    rocket.send(SHOP, "timed", "theirs", "after", ms=HOLD_S * 1_000)
    rocket.send(SHOP, "timed", "far", "after", ms=FAR_S * 1_000)
    for fate in ("commit", "roll back"):
        rocket.send(SHOP, "orders", f"theirs, {fate}", "half", properties={"fate": fate})


@contextlib.contextmanager
def _running(consumer: Consumer, handler: Callable[[Message], None]) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run, args=(handler,))
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def _committed(admin: Admin) -> dict[tuple[str, str, int], int]:
    return {
        (group, each.topic, each.queue_id): each.queue_offset
        for group in (WORKERS, OTHERS, PICKERS)
        for each in admin.describe_group(group).queues
        if each.queue_offset >= 0
    }
