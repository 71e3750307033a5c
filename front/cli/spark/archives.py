"""`cometmq spark archive` and `replay`: a log to Parquet, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import name_server_option, output_option
from cometmq.cli.spark.running import (
    EXIT_FINDINGS,
    job,
    plan,
    session_of,
    session_options,
    summary,
    tasks,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
        _verify(root, broker, lambda: session_of(master, driver_memory, conf), dry_run, output)
        return
    if dry_run:
        planned = jobs.plan_archive(store, root, broker)
        plan({"store": planned.bounds.store, "broker": planned.bounds.broker,
               "sealed": len(planned.sealed), "waiting": list(planned.waiting),
               "lost_bytes": planned.lost_bytes}, output)  # fmt: skip
        return
    session = session_of(master, driver_memory, conf)
    findings = 0
    pause = threading.Event()
    while True:
        with tasks("archive") as progress:
            done = jobs.archive(
                session, store, root, broker=broker, keep_going=keep_going, verify=verify,
                codec=codec, name_server=name_server, progress=progress,
            )  # fmt: skip
        findings += done.damaged + done.lost_bytes
        if done.segments or follow is None:
            summary(done, output)
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
        plan({"archive": root, "segments": len(found)}, output)
        return
    with tasks("verify") as progress:
        done = archived.verify_archive(session(), root, broker=broker, progress=progress)
    summary(done, output)
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
        plan({"archive": root, "segments": len(found)}, output)
        return
    session = session_of(master, driver_memory, conf)
    if to_store is not None:
        with tasks("replay") as progress:
            done = jobs.replay_to_store(session, root, to_store, broker=broker, progress=progress)
    else:
        assert to_topic is not None
        with tasks("replay", "segments") as progress:
            done = jobs.replay_to_topic(
                session, root, choice, name_server, to_topic, run=run, rate=rate,
                at_least_once=at_least_once, to_broker=to_broker, progress=progress,
            )  # fmt: skip
    summary(done, output)
    if done.left_out:
        raise SystemExit(EXIT_FINDINGS)
