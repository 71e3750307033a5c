"""Workloads that read through a client: beside a producer, in open loop, and from a backlog."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from cometmq.bench.cases import (
    RECORD_BYTES,
    Case,
    Context,
    notes_of,
    rate_of,
    running,
)
from cometmq.bench.cold import restart_cold
from cometmq.bench.extra import BenchError
from cometmq.bench.reading import held_max
from cometmq.bench.results import Line
from cometmq.bench.sends import SEND_MANY
from cometmq.bench.systems import OWN, Durability, System
from cometmq.bench.trial import (
    BATCH,
    EARLY,
    Plan,
    first_of,
)

GROUPS: Final = 4
DRAIN_S: Final = 15.0
DRAIN_PROBE_BYTES: Final = 64 << 20


def consume(ctx: Context, system: System) -> list[Line]:
    """One producer and one consumer at a time, both as fast as they go."""
    lines = []
    for client in ctx.clients(system):
        with running(ctx, system, ctx.durability or Durability.PAGE_CACHE):
            case = Case(ctx, "consume", system, ctx.durability or Durability.PAGE_CACHE)
            plan = ctx.plan(client=client, queues=8, reading=EARLY)
            lines += _beside(case, "consumer beside a producer", plan)
    return lines


def fan_out(ctx: Context, system: System) -> list[Line]:
    """One producer, and one group or four that each get everything."""
    lines = []
    for client in ctx.clients(system):
        with running(ctx, system, ctx.durability or Durability.PAGE_CACHE):
            case = Case(ctx, "fan-out", system, ctx.durability or Durability.PAGE_CACHE)
            for groups in (1, GROUPS):
                plan = ctx.plan(client=client, queues=8, reading=EARLY, groups=groups)
                lines += _beside(case, f"{groups} group{'s' * (groups > 1)}", plan)
    return lines


def _beside(case: Case, name: str, plan: Plan) -> list[Line]:
    def measure() -> list[Line]:
        warm = case.warm(name, plan)
        # No more than consumers hold, who would check meanwhile what the others have in their way.
        most = held_max(plan.size)
        count = min(case.ctx.count(warm.rate / 2, plan), most * 2 // 3)
        first = min(first_of(case.system, plan, count), most - count)
        outcome = case.trial(name, replace(plan, messages=count, warmup=first)).run()
        last_ns = max(each["last_ns"] for group in outcome.consumed for each in group)
        seconds = (last_ns - outcome.first_ns) / 1e9
        values = rate_of(outcome.rate, plan.size)
        values["deliveries_per_s"] = outcome.measured * plan.groups / seconds
        values["cpu_s_per_million"] = (
            1e6 * outcome.cost.servers_s / outcome.delivered
            + 1e6 * sum(each.get("cpu_s") or 0.0 for group in ([outcome.produced], outcome.consumed)
                        for members in group for each in members) / outcome.delivered
        )  # fmt: skip
        return [case.line(name, plan, outcome, "deliveries_per_s", values, notes=notes_of(warm))]

    return case.each(name, plan, measure)


def end_to_end(ctx: Context, system: System) -> list[Line]:
    """From the intended time to the consumer's hands, in open loop."""
    lines = []
    rates = [ctx.rate] if ctx.rate else [1_000.0, 10_000.0]
    for client in ctx.clients(system):
        with running(ctx, system, ctx.durability or Durability.PAGE_CACHE):
            case = Case(ctx, "end-to-end", system, ctx.durability or Durability.PAGE_CACHE)
            plan = ctx.plan(client=client, reading=EARLY)
            for way, options in getattr(system, "ways", {"": {}}).items():
                some = replace(plan, options={**options, **plan.options})
                for rate in rates:
                    name = f"at {rate:,.0f}/s{way and f', {way}'}"
                    lines += case.open_loop(name, some, rate, "end_to_end")
    return lines


def drain(ctx: Context, system: System) -> list[Line]:
    """A backlog through the client: from memory, and from the disk after a restart."""
    lines = []
    for client in ctx.clients(system):
        for temperature in ("warm", "cold"):
            durability = ctx.durability or Durability.PAGE_CACHE
            with running(ctx, system, durability) as folder:
                case = Case(ctx, "drain", system, durability)
                plan = ctx.plan(client=client, queues=8, mode=BATCH, batch=SEND_MANY)
                lines += _drain(case, f"{temperature} backlog", plan, folder)
    return lines


def _drain(case: Case, name: str, whole: Plan, folder: Path) -> list[Line]:
    cold = name.startswith("cold")
    size = case.ctx.bytes
    if cold:
        whole = replace(whole, size=case.ctx.size or 1024)
        if case.system.name == OWN:  # which is held against the disk, and not against peers
            size = case.ctx.cold_bytes or size

    def measure() -> list[Line]:
        raw: list[float] = []
        plan = sized_drain(case, whole, size)

        def cool() -> None:
            restart_cold(case.system, folder, case.durability, raw, case.ctx.folder)

        outcome = case.trial(name, plan, between=cool if cold else None).run()
        per_s = outcome.delivered / (outcome.consumer_seconds or 1)
        values = rate_of(per_s, plan.size)
        values["cpu_s_per_million"] = outcome.read_cpu_per_million
        if raw:
            values["of_raw_read"] = (
                outcome.delivered * (plan.size + RECORD_BYTES) / outcome.consumer_seconds / raw[0]
            )
        return [case.line(name, plan, outcome, "messages_per_s", values)]

    return case.each(name, whole, measure)


def sized_drain(case: Case, plan: Plan, size: int) -> Plan:
    """With a backlog of so many bytes, or of what is read in DRAIN_S, if that is less."""
    messages = max(1000, size // plan.size)
    first = replace(plan, messages=max(1000, DRAIN_PROBE_BYTES // plan.size))
    if messages > 2 * first.messages:
        outcome = case.trial("backlog of a probe", first).run()
        if outcome.faults:
            raise BenchError("; ".join(outcome.faults))
        enough = DRAIN_S * outcome.delivered / (outcome.consumer_seconds or 1)
        messages = min(messages, max(first.messages, int(enough)))
    return replace(plan, messages=messages)
