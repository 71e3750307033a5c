"""`cometmq spark`: jobs over stores, archives and running brokers.

Nothing of Spark is imported before a command runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cometmq.options import LazyGroup, name_server_option, output_option
from cometmq.output import JSON, complain, hint, print_json, print_record, print_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HERE: Final = "cometmq.cli_spark"
EXIT_FINDINGS: Final = 1
EXIT_FAILED: Final = 3
FINDING_COLUMNS: Final = (
    "severity", "kind", "segment", "topic", "queue_id", "queue_offset", "physical_offset",
    "expected", "actual",
)  # fmt: skip
# What needs something that brokers do not have yet: no command, but a name that says so.
LATER: Final = {
    "dlq": "dead letters need consumers' retries (%RETRY% and %DLQ% topics), which brokers do not "
    "have yet",
}

Progress = Callable[[int, int], None]


class _JobGroup(LazyGroup):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in LATER:
            raise click.UsageError(f"{args[0]} is not there yet: {LATER[args[0]]}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_JobGroup,
    entries={
        "audit": (_HERE, "audit", "Compare log and queues of a store, both ways."),
        "archive": (_HERE, "archive", "Bring sealed segments of a store to Parquet, each once."),
        "replay": (_HERE, "replay", "From an archive back to a store or a topic."),
        "stats": (_HERE, "stats", "Count messages by topic and hour; with a plot."),
        "lag": (_HERE, "lag", "What consumer groups are behind: messages, bytes, time."),
        "ingest": (_HERE, "ingest", "Bring a topic into a Parquet table, each message once."),
        "compact": (_HERE, "compact", "Write the newest message of each key as a table."),
        "doctor": ("cometmq.cli_doctor", "doctor", "Look for what Spark needs, and try it."),
    },
    epilog="\b\nExit codes: 0 done, 1 findings, 2 wrong usage, 3 failed, 130 interrupted (Ctrl-C).",
)
def spark() -> None:
    """Jobs over stores, archives and running brokers.

    They need `pip install 'cometmq[spark]'` and Java 17; `lag` needs no Java.
    """


# --- what the commands share ----------------------------------------------------------------------


def job(function: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong is one line and exit code 3."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            text = _text_of(error)
            if text is None:
                raise
            complain(text)
            raise SystemExit(EXIT_FAILED) from None

    return run


def _text_of(error: Exception) -> str | None:
    """None: it is a fault of ours, or no concern of this module."""
    from cometmq.errors import CometError, ConfigError

    if isinstance(error, ModuleNotFoundError) and error.name in ("pyspark", "pyarrow"):
        return f"{error.name} is needed for this: pip install 'cometmq[spark]'"
    if isinstance(error, CometError | ConfigError | OSError):
        return str(error)
    if "pyspark" not in sys.modules:
        return None
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException):
        return None
    if "JAVA_GATEWAY_EXITED" in str(error):
        return "Spark needs Java 17, and it did not start: set JAVA_HOME, or PATH"
    return _cause_of(str(error))


def _cause_of(text: str) -> str:
    """What our own code said in a worker, out of the traces around it."""
    ours = [line.strip() for line in text.splitlines() if line.strip().startswith("cometmq.")]
    return ours[-1].split(": ", 1)[-1] if ours else text.strip().splitlines()[0]


def session_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Of Spark; repeatable."),
        click.option("--driver-memory", default="1g", show_default=True, help="Of Spark's JVM."),
        click.option("--master", default="local[*]", show_default=True, help="Where Spark runs."),
    ):
        function = option(function)
    return function


def source_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("-t", "--topic", "topics", multiple=True, help="Repeatable; else all."),
        click.option("--name-server", metavar="HOST:PORT", help="Read from running brokers."),
        click.option("--store", type=click.Path(path_type=Path), help="Read a store's files."),
    ):
        function = option(function)
    return function


def _source(store: Path | None, name_server: str | None, topics: Sequence[str]) -> dict[str, str]:
    """Options of the source `cometmq`."""
    if (store is None) == (name_server is None):
        raise click.UsageError("say what to read: --store DIR or --name-server HOST:PORT")
    where = {"store": str(store)} if store is not None else {"namesrv": str(name_server)}
    what = {"subscribe": ",".join(topics)} if topics else {"subscribePattern": ".*"}
    return {**where, **what, "isolation": "dispatched"}


def _session(master: str, driver_memory: str, conf: Sequence[str]) -> SparkSession:
    given: dict[str, str] = {}
    for each in conf:
        key, separator, value = each.partition("=")
        if not separator:
            raise click.UsageError(f"--conf {each}: KEY=VALUE is wanted")
        given[key] = value
    # Spark's own launcher greets on standard error.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from cometmq.spark import session

    made = session(
        master,
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": driver_memory,
            "spark.sql.session.timeZone": "UTC",
            **given,
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    return made


@contextmanager
def _tasks(what: str, unit: str = "segments") -> Iterator[Progress]:
    """A line on standard error whenever something more is done, but not more than one a second."""
    state = {"last": -1, "at": 0.0}

    def progress(done: int, total: int) -> None:
        import time

        now = time.monotonic()
        if done != state["last"] and (done == total or now - state["at"] >= 1):
            state.update(last=done, at=now)
            hint(f"{what}: {done} of {total} {unit}" if total > done else f"{what}: {done} {unit}")

    yield progress


def _summary(record: Mapping[str, Any], output: str) -> None:
    print_record(record, output)


def _plan(record: Mapping[str, Any], output: str) -> None:
    print_record({"dry_run": True, **record}, output)


# --- audit ----------------------------------------------------------------------------------------


@click.command()
@click.option("--store", required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--rebuild",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write the ConsumeQueues as they should be; never into the store.",
)
@click.option("--max-findings", default=100, show_default=True, type=click.IntRange(1),
              help="Shown of one kind, queue and segment.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def audit(
    store: Path, rebuild: Path | None, max_findings: int, dry_run: bool, master: str,
    driver_memory: str, conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Compare log and queues of a store, both ways.

    Every record: CRC, place, time, and its entry in the queue; every queue: entries that no record
    has. A broker may be serving the store. Changes nothing. Ends with exit code 1 if something is
    wrong.

    \b
    cometmq spark audit --store ./store
    """
    from cometmq.spark.jobs import audit as jobs

    plan = jobs.plan_audit(store, max_findings)
    if dry_run:
        _plan({"store": plan.bounds.store, "served": plan.bounds.served,
               "segments": len(plan.tasks), "bytes": plan.size_bytes}, output)  # fmt: skip
        return
    with _tasks("audit") as progress:
        found = jobs.audit(
            _session(master, driver_memory, conf), store,
            findings_max=max_findings, progress=progress,
        )  # fmt: skip
    if output == JSON:
        print_json(msgspec.to_builtins(found))
    else:
        rows = [msgspec.to_builtins(finding) for finding in found.findings]
        print_rows(
            [{name: row[name] for name in FINDING_COLUMNS} for row in rows], output,
            columns=FINDING_COLUMNS,
        )  # fmt: skip
        hint(
            f"{found.records} records in [{found.log_min}, {found.log_max}), {len(found.queues)} "
            f"queues, {len(rows)} findings and {found.left_out} more; {found.seconds:.1f} s"
        )
        for name in found.not_checked:
            hint(f"not checked: {name}")
    if rebuild is not None:
        hint(f"{jobs.rebuild_queues(store, rebuild)} queues written to {rebuild}")
    if found.findings:
        raise SystemExit(EXIT_FINDINGS)


# --- archive and replay ---------------------------------------------------------------------------


@click.command()
@click.option("--store", type=click.Path(exists=True, path_type=Path))
@click.option("--archive", "root", required=True, metavar="DIR", help="A folder, also file:///...")
@click.option("--broker", default="", help="Name in the archive; else the store's own.")
@click.option("--follow", type=click.FloatRange(0.1), metavar="SECONDS",
              help="Go on: look for new segments so often, until Ctrl-C.")  # fmt: skip
@click.option("--keep-going", is_flag=True, help="Archive segments with damage as they are.")
@click.option("--verify", is_flag=True,
              help="Compare with the log before a segment counts. Without --store: reread the "
              "whole archive.")  # fmt: skip
@click.option("--codec", type=click.Choice(["zstd", "lz4", "snappy"]), default="zstd",
              show_default=True)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say which segments would be archived, and stop.")
@name_server_option
@session_options
@output_option
@job
def archive(
    store: Path | None, root: str, broker: str, follow: float | None, keep_going: bool,
    verify: bool, codec: str, dry_run: bool, name_server: str, master: str, driver_memory: str,
    conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Bring sealed segments of a store to Parquet, each once.

    By topic and date, lossless; what is in the archive's manifest is not done again. A broker may
    be serving the store; its last segment is never taken. If it has archiveHold on, it is told
    what it may delete now. Ends with exit code 1 if there was damage (--keep-going), --verify
    found something, or something was deleted before it was archived.

    \b
    cometmq spark archive --store ./store --archive /srv/archive
    """
    from cometmq.spark.jobs import archive as jobs
    from cometmq.spark.jobs.manifest import local_root

    local_root(root)  # before Spark is started
    if store is None:
        if not verify:
            raise click.UsageError("say what to archive (--store DIR), or --verify")
        _verify(root, broker, lambda: _session(master, driver_memory, conf), dry_run, output)
        return
    if dry_run:
        plan = jobs.plan_archive(store, root, broker)
        _plan({"store": plan.bounds.store, "broker": plan.bounds.broker,
               "sealed": len(plan.sealed), "waiting": list(plan.waiting),
               "lost_bytes": plan.lost_bytes}, output)  # fmt: skip
        return
    session = _session(master, driver_memory, conf)
    findings = 0
    pause = threading.Event()
    while True:
        with _tasks("archive") as progress:
            done = jobs.archive(
                session, store, root, broker=broker, keep_going=keep_going, verify=verify,
                codec=codec, name_server=name_server, progress=progress,
            )  # fmt: skip
        findings += done.damaged + done.lost_bytes
        if done.segments or follow is None:
            _summary(msgspec.to_builtins(done), output)
        if follow is None:
            break
        pause.wait(follow)
    if findings:
        raise SystemExit(EXIT_FINDINGS)


def _verify(
    root: str, broker: str, session: Callable[[], SparkSession], dry_run: bool, output: str
) -> None:
    from cometmq.spark.jobs import archived, manifest

    if dry_run:
        found = manifest.entries(manifest.local_root(root), broker)
        _plan({"archive": root, "segments": len(found)}, output)
        return
    with _tasks("verify") as progress:
        done = archived.verify_archive(session(), root, broker=broker, progress=progress)
    _summary(msgspec.to_builtins(done), output)
    if done.wrong:
        raise SystemExit(EXIT_FINDINGS)


@click.command()
@click.option("--archive", "root", required=True, metavar="DIR", help="A folder, also file:///...")
@click.option("--broker", default="", help="Only what was archived of that one.")
@click.option("--to-store", type=click.Path(path_type=Path), metavar="DIR",
              help="Make a store there, its log byte by byte what it was.")  # fmt: skip
@click.option("--to-topic", metavar="TOPIC", help="Send to this topic of running brokers.")
@click.option("-t", "--topic", help="With --to-topic: which archived topic.")
@click.option("--from", "begin", metavar="TIME", default="0",
              help="With --to-topic: stored then or later; ISO 8601 or ms.")  # fmt: skip
@click.option("--to", "end", metavar="TIME", help="With --to-topic: stored before.")
@click.option("--rate", type=click.IntRange(0), default=0,
              help="With --to-topic: at most so many messages a second; 0 = no limit.")  # fmt: skip
@click.option("--run", default="", metavar="NAME",
              help="With --to-topic: another name sends the same once more.")  # fmt: skip
@click.option("--at-least-once", is_flag=True,
              help="With --to-topic: messages are seen as they are sent, and a run that is begun "
              "again begins again.")  # fmt: skip
@click.option("--to-broker", default="", metavar="NAME",
              help="With --to-topic: needed where several brokers have it.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be replayed, and stop.")
@name_server_option
@session_options
@output_option
@job
def replay(
    root: str, broker: str, to_store: Path | None, to_topic: str | None, topic: str | None,
    begin: str, end: str | None, rate: int, run: str, at_least_once: bool, to_broker: str,
    dry_run: bool, name_server: str, master: str, driver_memory: str, conf: tuple[str, ...],
    output: str,
) -> None:  # fmt: skip
    """From an archive back to a store or a topic.

    A store comes out byte by byte, with its queues built from the log. A topic gets the messages
    exactly once, though ids, times and hosts are new: a run that ended early goes on when it is
    begun again.

    \b
    cometmq spark replay --archive /srv/archive --to-store ./restored
    cometmq spark replay --archive /srv/archive -t orders --to-topic orders.replay
    """
    from cometmq.spark.jobs import manifest
    from cometmq.spark.jobs import replay as jobs
    from cometmq.spark.options import milliseconds

    if (to_store is None) == (to_topic is None):
        raise click.UsageError("say where to: --to-store DIR or --to-topic TOPIC")
    if to_topic is not None and topic is None:
        raise click.UsageError("--to-topic needs the archived --topic")
    folder = manifest.local_root(root)
    choice = jobs.Choice(
        topic or "", broker, milliseconds(begin, "--from"),
        milliseconds(end, "--to") if end else (1 << 63) - 1,
    )  # fmt: skip
    if dry_run:
        found = choice.segments(folder) if topic else manifest.entries(folder, broker)
        _plan({"archive": root, "segments": len(found)}, output)
        return
    session = _session(master, driver_memory, conf)
    if to_store is not None:
        with _tasks("replay") as progress:
            done = jobs.replay_to_store(session, root, to_store, broker=broker, progress=progress)
    else:
        assert to_topic is not None
        with _tasks("replay", "segments") as progress:
            done = jobs.replay_to_topic(
                session, root, choice, name_server, to_topic, run=run, rate=rate,
                at_least_once=at_least_once, to_broker=to_broker, progress=progress,
            )  # fmt: skip
    _summary(msgspec.to_builtins(done), output)
    if done.left_out:
        raise SystemExit(EXIT_FINDINGS)


# --- stats and lag --------------------------------------------------------------------------------


@click.command()
@source_options
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.html",
              help="Also write a page with a bar an hour.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def stats(
    store: Path | None, name_server: str | None, topics: tuple[str, ...], plot: Path | None,
    dry_run: bool, master: str, driver_memory: str, conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Count messages by topic and hour; with a plot.

    Counts, bytes, sizes of records (mean, p50, p95, p99, max), and queue offsets that are missing.

    \b
    cometmq spark stats --store ./store --plot traffic.html
    """
    options = _source(store, name_server, topics)
    if plot is not None and plot.suffix != ".html":
        raise click.UsageError(f"--plot {plot}: plots are HTML pages, name a file *.html")
    if dry_run:
        _plan(options, output)
        return
    from cometmq.spark.jobs import stats as jobs

    found = jobs.stats(_session(master, driver_memory, conf), **options)
    if plot is not None:
        jobs.write_plot(found, plot)
    rows = [msgspec.to_builtins(row) for row in found.rows]
    if output == JSON:
        print_json(msgspec.to_builtins(found))
    else:
        print_rows(rows, output, columns=jobs.HourStats.__struct_fields__)
    hint(f"{found.messages} messages, {found.size_bytes} bytes; {found.seconds:.1f} s")


@click.command()
@click.option("-g", "--group", "groups", multiple=True, help="Repeatable; else all.")
@click.option("--every", type=click.FloatRange(0.1), metavar="SECONDS",
              help="Go on, with rates, until Ctrl-C.")  # fmt: skip
@click.option("--samples", type=click.IntRange(1), help="With --every: end after so many.")
@click.option("--dry-run", is_flag=True, help="Say what would be asked, and stop.")
@name_server_option
@output_option
@job
def lag(
    groups: tuple[str, ...], every: float | None, samples: int | None, dry_run: bool,
    name_server: str, output: str,
) -> None:  # fmt: skip
    """What consumer groups are behind: messages, bytes, time.

    One row a group and queue. What is not known is empty (null in JSON), never 0. Of a group with
    tags, messages that it will pass over count as well. Ends with exit code 1 if the last sample
    has a queue that is stalled or expired.

    \b
    cometmq spark lag --group billing --every 30
    """
    if dry_run:
        _plan({"name_server": name_server, "groups": list(groups) or "all"}, output)
        return
    from cometmq.spark.jobs.lag import GroupLag, LagSampler

    sampler = LagSampler(name_server, groups)
    pause = threading.Event()
    taken = 0
    try:
        while True:
            rows = sampler.sample()
            taken += 1
            print_rows(
                [msgspec.to_builtins(row) for row in rows], output,
                columns=GroupLag.__struct_fields__,
            )  # fmt: skip
            if every is None or taken == samples:
                break
            pause.wait(every)
    finally:
        sampler.close()
    if any(row.state in ("stalled", "expired") for row in rows):
        raise SystemExit(EXIT_FINDINGS)


# --- tables ---------------------------------------------------------------------------------------


@click.command()
@source_options
@click.option("--table", required=True, type=click.Path(path_type=Path), metavar="DIR")
@click.option("--schema", default="", metavar="DDL",
              help='Bodies are JSON of it: "id bigint, name string". Else rows as they are.',
)  # fmt: skip
@click.option("--on-bad", type=click.Choice(["dlq", "suspend", "skip"]), default="dlq",
              show_default=True, help="With --schema: bodies that do not fit.")  # fmt: skip
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
              help="How far it came.  [default: TABLE__checkpoint]")  # fmt: skip
@click.option("--trigger", default="", metavar="INTERVAL",
              help='Go on in such steps ("60 seconds") until Ctrl-C; else what there is now.',
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def ingest(
    store: Path | None, name_server: str | None, topics: tuple[str, ...], table: Path, schema: str,
    on_bad: str, checkpoint: Path | None, trigger: str, dry_run: bool, master: str,
    driver_memory: str, conf: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Bring a topic into a Parquet table, each message once.

    Goes on where the last run ended. Bodies that do not fit go to TABLE__dlq with their place; then
    the exit code is 1.

    \b
    cometmq spark ingest --name-server 127.0.0.1:9876 -t orders --table ./orders
    """
    options = _source(store, name_server, topics) | {"isolation": "durable"}
    if dry_run:
        _plan(options | {"table": str(table)}, output)
        return
    from cometmq.spark.jobs import ingest as jobs

    done = jobs.ingest(
        _session(master, driver_memory, conf), table, schema=schema, on_bad=on_bad,
        checkpoint=checkpoint, trigger=trigger, **options,
    )  # fmt: skip
    _summary(msgspec.to_builtins(done), output)
    if done.bad:
        raise SystemExit(EXIT_FINDINGS)


@click.command()
@source_options
@click.option("--table", required=True, type=click.Path(path_type=Path), metavar="DIR",
              help="A new directory.")  # fmt: skip
@click.option("--keep-tombstones", is_flag=True, help="Keys whose newest body is empty too.")
@click.option("--dry-run", is_flag=True, help="Say what would be read, and stop.")
@session_options
@output_option
@job
def compact(
    store: Path | None, name_server: str | None, topics: tuple[str, ...], table: Path,
    keep_tombstones: bool, dry_run: bool, master: str, driver_memory: str, conf: tuple[str, ...],
    output: str,
) -> None:  # fmt: skip
    """Write the newest message of each key as a table.

    \b
    cometmq spark compact --store ./store -t customers --table ./customers
    """
    options = _source(store, name_server, topics)
    if dry_run:
        _plan(options | {"table": str(table)}, output)
        return
    from cometmq.spark.jobs import compact as jobs

    session = _session(master, driver_memory, conf)
    done = jobs.compact(session, table, keep_tombstones=keep_tombstones, **options)
    _summary(msgspec.to_builtins(done), output)
