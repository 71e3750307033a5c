"""What is measured: each workload runs its cases on one system, once, and gives a line for each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from cometmq.bench import control, histograms
from cometmq.bench.cases import (
    ASIDE_BYTES,
    RECORD_BYTES,
    Case,
    Context,
    dispatched,
    latency_of,
    notes_of,
    rate_of,
    running,
)
from cometmq.bench.crew import Crew, Watch, Worker, descriptors, memory_bytes
from cometmq.bench.extra import BenchError
from cometmq.bench.reading import held_max
from cometmq.bench.results import CONTROL, Line
from cometmq.bench.systems import IN_PROCESS, OWN, Durability, System, usable
from cometmq.bench.trial import (
    ASYNC,
    BATCH,
    EARLY,
    EMBEDDED,
    ONE,
    Outcome,
    Plan,
    first_of,
    new_topics,
    sized,
)
from cometmq.bench.worker import Job

APPEND: Final = "append, one call a message"
SEND, BATCHES, ONE_CASE = "one call a message", "batches", "one in flight"
C_BYTES: Final = 512 << 20  # of bodies that a C program sends: its server may hold them in memory
SEND_MANY: Final = 65_536  # bodies of one call
SEND_MANY_BYTES: Final = 16 << 20
GROUPS: Final = 4
AGAIN: Final = 65_536
BEYOND: Final = 1.15  # times the memory
DISK_BYTES: Final = 8 << 30
RAW_READS: Final = 2
DRAIN_S: Final = 15.0
DRAIN_PROBE_BYTES: Final = 64 << 20
CONTROL_KEYS: Final = ("p50_us", "messages_per_s", "mb_per_s")
SIZES: Final = (32, 128, 1024, 16_384, 131_072)

# --- the workloads --------------------------------------------------------------------------------


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
    with _served(ctx, inner, client, Durability.FSYNC):
        case = Case(ctx, "sync-flush", inner, Durability.FSYNC)
        return case.throughput("1 in flight, in process", ctx.plan(client=client, mode=ONE))


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


def restart_cold(
    system: System, folder: Path, durability: Durability, raw: list[float], scratch: Path
) -> None:
    """Stop, drop the store from the page cache, read it bare for the record, drop it, start.

    It is read twice, and the better one counts: what was read once may be in a host's memory.
    """
    system.stop()
    program = control.build(scratch)
    rates = []
    for _ in range(RAW_READS):
        forget(folder)
        rates.append(control.read_bytes_per_s(program, folder))
    raw.append(max(rates))
    forget(folder)
    system.start(folder, durability)


def forget(folder: Path) -> None:
    """Write all files below it out, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def many_queues(ctx: Context, system: System) -> list[Line]:
    """One queue against many, the messages spread over them one by one.

    In the store itself where a system's can be used so, else through its client.
    """
    lines = []
    inner, client = in_process(system) or (system, ctx.clients(system)[0])
    for queues in (1, ctx.many):
        with _served(ctx, inner, client):
            topics = max(1, queues // 1000)
            plan = replace(
                ctx.plan(client=client), topics=topics, queues=queues // topics,
                options={**ctx.options, "spread": 1},
            )  # fmt: skip
            name = f"{queues:,} queue{'s' * (queues > 1)}"
            lines += Case(ctx, "many-queues", inner).throughput(name, plan)
    return lines


def in_process(system: System) -> tuple[System, str] | None:
    """What uses this system's store in its own process, and with which client; or None."""
    place = IN_PROCESS.get(system.name)
    if place is None:
        return None
    name, client = place
    return (system if name == system.name else usable(name)), client


def _served(
    ctx: Context, system: System, client: str, durability: Durability = Durability.PAGE_CACHE
) -> contextlib.AbstractContextManager[Any]:
    """Ours needs nothing but a folder of the trial's."""
    if client == EMBEDDED:
        return contextlib.nullcontext()
    return running(ctx, system, durability)


def embedded(ctx: Context, system: System) -> list[Line]:
    """The store in the caller's own process: one call a message, 256 in one, and 1 KiB."""
    found = in_process(system)
    if found is None:
        ctx.say(f"  {system.name} cannot be embedded: left out")
        return []
    inner, client = found
    with _served(ctx, inner, client):
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
    with _served(ctx, inner, client):
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
