"""`cometmq bench`: measure CometMQ and its peers, check what was received, and report."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from cometmq.cli.options import output_option
from cometmq.cli.output import hint, print_rows

NAMES: Final = ("cometmq", "rocketmq", "kafka", "redis", "nats")  # as in systems.NAMES
OPENING: Final = {
    "produce": "Acknowledged sends: throughput, and latency in open loop.",
    "sizes": "Throughput of sends and batches, for bodies of 32 B to 128 KiB.",
    "consume": "One producer and one consumer at a time, as fast as they go.",
    "end-to-end": "From the intended send time to the consumer's hands, in open loop.",
    "sync-flush": "Every acknowledgement waits for the disk: 1 and 64 in flight.",
    "drain": "A backlog through the client, from memory and from the disk.",
    "fan-out": "One producer, and 1 and 4 groups that each get everything.",
    "many-queues": "One queue against many.",
    "embedded": "The store in the caller's own process.",
    "beyond-memory": "1 KiB in the caller's own process, until it exceeds the memory.",
    "cold-read": "A writer beside a consumer that reads an old backlog from the disk.",
    "cleaning": "A writer while old segments are deleted.",
    "recovery": "kill -9 of all server processes, and the time until they serve.",
    "soak": "A steady rate for long: what drifts, and what grows.",
}
QUICK: Final = {"windows": 2, "bytes": 16 << 20, "beyond": 256 << 20, "many": 100}
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_EPILOG: Final = """\
\b
Every run ends with a check of count, order and CRC of all that was acknowledged;
a run that fails it has exit code 1. Progress goes to standard error. Methods and
results: docs/performance.md. The libraries: pip install '.[bench]'.
"""


class Bytes(click.ParamType[int]):
    """A number of bytes: 128, 1k, 4m, 2g."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)([kmg]?)", str(value).lower())
        if found is None:
            self.fail(f"{value!r}: a number of bytes such as 128, 1k or 2g", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


class Parts(click.ParamType[tuple[str, ...]]):
    """Names of workloads, joined by commas."""

    name = "parts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(filter(None, value.split(",")))
        for name in names:
            if name not in (*OPENING, "omb"):
                self.fail(f"no workload {name!r}; there are {', '.join(OPENING)}, omb", param, ctx)
        return names


class Systems(click.ParamType[tuple[str, ...]]):
    """Names of systems, joined by commas."""

    name = "systems"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(each.strip() for each in value.split(",") if each.strip())
        for name in names:
            if name not in NAMES:
                self.fail(f"no system {name!r}; there are {', '.join(NAMES)}", param, ctx)
        return names


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """Options that every measurement has."""
    for option in reversed(
        (
            click.option("--against", type=Systems(), default="", metavar="NAMES",
                         help="Peers to take turns with: rocketmq,kafka,redis,nats."),
            click.option("--systems", "only", type=Systems(), metavar="NAMES",
                         help="Measure these, CometMQ only if it is named."),
            click.option("--seconds", type=click.FloatRange(0.1),
                         help="Of each measurement. [10; quick: 1]"),
            click.option("--rounds", type=click.IntRange(1, 100),
                         help="Each system's turns. [5; quick: 1]"),
            click.option("--quick", is_flag=True, help="Small and short: does it work?"),
            click.option("--out", type=click.Path(file_okay=False, path_type=Path),
                         metavar="DIR", help="Keep the bundle there."),
            click.option("--store", type=click.Path(exists=True, file_okay=False, path_type=Path),
                         metavar="DIR", help="Stores lie below it. [the temporary folder]"),
            click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE",
                         help="A setting of CometMQ's broker, named in the table."),
            click.option("--full-memory", is_flag=True,
                         help="Fill the memory with pages of files before each measurement, as it "
                         "is on a machine that has run for a while."),
            click.option("--option", "worker_options", multiple=True, metavar="KEY=VALUE",
                         help="An option of the workers, named in the table: linger_ms=1."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(epilog=_EPILOG)
def bench() -> None:
    """Measure CometMQ, and other brokers beside it.

    \b
    cometmq bench produce --quick
    cometmq bench end-to-end --against kafka,nats --rounds 5
    cometmq bench omb simple-workload
    cometmq bench report --against rocketmq,kafka,redis,nats --out bundle
    """


def session_of(
    bundle: Path, scratch: Path, *, against: tuple[str, ...], only: tuple[str, ...] | None,
    seconds: float | None, rounds: int | None, quick: bool, pairs: tuple[str, ...],
    worker_options: tuple[str, ...], **more: Any,
) -> Any:  # fmt: skip
    from cometmq.bench.cases import Context
    from cometmq.bench.session import LOGS, Session

    names = only or ("cometmq", *(name for name in against if name != "cometmq"))
    quick_size: dict[str, Any] = QUICK if quick else {}
    given = {key: value for key, value in more.items() if value is not None}
    ctx = Context(
        folder=scratch,
        logs=bundle / LOGS,
        say=hint,
        seconds=seconds or (1.0 if quick else 10.0),
        options={key: _number(value) for key, value in map(_pair, worker_options)},
        **{**quick_size, **given},
    )
    settings = dict(map(_pair, pairs))
    return Session(bundle, names, ctx, rounds or (1 if quick else 5), dict(settings))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"{text!r}: KEY=VALUE")
    return key, value


def _number(text: str) -> float | str:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def finish(results: Any, bundle: Path, kept: bool, output: str) -> None:
    """Print the table, write the report, and fail if a check did."""
    from cometmq.bench.report import write_report
    from cometmq.bench.results import rows

    print_rows(rows(results.lines), output)
    if kept:
        write_report(results, bundle)
        hint(f"the bundle: {bundle / 'report.html'}")
    if results.faults:
        raise click.ClickException("\n".join(results.faults))


def _workload(name: str) -> click.Command:
    @_common
    @click.option("--size", type=Bytes(), help="Of a body; at least 32. [128]")
    @click.option("--queues", type=click.IntRange(1, 4096), help="Of a topic.")
    @click.option("--rate", type=click.FloatRange(1), help="Messages/s, in open loop.")
    @click.option("--bytes", "count_bytes", type=Bytes(), help="Of a backlog or store. [1g]")
    @click.option("--beyond", type=Bytes(), help="Of what exceeds the memory. [1.15 times it]")
    @click.option("--many", type=click.IntRange(2, 100_000), help="Queues that are many. [10000]")
    @click.option("--client", help="The kind of client: python, java, embedded.")
    @click.option("--sync", is_flag=True, help="Every acknowledgement waits for the disk.")
    @click.option("--no-controls", is_flag=True, help="Without the bare loops beside it.")
    @output_option
    def command(output: str, no_controls: bool, out: Path | None, store: Path | None,
                count_bytes: int | None, sync: bool, **options: Any) -> None:  # fmt: skip
        from cometmq.bench.session import folders
        from cometmq.bench.systems import Durability

        with folders(out, store) as (bundle, scratch):
            durability = Durability.FSYNC if sync else None
            session = session_of(
                bundle, scratch, bytes=count_bytes, durability=durability, **options
            )
            session.run([name], with_controls=not no_controls)
            finish(session.save(), bundle, out is not None, output)

    return click.command(name, help=OPENING[name])(command)


for _name in OPENING:
    bench.add_command(_workload(_name))


@bench.command()
@output_option
def systems(output: str) -> None:
    """List what can be measured here, and what is missing."""
    from cometmq.bench.systems import describe_all

    print_rows(describe_all(), output)


@bench.command()
@output_option
def fetch(output: str) -> None:
    """Get what is missing to measure the peers, and say what could not be had."""
    from cometmq.bench.systems import describe_all

    rows = describe_all(fetch=True)
    print_rows(rows, output)
    if any(row["missing"] for row in rows):
        raise click.ClickException("not all of it could be had")


@bench.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_common
@click.option("--minutes", type=click.FloatRange(0.01), help="Instead of testDurationMinutes.")
@output_option
def omb(files: tuple[str, ...], output: str, out: Path | None, store: Path | None,
        minutes: float | None, **options: Any) -> None:  # fmt: skip
    """Run OpenMessaging Benchmark workload files.

    FILE is a YAML file with that benchmark's fields, or the name of one that comes with CometMQ:
    simple-workload, 1-topic-1-partition-100b, ...; `list` lists them. The report has its fields, in
    milliseconds. Publish latency counts from the intended time, and end-to-end latency has the
    nanoseconds of a clock that all processes share.
    """
    from cometmq.bench.omb.command import run_files

    run_files(files, output, out, store, minutes, options, session_of)


@bench.command()
@_common
@click.option(
    "--from",
    "given",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="RESULTS.JSON",
    help="Measure nothing: report from these results.",
)
@click.option(
    "--only",
    "parts",
    type=Parts(),
    metavar="NAMES",
    help="These workloads, and omb; the rest of the bundle in DIR stays as it is.",
)
@output_option
def report(output: str, out: Path | None, store: Path | None, given: Path | None,
           parts: tuple[str, ...] | None, **options: Any) -> None:  # fmt: skip
    """Measure everything, and make the bundle: tables, plots, raw histograms, one HTML page."""
    from cometmq.bench.full import full_report
    from cometmq.bench.report import write_report
    from cometmq.bench.results import load_results
    from cometmq.bench.session import RESULTS, folders

    if out is None:
        raise click.UsageError("--out DIR: where the bundle is to be")
    if given is not None:
        results = load_results(given)
        out.mkdir(parents=True, exist_ok=True)
        write_report(results, out)
        hint(f"the bundle: {out / 'report.html'}")
        return
    with folders(out, store) as (bundle, scratch):
        session = session_of(bundle, scratch, **options)
        if parts and (bundle / RESULTS).exists():
            session.take_over(load_results(bundle / RESULTS), parts)
        results = full_report(
            session,
            parts,
            quick=options["quick"],
            rounds=options["rounds"],
            seconds=options["seconds"],
        )
        finish(results, bundle, True, output)
