"""Runs a workload of OpenMessaging Benchmark, and reports in its fields.

What is mended: its end-to-end latency has whole milliseconds of the wall clock, of which zeros are
not recorded; here it has nanoseconds of one monotonic clock. Its publish latency begins at the
actual send, and what it was late by stands elsewhere; here it begins at the intended time, and the
delay alone is reported beside it, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from cometmq.bench import histograms
from cometmq.bench.cases import SATURATE, Case, Context, running
from cometmq.bench.crew import Worker
from cometmq.bench.extra import BenchError
from cometmq.bench.omb.workload import Workload
from cometmq.bench.systems import Durability, System
from cometmq.bench.trial import BATCH, EARLY, LATE, Outcome, Plan, Trial, sized

PERCENTILES: Final = {"50pct": 50, "75pct": 75, "95pct": 95, "99pct": 99, "999pct": 99.9,
                      "9999pct": 99.99, "99999pct": 99.999}  # fmt: skip
QUANTILES: Final = (0, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 95, 97.5, 99, 99.5, 99.9, 99.95,
                    99.99, 99.999, 100)  # fmt: skip
INTERVAL_S: Final = 10.0
MESSAGES_MAX: Final = 50_000_000  # of one producer: its latencies are in memory
PROBE_S: Final = 3.0
SEARCH_STEPS: Final = 6
KEPT_UP: Final = 0.98  # of the asked rate
BEHIND_S: Final = 1.0  # that acknowledgement and delivery may come after the intended time
OWN_OPTIONS: Final = {
    "linger_ms": 1
}  # as its Kafka driver has it; peers have settings of their own
MS: Final = 1e6  # nanoseconds


def run_workload(
    ctx: Context, system: System, workload: Workload, *, seconds: float, warmup_s: float
) -> dict[str, Any]:
    """The report. `faults` says why it does not count; `notes` what was done otherwise."""
    client = ctx.clients(system)[0]
    with running(ctx, system, ctx.durability or Durability.PAGE_CACHE):
        case = Case(ctx, "omb", system)
        plan = plan_of(ctx, workload, client)
        notes: list[str] = []
        if workload.consumerBacklogSizeGB:
            plan = _backlog(case, plan, workload, notes)
        else:
            plan = _paced(case, plan, workload, seconds, warmup_s, notes)
        trial = case.trial(workload.name, plan)
        outcome = trial.run()
    return report(workload, system, outcome, trial, plan, notes)


def plan_of(ctx: Context, workload: Workload, client: str) -> Plan:
    return Plan(
        client=client,
        size=workload.messageSize,
        topics=workload.topics,
        queues=workload.partitionsPerTopic,
        producers=workload.producersPerTopic,
        groups=workload.subscriptionsPerTopic,
        consumers=workload.consumerPerSubscription,
        reading=EARLY,
        seed=1 + ctx.round,
        options={**OWN_OPTIONS, **ctx.options, **workload.payload_options},
    )


def _paced(
    case: Case, plan: Plan, workload: Workload, seconds: float, warmup_s: float, notes: list[str]
) -> Plan:
    """As many messages as the time takes. A rate that cannot be kept is asked for all the same."""
    most = _saturated(case, plan)
    rate = float(workload.producerRate)
    if not rate:
        rate = most = sustained(case, plan, most)
        notes.append(f"the sustained rate is {rate:,.0f}/s")
    real = min(rate, most)
    count = sized(real, seconds, plan, min(MESSAGES_MAX, case.ctx.count(1e12, plan)))
    if count * plan.producers < 0.95 * real * seconds:
        notes.append(f"shortened to {count * plan.producers / real:.0f} s for want of room")
    warm = min(count, int(real * warmup_s / plan.producers))
    return replace(plan, rate=min(rate, SATURATE), messages=count, warmup=warm)


def _saturated(case: Case, plan: Plan) -> float:
    """What the open loop publishes and the consumers take when it never waits."""
    rate = 20_000.0
    for _ in range(2):  # the first one says how much the second one needs to take its time
        count = sized(rate, PROBE_S, plan, MESSAGES_MAX)
        tried = _try(case, replace(plan, rate=SATURATE, messages=count, warmup=count // 5))
        rate = tried.rate
        if tried.seconds > PROBE_S / 2:
            break
    return rate


def sustained(case: Case, plan: Plan, most: float) -> float:
    """The largest rate that was tried and at which nothing piled up, by halving.

    Raises BenchError when not even a small part of the maximum could be kept up.
    """
    low, high = 0.0, most
    for _ in range(SEARCH_STEPS):
        rate = (low + high) / 2
        count = sized(rate, max(PROBE_S, case.ctx.seconds / 3), plan, MESSAGES_MAX)
        if keeps_up(_try(case, replace(plan, rate=rate, messages=count, warmup=count // 5)), rate):
            low = rate
        else:
            high = rate
    if not low:
        raise BenchError(f"{case.system.name}: not even {high:,.0f} messages/s are kept up with")
    return low


def keeps_up(outcome: Outcome, rate: float) -> bool:
    """Whether producers held the rate, and consumers got it soon after."""
    found = [outcome.histogram(kind) for kind in ("response", "end_to_end")]
    in_time = all(
        each is None or each.get_value_at_percentile(99) < BEHIND_S * 1e9 for each in found
    )
    return outcome.rate >= KEPT_UP * rate and in_time


def _try(case: Case, plan: Plan) -> Outcome:
    folder = case.ctx.log("omb-probe", case.system.name)
    outcome = Trial(case.system, plan, folder).run()
    if outcome.faults:
        raise BenchError("; ".join(outcome.faults))
    return outcome


def _backlog(case: Case, plan: Plan, workload: Workload, notes: list[str]) -> Plan:
    """Everything is sent before anybody reads."""
    wanted = workload.consumerBacklogSizeGB * 1e9
    room = case.ctx.count(1e12, plan) * plan.size
    if room < wanted:
        notes.append(f"the backlog was scaled to {room / 1e9:.1f} GB for want of room")
    if case.ctx.bytes < min(wanted, room):
        wanted = case.ctx.bytes
        notes.append(f"the backlog was scaled to {wanted / 1e9:.2f} GB")
    count = int(min(wanted, room) / plan.size / plan.producers)
    notes.append("producers pause while the backlog is drained")
    return replace(plan, reading=LATE, mode=BATCH, batch=4096, messages=max(1, count))


# --- the report -----------------------------------------------------------------------------------


def report(
    workload: Workload, system: System, outcome: Outcome, trial: Trial, plan: Plan,
    notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Its TestResult.java: rates in messages/s, latencies in milliseconds."""
    found: dict[str, Any] = {
        "workload": workload.name,
        "driver": system.name,
        "messageSize": workload.messageSize,
        "topics": workload.topics,
        "partitions": workload.partitionsPerTopic,
        "producersPerTopic": workload.producersPerTopic,
        "consumersPerTopic": workload.consumerPerSubscription,
        **rates_of(trial.sent, trial.received, outcome),
    }
    for name, kind, unit in (
        ("publishLatency", "response", MS),
        ("publishDelayLatency", "delay", 1e3),  # microseconds, as there
        ("publishServiceLatency", "service", MS),
        ("endToEndLatency", "end_to_end", MS),
    ):
        found |= latencies_of(name, outcome.hlogs(kind), unit)
    return found | {
        "askedRate": plan.rate,
        "options": dict(plan.options),
        "durability": str(plan.durability),
        "cpuSecondsPerMillion": outcome.cpu_per_million,
        "quiet": outcome.cost.quiet,
        "received": outcome.delivered,
        "acknowledged": outcome.total,
        "faults": outcome.faults,
        "notes": list(notes),
        "version": system.version(),
    }


def latencies_of(name: str, paths: Iterable[Path], unit: float) -> dict[str, Any]:
    """Lists by interval, and figures of all together; what was not measured is left empty."""
    by_interval = _merged_intervals(paths)
    upper = name[0].upper() + name[1:]
    found: dict[str, Any] = {}
    for suffix, percentile in PERCENTILES.items():
        found[f"{name}{suffix}"] = [
            each.get_value_at_percentile(percentile) / unit for each in by_interval
        ]
    found[f"{name}Avg"] = [each.get_mean_value() / unit for each in by_interval]
    found[f"{name}Max"] = [each.get_max_value() / unit for each in by_interval]
    if not by_interval:
        return found
    total = histograms.merged(by_interval)
    for suffix, percentile in PERCENTILES.items():
        found[f"aggregated{upper}{suffix}"] = total.get_value_at_percentile(percentile) / unit
    found[f"aggregated{upper}Avg"] = total.get_mean_value() / unit
    found[f"aggregated{upper}Max"] = total.get_max_value() / unit
    found[f"aggregated{upper}Quantiles"] = {
        f"{each:g}": total.get_value_at_percentile(each) / unit for each in QUANTILES
    }
    return found


def _merged_intervals(paths: Iterable[Path]) -> list[histograms.Histogram]:
    """The nth of all workers together."""
    logs = [histograms.intervals(path) for path in paths]
    longest = max(map(len, logs), default=0)
    return [
        histograms.merged(log[number] for log in logs if number < len(log))
        for number in range(longest)
    ]


def rates_of(
    sent: Sequence[Worker], received: Sequence[Worker], outcome: Outcome
) -> dict[str, list[float]]:
    """By intervals of ten seconds, from what the workers told once a second; else of the whole."""
    published, consumed = Counts(sent), Counts(received)
    begin = min(published.begin, consumed.begin)
    seconds = min(published.end, consumed.end) - begin
    if seconds < INTERVAL_S:  # or minus infinity, where nobody told anything
        return {
            "publishRate": [outcome.rate],
            "publishErrorRate": [0.0],
            "consumeRate": [outcome.delivered / (outcome.consumer_seconds or 1)],
            "backlog": [],
        }
    steps = int(seconds / INTERVAL_S)
    edges = [begin + step * INTERVAL_S for step in range(steps + 1)]
    groups = max(1, len(outcome.consumed))
    return {
        "publishRate": published.rates(edges),
        "publishErrorRate": [0.0] * steps,
        "consumeRate": consumed.rates(edges),
        "backlog": [
            max(0, round(published.at(edge) - consumed.at(edge) / groups)) for edge in edges[1:]
        ],
    }


class Counts:
    """How far workers had come at a time: between two words of theirs, in proportion."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._samples = [worker.samples for worker in workers if len(worker.samples) > 1]
        self.begin = min((each[0][0] for each in self._samples), default=float("inf"))
        self.end = max((each[-1][0] for each in self._samples), default=float("-inf"))

    def at(self, when: float) -> float:
        return sum(_between(samples, when) for samples in self._samples)

    def rates(self, edges: Sequence[float]) -> list[float]:
        counts = [self.at(edge) for edge in edges]
        return [(after - before) / INTERVAL_S for before, after in pairwise(counts)]


def _between(samples: Sequence[tuple[float, int]], when: float) -> float:
    before = samples[0]
    if when <= before[0]:
        return before[1]
    for after in samples:
        if after[0] >= when:
            share = (when - before[0]) / max(1e-9, after[0] - before[0])
            return before[1] + share * (after[1] - before[1])
        before = after
    return before[1]
