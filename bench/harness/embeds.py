"""Workloads in the store itself, where a system can be used in the caller's own process."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from typing import Any, Final

import psutil

from cometmq.bench import control
from cometmq.bench.cases import (
    ASIDE_BYTES,
    RECORD_BYTES,
    Case,
    Context,
    dispatched,
    rate_of,
    running,
)
from cometmq.bench.extra import BenchError
from cometmq.bench.results import Line
from cometmq.bench.systems import IN_PROCESS, Durability, System, usable
from cometmq.bench.trial import (
    BATCH,
    EMBEDDED,
    ONE,
    Plan,
    first_of,
)

APPEND: Final = "append, one call a message"
AGAIN: Final = 65_536
BEYOND: Final = 1.15  # times the memory
DISK_BYTES: Final = 8 << 30


def in_process(system: System) -> tuple[System, str] | None:
    """What uses this system's store in its own process, and with which client; or None."""
    place = IN_PROCESS.get(system.name)
    if place is None:
        return None
    name, client = place
    return (system if name == system.name else usable(name)), client


def served(
    ctx: Context, system: System, client: str, durability: Durability = Durability.PAGE_CACHE
) -> contextlib.AbstractContextManager[Any]:
    """Ours needs nothing but a folder of the trial's."""
    if client == EMBEDDED:
        return contextlib.nullcontext()
    return running(ctx, system, durability)


def many_queues(ctx: Context, system: System) -> list[Line]:
    """One queue against many, the messages spread over them one by one.

    In the store itself where a system's can be used so, else through its client.
    """
    lines = []
    inner, client = in_process(system) or (system, ctx.clients(system)[0])
    for queues in (1, ctx.many):
        with served(ctx, inner, client):
            topics = max(1, queues // 1000)
            plan = replace(
                ctx.plan(client=client), topics=topics, queues=queues // topics,
                options={**ctx.options, "spread": 1},
            )  # fmt: skip
            name = f"{queues:,} queue{'s' * (queues > 1)}"
            lines += Case(ctx, "many-queues", inner).throughput(name, plan)
    return lines


def embedded(ctx: Context, system: System) -> list[Line]:
    """The store in the caller's own process: one call a message, 256 in one, and 1 KiB."""
    found = in_process(system)
    if found is None:
        ctx.say(f"  {system.name} cannot be embedded: left out")
        return []
    inner, client = found
    with served(ctx, inner, client):
        case = Case(ctx, "embedded", inner)
        plan = ctx.plan(client=client)
        lines = case.throughput(APPEND, plan)
        lines += case.throughput(f"{APPEND}, each one timed", replace(plan, mode=ONE))
        lines += case.throughput("append_many(256)", replace(plan, mode=BATCH, batch=256))
        if ctx.size is None:
            lines += case.throughput(APPEND, replace(plan, size=1024))
    return lines


def beyond_memory(ctx: Context, system: System) -> list[Line]:
    """1 KiB appended in the caller's own process, without a pause, until it exceeds the memory.

    The same 65,536 bodies come again and again, as others would have to be made meanwhile. Beside
    it the disk's own speed, in the same round.
    """
    found = in_process(system)
    if found is None:
        ctx.say(f"  {system.name} cannot be embedded: left out")
        return []
    inner, client = found
    plan = ctx.plan(client=client)
    plan = replace(
        plan, size=ctx.size or 1024, options={**plan.options, "again": AGAIN, "durable": 1}
    )
    case = Case(ctx, "beyond-memory", inner)
    with served(ctx, inner, client):
        return case.each(APPEND, plan, lambda: _beyond(case, plan))


def _beyond(case: Case, plan: Plan) -> list[Line]:
    ctx, memory = case.ctx, psutil.virtual_memory().total
    wanted = ctx.beyond or int(BEYOND * memory)
    first = first_of(case.system, plan, 0)
    plan = replace(plan, messages=max(AGAIN, wanted // (plan.size + RECORD_BYTES)), warmup=first)
    room = shutil.disk_usage(ctx.folder).free - ASIDE_BYTES
    needed = plan.total * (plan.size + RECORD_BYTES)
    if needed > room:
        raise BenchError(f"{needed >> 30} GiB are needed, and {max(0, room) >> 30} GiB are free")
    disk = disk_mb_per_s(ctx, min(wanted, DISK_BYTES))
    outcome = case.trial(APPEND, plan).run()
    values = rate_of(outcome.rate, plan.size) | dispatched(outcome) | disk
    to_disk = values.pop("dispatched_per_s") * (plan.size + RECORD_BYTES) / 1e6
    values |= {"to_disk_mb_per_s": to_disk, "of_disk": to_disk / max(disk.values())}
    notes = [f"{wanted / (1 << 30):.1f} GiB, memory {memory / (1 << 30):.1f} GiB"]
    if wanted < memory:
        notes[0] += ": NOT beyond memory"
    return [case.line(APPEND, plan, outcome, "messages_per_s", values, notes=notes)]


def disk_mb_per_s(ctx: Context, size: int) -> dict[str, float]:
    """Of a bare sequential write with its fdatasync, past the page cache and through it."""
    program = control.build(ctx.folder)
    return {
        f"disk_{how}_mb_per_s":
        control.write_bytes_per_s(program, ctx.folder / "disk", size, how) / 1e6
        for how in ("direct", "cached")
    }  # fmt: skip
