"""What workloads are made of: a system that runs, and cases on it that give a line each.

Throughput and latency are separate runs. Latency is taken with an open loop, at a given rate or at
50 % and 80 % of the rate that the same loop reaches when it never waits.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cometmq.bench import control, memory
from cometmq.bench.extra import BenchError
from cometmq.bench.results import Line
from cometmq.bench.systems import Durability, System
from cometmq.bench.trial import (
    EMBEDDED,
    ONE,
    Outcome,
    Plan,
    Trial,
    WarmUp,
    first_of,
    paced_first,
    sized,
    warm_up,
)

LATENCY_SHARES: Final = (0.5, 0.8)
SATURATE: Final = 10_000_000.0  # the rate that OpenMessaging Benchmark asks for as "maximum"
DISK_SHARE: Final = 0.5  # of what is free, for the stores of a run
ASIDE_BYTES: Final = 4 << 30  # segments that are made ahead
RECORD_BYTES: Final = 128  # of a record beside its body, roughly
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Context:
    """How long, how large, and where.

    Args:
        folder: for the stores; each is removed when its run is over.
        logs: for the histograms and what workers say.
        seconds: of a measurement.
        windows: of a warm-up at most.
        size, queues, rate, count: None = what the workload has.
        bytes: of a backlog, a store to recover.
        cold_bytes: of a backlog that is read from the disk; None = as `bytes`.
        beyond: bytes of what exceeds the memory; None = as much as does.
        full_memory: fill the memory with pages of files before each measurement.
    """

    folder: Path
    logs: Path
    say: Say
    seconds: float = 10.0
    windows: int = 8
    size: int | None = None
    queues: int | None = None
    rate: float | None = None
    bytes: int = 1 << 30
    cold_bytes: int | None = None
    beyond: int | None = None
    many: int = 10_000
    client: str | None = None
    durability: Durability | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    full_memory: bool = False
    round: int = 0

    def prepare(self) -> None:
        """For what is measured next."""
        if self.full_memory:
            memory.fill(self.folder)

    def clients(self, system: System) -> list[str]:
        """The kinds to be measured: the best official one and the Python one."""
        through = [each for each in system.clients if each != EMBEDDED]
        if self.client is None:
            return through
        if self.client not in system.clients:
            raise BenchError(
                f"{system.name} has no client {self.client!r}; there are "
                f"{', '.join(system.clients)}"
            )
        return [self.client]

    def plan(self, **given: Any) -> Plan:
        """What was asked for on the command line overrules what the workload has."""
        asked = {"size": self.size, "queues": self.queues}
        given |= {key: value for key, value in asked.items() if value is not None}
        return Plan(options=self.options, seed=1 + self.round, **given)

    def log(self, *words: object) -> Path:
        path = self.logs / "-".join(str(word).replace(" ", "_") for word in (*words, self.round))
        path.mkdir(parents=True, exist_ok=True)
        return path

    def count(self, rate: float, plan: Plan) -> int:
        """Messages for `seconds`, as far as the disk has room."""
        room = shutil.disk_usage(self.folder).free * DISK_SHARE - ASIDE_BYTES
        if room <= 0:
            raise BenchError(f"{self.folder}: less than {2 * ASIDE_BYTES >> 30} GiB are free")
        return sized(rate, self.seconds, plan, room / (plan.size + RECORD_BYTES) / 1.5)


@contextlib.contextmanager
def running(ctx: Context, system: System, durability: Durability) -> Iterator[Path]:
    """A system that serves, on a store of its own, of which nothing is left."""
    folder = ctx.folder / f"{system.name}-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    try:
        system.start(folder, durability)
        yield folder
    finally:
        try:
            getattr(system, "end", system.stop)()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Case:
    """One case on one system: makes its line."""

    ctx: Context
    workload: str
    system: System
    durability: Durability = Durability.PAGE_CACHE

    def line(
        self, case: str, plan: Plan, outcome: Outcome, key: str, values: dict[str, float], *,
        kinds: tuple[str, ...] = (), notes: list[str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Line:  # fmt: skip
        ctx, cost = self.ctx, outcome.cost
        clients = {each.get("client", "") for each in outcome.produced}
        line = Line(
            workload=self.workload,
            case=case,
            system=self.system.name,
            client=plan.client,
            durability=str(self.durability),
            round=ctx.round,
            size=plan.size,
            key=key,
            values={"cpu_s_per_million": outcome.cpu_per_million} | values,
            client_version=", ".join(sorted(filter(None, clients))),
            system_version=self.system.version(),
            settings={**getattr(self.system, "settings", {}), **dict(plan.options),
                      **(settings or {})},
            hlogs={kind: self.kept(outcome, kind) for kind in kinds if outcome.hlogs(kind)},
            faults=outcome.faults,
            others=round(cost.others, 3),
            stolen=round(cost.stolen, 3),
            notes=notes or [],
        )  # fmt: skip
        self.tell(line)
        return line

    def kept(self, outcome: Outcome, kind: str) -> list[str]:
        return [str(path.relative_to(self.ctx.logs)) for path in outcome.hlogs(kind)]

    def tell(self, line: Line) -> None:
        value = line.values.get(line.key, 0.0)
        text = f"  {line.system} {line.client}, {line.case}: {line.key} {value:,.1f}"
        if line.faults:
            text += f"  FAILED: {'; '.join(line.faults)}"
        elif not line.quiet:
            text += f"  (others used {line.others:.2f} cores)"
        self.ctx.say(text)

    def failed(self, case: str, plan: Plan, error: Exception) -> Line:
        """The case could not be measured: that is an error of the run, and stands in the table."""
        notes = "; ".join([str(error), *(each.strip() for each in getattr(error, "__notes__", ()))])
        line = Line(
            workload=self.workload, case=case, system=self.system.name, client=plan.client,
            durability=str(self.durability), round=self.ctx.round, size=plan.size, key="",
            values={}, faults=[notes],
        )  # fmt: skip
        self.tell(line)
        return line

    # --- what most workloads are made of ---

    def each(self, case: str, plan: Plan, measure: Callable[[], list[Line]]) -> list[Line]:
        """One case may fail, and the others go on."""
        try:
            return measure()
        except (BenchError, OSError) as error:
            return [self.failed(case, plan, error)]

    def warm(self, case: str, plan: Plan) -> WarmUp:
        folder = self.ctx.log("warm-up", self.system.name, plan.client, case, plan.size)
        window_s = max(0.3, self.ctx.seconds / 5)
        found = warm_up(self.system, plan, folder, window_s, self.ctx.windows, self.ctx.folder)
        shutil.rmtree(folder)
        return found

    def throughput(self, case: str, plan: Plan) -> list[Line]:
        plan = replace(plan, durability=self.durability)

        def measure() -> list[Line]:
            warm = self.warm(case, plan)
            count = self.ctx.count(warm.rate, plan)
            first = first_of(self.system, plan, count)
            outcome = self.trial(case, replace(plan, messages=count, warmup=first)).run()
            values = rate_of(outcome.rate, plan.size) | {"cold_messages_per_s": warm.cold_rate}
            values |= dispatched(outcome)
            values["drain_messages_per_s"] = outcome.delivered / (outcome.consumer_seconds or 1)
            key, kinds = "messages_per_s", ("service",)
            if plan.mode == ONE:
                values |= latency_of(outcome, "service")
            return [self.line(case, plan, outcome, key, values, kinds=kinds, notes=notes_of(warm))]

        return self.each(case, plan, measure)

    def trial(self, case: str, plan: Plan, **more: Any) -> Trial:
        folder = self.ctx.log(self.workload, case, self.system.name, plan.client, plan.size)
        plan = replace(plan, durability=self.durability)
        self.ctx.prepare()
        return Trial(self.system, plan, folder, stores=self.ctx.folder, **more)

    def open_loop(self, case: str, plan: Plan, rate: float, kind: str) -> list[Line]:
        """Latency at a rate, from the intended times; `kind` of histogram is the key's."""

        def measure() -> list[Line]:
            count = max(200, int(rate * self.ctx.seconds))
            first = paced_first(self.system, rate, min(2, self.ctx.seconds))
            paced = replace(plan, rate=rate, messages=count, warmup=first)
            outcome = self.trial(case, paced).run()
            values = rate_of(outcome.rate, plan.size) | {"asked_per_s": rate}
            for each in ("service", "response", "end_to_end"):
                prefix = "" if each == kind else f"{each}_"
                found = latency_of(outcome, each)
                values |= {f"{prefix}{name}": value for name, value in found.items()}
            kinds = ("service", "response", "end_to_end")
            return [self.line(case, plan, outcome, "p50_us", values, kinds=kinds,
                              notes=kept_up(outcome.rate, rate))]  # fmt: skip

        return self.each(case, plan, measure)

    def at_shares(self, plan: Plan, kind: str) -> list[Line]:
        """Latency at 50 % and 80 % of what the open loop reaches without a pause."""
        try:
            most = self.saturated(plan)
        except BenchError as error:
            return [self.failed("open loop, maximum", plan, error)]
        lines = []
        for share in LATENCY_SHARES:
            case = f"open loop at {share:.0%} of its maximum"
            lines += self.open_loop(case, plan, most * share, kind)
        return lines

    def saturated(self, plan: Plan) -> float:
        count = sized(20_000, max(1.0, self.ctx.seconds / 3), plan, 1e9)
        outcome = self.trial(
            "maximum", replace(plan, rate=SATURATE, messages=count, warmup=count // 5)
        ).run()
        if outcome.faults:
            raise BenchError("; ".join(outcome.faults))
        return outcome.rate


def rate_of(per_s: float, size: int) -> dict[str, float]:
    return {"messages_per_s": per_s, "mb_per_s": per_s * size / 1e6}


def dispatched(outcome: Outcome) -> dict[str, float]:
    """Where the store is in the worker: the rate until all of it is in the consume queues."""
    after_s = max((each.get("extra", {}).get("dispatched_after_s", -1.0)
                   for each in outcome.produced), default=-1.0)  # fmt: skip
    if after_s < 0:
        return {}
    return {
        "dispatched_per_s": outcome.measured / (outcome.seconds + after_s),
        "dispatched_after_s": after_s,
    }


def latency_of(outcome: Outcome, kind: str) -> dict[str, float]:
    histogram = outcome.histogram(kind)
    return {} if histogram is None else control.values_of(histogram)


def notes_of(warm: WarmUp) -> list[str]:
    return [] if warm.stable else [f"not settled after {len(warm.rates)} warm-up windows"]


def kept_up(reached: float, asked: float) -> list[str]:
    return [] if reached > 0.98 * asked else [f"reached {reached / asked:.0%} of the asked rate"]
