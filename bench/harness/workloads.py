"""What is measured: each workload runs its cases on one system, once, and gives a line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cometmq.bench import control, histograms
from cometmq.bench.cases import (
    Context,
)
from cometmq.bench.consumes import consume, drain, end_to_end, fan_out
from cometmq.bench.crew import Watch
from cometmq.bench.embeds import beyond_memory, embedded, many_queues
from cometmq.bench.results import CONTROL, Line
from cometmq.bench.sends import produce, sizes, sync_flush
from cometmq.bench.systems import System
from cometmq.bench.upkeep import cleaning, cold_read, recovery, soak

CONTROL_KEYS: Final = ("p50_us", "messages_per_s", "mb_per_s")

Workload = Callable[[Context, System], list[Line]]
WORKLOADS: Final[dict[str, Workload]] = {
    "produce": produce,
    "sizes": sizes,
    "consume": consume,
    "end-to-end": end_to_end,
    "sync-flush": sync_flush,
    "drain": drain,
    "fan-out": fan_out,
    "many-queues": many_queues,
    "embedded": embedded,
    "beyond-memory": beyond_memory,
    "cold-read": cold_read,
    "cleaning": cleaning,
    "recovery": recovery,
    "soak": soak,
}


def controls(ctx: Context, beside: str) -> list[Line]:
    """A bare echo, push/pull, memcpy, and fdatasync beside the systems."""
    size = ctx.size or 128
    ctx.prepare()
    folder = ctx.folder / "control"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    watch = Watch((), ())
    measured = control.measure(folder, size, ctx.seconds)
    cost = watch.cost()
    for case, (values, histogram) in measured.items():
        key = next(each for each in CONTROL_KEYS if each in values)
        log = ctx.log("control", case, size)
        if histogram is not None:
            histograms.write(log / "control.service.hlog", histogram)
        lines.append(
            Line(
                workload=CONTROL, case=case, system=CONTROL, client="-", durability="-",
                round=ctx.round, size=size, key=key,
                values=values, beside=beside,
                others=round(cost.others, 3), stolen=round(cost.stolen, 3),
                hlogs={"service": [str((log / "control.service.hlog").relative_to(ctx.logs))]}
                if histogram is not None else {},
            )
        )  # fmt: skip
        value = values[lines[-1].key]
        ctx.say(f"  control, {case}: {lines[-1].key} {value:,.1f}")
    return lines
