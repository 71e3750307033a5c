"""Workloads beside what a broker does for itself: cold reads, cleaning, recovery, a long run."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil

from cometmq.bench import histograms
from cometmq.bench.cases import (
    Case,
    Context,
    latency_of,
    rate_of,
    running,
)
from cometmq.bench.cold import restart_cold
from cometmq.bench.crew import Crew, Worker, descriptors, memory_bytes
from cometmq.bench.extra import BenchError
from cometmq.bench.results import Line
from cometmq.bench.systems import Durability, System
from cometmq.bench.trial import (
    BATCH,
    EARLY,
    Outcome,
    Plan,
    new_topics,
)
from cometmq.bench.worker import Job


def cold_read(ctx: Context, system: System) -> list[Line]:
    """A writer in open loop, alone and beside a consumer that reads a backlog from the disk."""
    lines = []
    client = ctx.clients(system)[0]
    durability = ctx.durability or Durability.PAGE_CACHE
    with running(ctx, system, durability) as folder:
        case = Case(ctx, "cold-read", system, durability)
        plan = ctx.plan(client=client, size=1024)
        old = replace(plan, mode=BATCH, batch=4096, messages=max(1000, ctx.bytes // plan.size))
        try:
            topics = new_topics(system, old)
            written = case.trial("backlog", old, topics=topics).run()
            if written.faults:
                raise BenchError("; ".join(written.faults))
            most = case.saturated(plan)
            lines += case.open_loop("writer alone", plan, most / 2, "response")
            restart_cold(system, folder, durability, [], ctx.folder)
            lines += _write_beside_reader(case, plan, most / 2, old, topics)
        except BenchError as error:
            lines.append(case.failed("backlog", plan, error))
    return lines


def _write_beside_reader(
    case: Case, plan: Plan, rate: float, old: Plan, topics: list[str]
) -> list[Line]:
    name = "writer beside a cold reader"

    def reader(crew: Crew) -> list[Worker]:
        job = Job(
            role="consume", endpoint=case.system.endpoint(), topics=topics, queues=old.queues,
            group=f"{topics[0]}-cold", expect=old.total, size=old.size, seed=old.seed,
        )  # fmt: skip
        return [crew.start(case.system.command(old.client), job)]

    def measure() -> list[Line]:
        count = int(rate * case.ctx.seconds)
        paced = replace(plan, rate=rate, messages=count, warmup=int(rate))
        trial = case.trial(name, paced, guests=reader)
        outcome = trial.run()
        (read,) = trial.guests_said
        values = rate_of(outcome.rate, plan.size) | latency_of(outcome, "response")
        values["read_mb_per_s"] = read["received"] * old.size / 1e6 / (read["seconds"] or 1)
        if read["bad_crc"] or read["out_of_order"]:
            outcome.faults.append(f"the cold reader got damaged or disordered messages: {read}")
        return [case.line(name, plan, outcome, "p50_us", values, kinds=("service", "response"))]

    return case.each(name, plan, measure)


def cleaning(ctx: Context, system: System) -> list[Line]:
    """A writer in open loop, alone and while the segments of an old backlog are deleted."""
    if not hasattr(system, "clean"):
        ctx.say(f"  {system.name} has no command that cleans at a given time: left out")
        return []
    getattr(system, "settings", {}).setdefault(
        "mappedFileSizeCommitLog", min(64 << 20, max(8 << 20, ctx.bytes >> 4))
    )
    with running(ctx, system, Durability.PAGE_CACHE):
        case = Case(ctx, "cleaning", system)
        plan = ctx.plan(client=ctx.clients(system)[0], size=1024, reading=EARLY)
        try:
            rate = ctx.rate or case.saturated(plan) / 2
            lines = case.open_loop("writer alone", plan, rate, "response")
            return lines + _write_beside_cleaner(case, plan, rate)
        except BenchError as error:
            return [case.failed("writer beside the cleaner", plan, error)]


def _write_beside_cleaner(case: Case, plan: Plan, rate: float) -> list[Line]:
    name = "writer beside the cleaner"
    old = replace(plan, mode=BATCH, batch=4096, messages=max(40_000, case.ctx.bytes // plan.size))
    written = case.trial("backlog", old).run()
    if written.faults:
        raise BenchError("; ".join(written.faults))
    with _cleaning_meanwhile(case.system) as cleaned:
        lines = case.open_loop(name, plan, rate, "response")
    case.ctx.say(f"  {cleaned[0]} segments were deleted meanwhile")
    if not cleaned[0]:
        raise BenchError("no segment was deleted meanwhile: measure longer")
    return lines


@contextlib.contextmanager
def _cleaning_meanwhile(system: Any) -> Iterator[list[int]]:
    """A clean every half second; how many segments went."""
    count, over = [0], threading.Event()

    def work() -> None:
        while not over.wait(0.5):
            count[0] += system.clean()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


def recovery(ctx: Context, system: System) -> list[Line]:
    """kill -9 of every server process; the time until it serves, and all messages read again."""
    client = ctx.clients(system)[0]
    durability = ctx.durability or Durability.PAGE_CACHE
    with running(ctx, system, durability) as folder:
        case = Case(ctx, "recovery", system, durability)
        plan = ctx.plan(client=client, size=1024, mode=BATCH, batch=4096, queues=4)
        plan = replace(plan, messages=max(1000, ctx.bytes // plan.size))
        name = f"{plan.payload_bytes / (1 << 30):.1f} GiB"
        took: list[float] = []

        def kill() -> None:
            kill_all(system)
            began = time.monotonic()
            system.start(folder, durability)
            took.append(time.monotonic() - began)

        def measure() -> list[Line]:
            outcome = case.trial(name, plan, between=kill).run()
            values = rate_of(outcome.rate, plan.size) | {"ready_s": took[0]}
            return [case.line(name, plan, outcome, "ready_s", values)]

        return case.each(name, plan, measure)


def kill_all(system: System) -> None:
    victims = []
    for pid in system.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            victims.append(psutil.Process(pid))
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):  # so that nobody sees another one's end
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
    psutil.wait_procs(victims, 10)
    system.stop()


def soak(ctx: Context, system: System) -> list[Line]:
    """A steady rate for long: what drifts, and what grows."""
    client = ctx.clients(system)[0]
    with running(ctx, system, Durability.PAGE_CACHE):
        case = Case(ctx, "soak", system)
        rate = ctx.rate or 5_000.0
        plan = ctx.plan(client=client, reading=EARLY)
        name = f"{rate:,.0f}/s for {ctx.seconds:,.0f} s"
        count = int(rate * ctx.seconds)

        def measure() -> list[Line]:
            case.trial("soak start", replace(plan, rate=rate, messages=int(rate * 2))).run()
            memory, files = memory_bytes(system.processes()), descriptors(system.processes())
            outcome = case.trial(name, replace(plan, rate=rate, messages=count)).run()
            after = memory_bytes(system.processes()), descriptors(system.processes())
            values = rate_of(outcome.rate, plan.size) | latency_of(outcome, "end_to_end")
            values["memory_mb"] = after[0] / 1e6
            values["memory_growth_percent"] = 100 * (after[0] / memory - 1) if memory else 0.0
            values["descriptors_growth"] = after[1] - files
            values["drift_percent"] = drift(outcome)
            return [case.line(name, plan, outcome, "p99.9_us", values, kinds=("end_to_end",))]

        return case.each(name, plan, measure)


def drift(outcome: Outcome) -> float:
    """How far the last third's p99.9 is above the first third's, in per cent."""
    parts = [part for path in outcome.hlogs("end_to_end") for part in histograms.intervals(path)]
    third = max(1, len(parts) // 3)
    first, last = histograms.merged(parts[:third]), histograms.merged(parts[-third:])
    before = first.get_value_at_percentile(99.9)
    return float(100 * (last.get_value_at_percentile(99.9) / before - 1)) if before else 0.0
