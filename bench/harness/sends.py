"""Workloads that send: throughput, latency in open loop, and what a flush for each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from cometmq.bench.cases import (
    Case,
    Context,
    rate_of,
    running,
)
from cometmq.bench.crew import Watch
from cometmq.bench.embeds import in_process, served
from cometmq.bench.results import Line
from cometmq.bench.systems import Durability, System
from cometmq.bench.trial import (
    ASYNC,
    BATCH,
    ONE,
    Outcome,
    Plan,
    sized,
)

SEND, BATCHES, ONE_CASE = "one call a message", "batches", "one in flight"
SEND_MANY: Final = 65_536  # bodies of one call
C_BYTES: Final = 512 << 20  # of bodies that a C program sends: its server may hold them in memory
SEND_MANY_BYTES: Final = 16 << 20
SIZES: Final = (32, 128, 1024, 16_384, 131_072)


def produce(ctx: Context, system: System) -> list[Line]:
    """Acknowledged sends: one call a message, batches, one in flight; then latency in open loop."""
    lines = []
    durability = ctx.durability or Durability.PAGE_CACHE
    for client in ctx.clients(system):
        with running(ctx, system, durability):
            case = Case(ctx, "produce", system, durability)
            plan = ctx.plan(client=client, queues=8)
            lines += case.throughput(SEND, plan)
            lines += case.throughput(BATCHES, replace(plan, mode=BATCH, batch=SEND_MANY))
            one = replace(plan, mode=ONE, queues=ctx.queues or 1)
            lines += case.throughput(ONE_CASE, one)
            lines += case.at_shares(replace(one, mode=ASYNC), "response")
    return lines + _by_c_client(
        ctx, system, "produce", durability, {SEND: (128, 50), ONE_CASE: (1, 1)}
    )


def sizes(ctx: Context, system: System) -> list[Line]:
    """Throughput of sends and batches, for bodies of 32 B to 128 KiB."""
    lines = []
    durability = ctx.durability or Durability.PAGE_CACHE
    for client in ctx.clients(system):
        with running(ctx, system, durability):
            case = Case(ctx, "sizes", system, durability)
            for size in SIZES:
                plan = replace(ctx.plan(client=client, queues=8), size=size)
                if size > SIZES[0]:  # the server is warm
                    case = replace(case, ctx=replace(ctx, windows=min(2, ctx.windows)))
                batch = max(1, min(SEND_MANY, SEND_MANY_BYTES // size))
                lines += case.throughput(SEND, plan)
                lines += case.throughput(BATCHES, replace(plan, mode=BATCH, batch=batch))
    return lines


def sync_flush(ctx: Context, system: System) -> list[Line]:
    """Every acknowledgement waits for the disk: one in flight, and 64."""
    lines = []
    for client in ctx.clients(system):
        with running(ctx, system, Durability.FSYNC):
            case = Case(ctx, "sync-flush", system, Durability.FSYNC)
            plan = ctx.plan(client=client)
            lines += case.throughput("1 in flight", replace(plan, mode=ONE))
            many = replace(plan, in_flight=64, options={**plan.options, "window": 1})
            lines += case.throughput("64 in flight", many)
    lines += _synced_in_process(ctx, system)
    cases = {"1 in flight": (1, 1), "64 in flight": (64, 1)}
    return lines + _by_c_client(ctx, system, "sync-flush", Durability.FSYNC, cases)


def _synced_in_process(ctx: Context, system: System) -> list[Line]:
    found = in_process(system)
    if found is None:
        return []
    inner, client = found
    with served(ctx, inner, client, Durability.FSYNC):
        case = Case(ctx, "sync-flush", inner, Durability.FSYNC)
        return case.throughput("1 in flight, in process", ctx.plan(client=client, mode=ONE))


def _by_c_client(
    ctx: Context, system: Any, workload: str, durability: Durability,
    cases: Mapping[str, tuple[int, int]],
) -> list[Line]:  # fmt: skip
    """By the C program that a system brings; its cases with (pipeline, connections).

    It only counts what the server has got: nothing is read.
    """
    if not hasattr(system, "benchmark") or ctx.client is not None:
        return []
    lines = []
    with running(ctx, system, durability):
        case = Case(ctx, workload, system, durability)
        for name, (pipeline, connections) in cases.items():
            plan = ctx.plan(client=system.c_client)
            measure = partial(_counted, case, name, plan, pipeline, connections)
            lines += case.each(name, plan, measure)
    return lines


def _counted(case: Case, name: str, plan: Plan, pipeline: int, connections: int) -> list[Line]:
    system: Any = case.system
    send = partial(system.benchmark, size=plan.size, pipeline=pipeline, connections=connections)
    rate = send("bench-c", max(1000, pipeline * connections))["rate"]
    rate = send("bench-c", int(rate * min(1, case.ctx.seconds)))["rate"]
    count = min(
        sized(rate, case.ctx.seconds, plan, C_BYTES // plan.size), case.ctx.count(rate, plan)
    )
    watch = Watch(system.processes(), ())
    found = send("bench-c", count)
    outcome = Outcome(
        produced=[{"client": found["client"]}], consumed=[], cost=(cost := watch.cost()),
        read_cost=cost, seconds=found["seconds"], measured=found["acked"], total=found["acked"],
        faults=[],
    )  # fmt: skip
    notes = [f"pipeline {pipeline}, {connections} connections; the client's CPU is not counted"]
    values = rate_of(outcome.rate, plan.size)
    return [case.line(name, plan, outcome, "messages_per_s", values, notes=notes)]
