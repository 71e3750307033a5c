"""One run: start the workers, let them go together, take the cost, and check what came of it."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cometmq.bench import histograms
from cometmq.bench.crew import Cost, Crew, Watch, Worker
from cometmq.bench.extra import BenchError
from cometmq.bench.stamps import STAMP_BYTES
from cometmq.bench.systems import Durability, System
from cometmq.bench.worker import Job

EMBEDDED: Final = "embedded"  # the kind of client that has the store in its own process
ONE, ASYNC, BATCH = "one_in_flight", "async", "batch"
IDLE_S: Final = 30.0  # a consumer without a message for so long has got all it will get
PACED_FIRST_S: Final = 15.0
RESULT_S: Final = 600.0  # a worker without a word for so long is lost
EARLY, LATE, NEVER = "beside", "after", "never"  # when the consumers read
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who sends what, and who reads it.

    Args:
        messages: of each producer, behind its `warmup`.
        rate: of all producers together, messages/s; 0 = as fast as it goes.
        groups: each gets every message; the `consumers` of one group share the queues.
        reading: beside the producers, or after them: then it is the check alone; never, in a
            warm-up of what does not read.
        options: for the workers; what is not of the default is named in the table.
    """

    client: str = "python"
    size: int = 128
    messages: int = 10_000
    warmup: int = 0
    rate: float = 0.0
    mode: str = ASYNC
    in_flight: int = 4096
    batch: int = 256
    topics: int = 1
    queues: int = 1
    producers: int = 1  # of each topic set
    groups: int = 1
    consumers: int = 1
    reading: str = LATE
    seed: int = 1
    durability: Durability = Durability.PAGE_CACHE  # of an embedded store
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.size < STAMP_BYTES:
            raise BenchError(f"size {self.size}: a body has at least {STAMP_BYTES} bytes")
        for name in ("messages", "topics", "queues", "producers", "groups", "consumers"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name} {getattr(self, name)}: must be at least 1")

    @property
    def total(self) -> int:
        """Messages of all producers, the warm-up included."""
        return self.producers * (self.warmup + self.messages)

    @property
    def payload_bytes(self) -> int:
        return self.total * self.size


@dataclass(kw_only=True)
class Outcome:
    """What a run gave.

    Attributes:
        faults: why its figures do not count; empty when all that was acknowledged was received
            once or more, whole and in order.
    """

    produced: list[dict[str, Any]]
    consumed: list[list[dict[str, Any]]]  # by group
    cost: Cost
    read_cost: Cost  # of the reading, where it came after
    seconds: float  # the slowest producer's, behind its warm-up
    measured: int  # messages in these seconds
    total: int  # acknowledged messages, the warm-up included
    faults: list[str]
    began_ns: int = 0
    topics: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.measured / self.seconds if self.seconds else 0.0

    @property
    def consumer_seconds(self) -> float:
        """From the start of the producers, or of the reading, to the last message."""
        return max((each["seconds"] for group in self.consumed for each in group), default=0.0)

    @property
    def first_ns(self) -> int:
        """When the first message was sent; bodies are made before, behind the go."""
        found = [each.get("extra", {}).get("first_ns", 0) for each in self.produced]
        return int(min(filter(None, found), default=self.began_ns))

    @property
    def delivered(self) -> int:
        return sum(each["received"] for group in self.consumed for each in group)

    @property
    def cpu_per_million(self) -> float:
        """CPU seconds of servers and producers for a million messages."""
        workers_s = sum(each.get("cpu_s") or 0.0 for each in self.produced)
        servers_s = self.cost.servers_s / max(1, self.total)
        return 1e6 * (servers_s + workers_s / max(1, self.measured))

    @property
    def read_cpu_per_million(self) -> float:
        """CPU seconds of servers and consumers for a million deliveries, read afterwards."""
        workers_s = sum(each.get("cpu_s") or 0.0 for group in self.consumed for each in group)
        return 1e6 * (self.read_cost.servers_s + workers_s) / max(1, self.delivered)

    def hlogs(self, kind: str) -> list[Path]:
        """Paths of the service, response or end-to-end logs."""
        if kind == "end_to_end":
            found = [each.get("hlog") for group in self.consumed for each in group]
        else:
            found = [each.get(f"{kind}_hlog") for each in self.produced]
        return [Path(path) for path in found if path]

    def histogram(self, kind: str) -> histograms.Histogram | None:
        logs = self.hlogs(kind)
        return histograms.merged(map(histograms.read, logs)) if logs else None


def check(
    consumed: Sequence[Sequence[Mapping[str, Any]]], total: int, *, ordered: bool = True
) -> list[str]:
    """What is wrong with what each group got, of so many acknowledged messages."""
    faults = []
    for number, members in enumerate(consumed):
        sums = {
            name: sum(int(each.get(name) or 0) for each in members)
            for name in ("received", "distinct", "duplicates", "out_of_order", "bad_crc")
        }
        who = f"group {number}" if len(consumed) > 1 else "the consumer"
        if sums["distinct"] != total:
            lost = total - sums["distinct"]
            what = f"{lost:,} lost" if lost > 0 else f"{-lost:,} that nobody acknowledged"
            faults.append(f"{who} got {sums['distinct']:,} of {total:,} messages: {what}")
        for name, text in (
            ("out_of_order", "out of order"), ("bad_crc", "damaged or not of this run"),
        ):  # fmt: skip
            if sums[name] and (ordered or name != "out_of_order"):
                faults.append(f"{who} got {sums[name]:,} messages {text}")
        if sums["received"] != sums["distinct"] + sums["duplicates"] + sums["bad_crc"]:
            faults.append(f"{who} contradicts itself: {sums}")
    return faults


def check_produced(produced: Sequence[Mapping[str, Any]], plan: Plan) -> list[str]:
    return [
        f"producer {number} had {each['failed']:,} failures and {each['acked']:,} "
        f"acknowledgements of {plan.messages:,}"
        for number, each in enumerate(produced)
        if each["failed"] or each["acked"] < plan.messages
    ]


def new_topics(system: System, plan: Plan) -> list[str]:
    """Topics that no other run uses."""
    topics = [f"bench-{next(_numbers)}" for _ in range(plan.topics)]
    if plan.client != EMBEDDED:
        for topic in topics:
            system.create(topic, plan.queues)
    return topics


Guests = Callable[[Crew], list[Worker]]  # workers that are at it meanwhile, until they are stopped


class Trial:
    """A plan on a system that runs.

    Args:
        folder: for the workers' logs and histograms.
        stores: where a store of the worker's own lies while it runs; default: `folder`.
        between: what happens when all is sent and before it is read; with `reading` after only.
        guests: starts workers that are at it meanwhile; their results stand in `guests_said`.
    """

    def __init__(
        self, system: System, plan: Plan, folder: Path, topics: Sequence[str] = (), *,
        stores: Path | None = None, between: Callable[[], None] | None = None,
        guests: Guests | None = None,
    ) -> None:  # fmt: skip
        self.system, self.plan = system, plan
        self.folder = folder
        self._store = (stores or folder) / f"embedded-{next(_numbers)}"
        self.topics = list(topics) or new_topics(system, plan)
        self.guests_said: list[dict[str, Any]] = []
        self.sent: list[Worker] = []  # who told what progress when
        self.received: list[Worker] = []
        self._between, self._guests = between, guests
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> Outcome:
        try:
            return self._run()
        finally:
            shutil.rmtree(self._store, ignore_errors=True)

    def _run(self) -> Outcome:
        with Crew(self.folder) as crew:
            readers = self._readers(crew) if self._beside else []
            producers = [self._producer(crew, number) for number in range(self.plan.producers)]
            guests = self._guests(crew) if self._guests else []
            for worker in (*producers, *guests):
                worker.wait_ready()
            self.sent = producers
            self.received = [each for group in readers for each in group]
            workers = [*producers, *self.received, *guests]
            watch = Watch(self.system.processes(), [worker.pid for worker in workers])
            began_ns = time.monotonic_ns()
            for worker in workers[::-1]:
                worker.go()
            produced = [worker.result(RESULT_S) for worker in producers]
            consumed = self._finish(readers)
            for worker in guests:
                worker.stop()
            self.guests_said = [worker.result(RESULT_S) for worker in guests]
            cost = read_cost = watch.cost()
            if self.plan.reading == LATE:
                if self._between is not None:
                    self._between()
                consumed, read_cost = self.read(crew)
        return self._outcome(produced, consumed, cost, read_cost, began_ns)

    @property
    def _beside(self) -> bool:
        return self.plan.reading == EARLY

    def read(self, crew: Crew) -> tuple[list[list[dict[str, Any]]], Cost]:
        """All groups read everything that is there."""
        readers = self._readers(crew)
        workers = self.received = [worker for group in readers for worker in group]
        watch = Watch(self.system.processes(), [worker.pid for worker in workers])
        for worker in workers:
            worker.go()
        return self._finish(readers), watch.cost()

    def _finish(self, readers: list[list[Worker]]) -> list[list[dict[str, Any]]]:
        for group in readers:
            if len(group) > 1:
                self._wait_for_members(group)
        return [[worker.result(RESULT_S) for worker in group] for group in readers]

    def _wait_for_members(self, group: list[Worker]) -> None:
        """No member knows how much the others got: they are stopped when it is enough."""
        moved, before = time.monotonic(), -1
        while time.monotonic() - moved < IDLE_S:
            for worker in group:
                worker.look(0.1)
            count = sum(worker.progress for worker in group)
            if count >= self.plan.total:
                break
            if count != before:
                moved, before = time.monotonic(), count
        for worker in group:
            worker.stop()

    def _outcome(
        self, produced: list[dict[str, Any]], consumed: list[list[dict[str, Any]]], cost: Cost,
        read_cost: Cost, began_ns: int,
    ) -> Outcome:  # fmt: skip
        return Outcome(
            produced=produced,
            consumed=consumed,
            cost=cost,
            read_cost=read_cost,
            seconds=max(float(each["seconds"]) for each in produced),
            measured=self.plan.messages * self.plan.producers,
            total=self.plan.total,
            faults=check_produced(produced, self.plan)
            + check(consumed, self.plan.total, ordered=self._ordered),
            began_ns=began_ns,
            topics=self.topics,
        )

    @property
    def _ordered(self) -> bool:
        """Whether the system promises the order of a queue for this way of sending."""
        unordered: Collection[str] = getattr(self.system, "unordered", ())
        return self.plan.mode not in unordered

    def _producer(self, crew: Crew, number: int) -> Worker:
        plan = self.plan
        job = Job(
            role="produce",
            endpoint=self._endpoint(),
            topics=self.topics,
            queues=plan.queues,
            size=plan.size,
            messages=plan.messages,
            warmup=plan.warmup,
            rate=plan.rate / plan.producers,
            mode=plan.mode,
            in_flight=plan.in_flight,
            batch=plan.batch,
            producer=number,
            seed=plan.seed,
            hlog=str(self.folder / f"producer-{number}"),
            options=dict(plan.options),
        )
        return crew.start(self.system.command(plan.client), job)

    def _endpoint(self) -> dict[str, Any]:
        if self.plan.client != EMBEDDED:
            own = {"folder": str(self._store)} if in_process(self.system, self.plan) else {}
            return self.system.endpoint() | own
        return {
            "folder": str(self._store),
            "durability": str(self.plan.durability),
            "settings": getattr(self.system, "settings", {}),
        }

    def _readers(self, crew: Crew) -> list[list[Worker]]:
        """By group; all of them ready."""
        expect = (1 << 62) if self.plan.consumers > 1 else self.plan.total
        readers = [
            [self._reader(crew, group, number, expect) for number in range(self.plan.consumers)]
            for group in range(self.plan.groups)
        ]
        for members in readers:
            for worker in members:
                worker.wait_ready()
        return readers

    def _reader(self, crew: Crew, group: int, number: int, expect: int) -> Worker:
        plan = self.plan
        options = dict(plan.options) | {"skip": plan.warmup, "shared": plan.consumers > 1}
        if plan.rate:
            options["verify"] = "inline"
        job = Job(
            role="consume",
            endpoint=self._endpoint(),
            topics=self.topics,
            queues=plan.queues,
            group=f"{self.topics[0]}-group-{group}",
            expect=expect,
            timeout_s=IDLE_S,
            size=plan.size,
            seed=plan.seed,
            hlog=str(self.folder / f"consumer-{group}-{number}"),
            options=options,
        )
        return crew.start(self.system.command(plan.client), job)


# --- as much as a run needs -----------------------------------------------------------------------

STABLE: Final = 0.03  # three windows in a row differ by less
PROBE: Final = 2_000
PROBE_IN_PROCESS: Final = 200_000
GROWTH_MAX: Final = 20.0


@dataclass(frozen=True)
class WarmUp:
    """How the rate settled. `stable`: whether three windows came within three per cent."""

    rates: list[float]
    stable: bool
    cold_rate: float

    @property
    def rate(self) -> float:
        return self.rates[-1]


def is_stable(rates: Sequence[float]) -> bool:
    last = rates[-3:]
    return len(last) == 3 and max(last) - min(last) < STABLE * max(last)


def warm_up(
    system: System, plan: Plan, folder: Path, window_s: float, windows_max: int,
    stores: Path | None = None,
) -> WarmUp:  # fmt: skip
    """Send windows of about so many seconds until they are alike, at most so many.

    A window is a run of workers of its own: what gets warm is the server. Each worker sends as many
    messages as are measured before that, since a JVM has to compile itself again in each.
    Where reading is what is measured, it is warmed up too.

    A store within the worker's own process is new in each, and what warms up does so in there: its
    rate is asked for once.
    """
    if in_process(system, plan):
        rate = _probed(system, plan, folder, stores)
        return WarmUp([rate], True, rate)
    rates: list[float] = []
    count = PROBE
    for number in range(windows_max):
        reading = LATE if plan.reading == EARLY else NEVER
        probe = replace(plan, messages=count, warmup=count, groups=1, reading=reading)
        outcome = _checked(system, probe, folder / f"warm-up-{number}")
        rates.append(outcome.rate)
        count = sized(outcome.rate, window_s, plan, count * GROWTH_MAX)
        if is_stable(rates):
            break
    return WarmUp(rates, is_stable(rates), rates[0])


def _checked(system: System, plan: Plan, folder: Path, stores: Path | None = None) -> Outcome:
    outcome = Trial(system, plan, folder, stores=stores).run()
    if outcome.faults:
        raise BenchError(f"{system.name}, warm-up: {'; '.join(outcome.faults)}")
    return outcome


_probes: Final[dict[tuple[str, Plan], float]] = {}


def _probed(system: System, plan: Plan, folder: Path, stores: Path | None) -> float:
    known = system.name, replace(plan, seed=0, options=())  # type: ignore[arg-type]
    if known not in _probes:
        fast = plan.durability is Durability.PAGE_CACHE
        count = sized(1e9, 1, plan, PROBE_IN_PROCESS if fast else PROBE)
        probe = replace(plan, messages=count, warmup=first_of(system, plan, count) // 3)
        _probes[known] = _checked(system, probe, folder, stores).rate
    return _probes[known]


def in_process(system: System, plan: Plan) -> bool:
    """Whether the store is in the worker's own process."""
    return plan.client == EMBEDDED or hasattr(system, "warm_up")


def first_of(system: System, plan: Plan, count: int) -> int:
    """Messages that a worker sends before it measures so many: half of that, and what the client
    of this system needs until it is as fast as it gets."""
    own = getattr(system, "warm_up", 0) or _needs(system).get(plan.mode, 0)
    least = own if plan.durability is Durability.PAGE_CACHE else 0
    return max(count // 2, least // plan.producers) // plan.batch * plan.batch


def paced_first(system: System, rate: float, seconds: float) -> int:
    """The same in open loop, where it takes its time: no more than PACED_FIRST_S."""
    needed_s = min(max(_needs(system).values(), default=0) / rate, PACED_FIRST_S)
    return int(rate * max(seconds, needed_s))


def _needs(system: System) -> Mapping[str, int]:
    found: Mapping[str, int] = getattr(system, "first", {})
    return found


def sized(rate: float, seconds: float, plan: Plan, most: float) -> int:
    """Messages of one producer for so many seconds at this rate of all."""
    count = min(rate * seconds / plan.producers, most)
    step = plan.batch if plan.mode == BATCH else 1
    return max(step, PROBE // plan.producers // step * step, int(count) // step * step)
