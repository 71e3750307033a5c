"""`cometmq store`: looking at the files of a store that no broker has open, and mending them; and
what becomes of the files of a broker that is running."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cometmq.cli.options import LazyGroup, output_option
from cometmq.cli.output import JSON, hint, print_json, print_record, print_rows, warn
from cometmq.cli.progress import progress
from cometmq.protocol.errors import StoreLocked

if TYPE_CHECKING:
    from cometmq.shm.kernel.codec import Message
    from cometmq.shm.log.recovery import Damage

_HERE: Final = "cometmq.cli.store"
_CLEANING: Final = "cometmq.cli.cleaning"
EXIT_FINDINGS: Final = 1
COLUMNS: Final = ("kind", "file", "offset", "expected", "actual")


directory = click.argument(
    "store", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.group(
    cls=LazyGroup,
    entries={
        "verify": (_HERE, "verify", "Check every record and queue entry. Changes nothing."),
        "repair": (_HERE, "repair", "Recover a store and rebuild its queues from the log."),
        "dump": (_HERE, "dump", "Print the records of the log as JSON lines."),
        "clean": (_CLEANING, "clean", "Have brokers delete what is old enough, now."),
        "hold": (_CLEANING, "hold", "Keep the log from being deleted, for the time being."),
        "release": (_CLEANING, "release", "End a hold."),
        "holds": (_CLEANING, "holds", "List what keeps the log from being deleted."),
    },
)
def store() -> None:
    """Look at the files of a store, and mend them.

    verify, repair and dump are for stores that no broker has open, CometMQ's or RocketMQ's; the
    segment sizes are taken from the files. The others speak to running brokers.
    """


@click.command()
@directory
@output_option
def verify(store: Path, output: str) -> None:
    """Check every record and queue entry. Changes nothing.

    Ends with exit code 1 if something is wrong.
    """
    from cometmq.shm.os.locks import check_not_in_use
    from cometmq.shm.tools.verify import verify_store

    try:
        check_not_in_use(store)
    except StoreLocked as error:
        error.add_note(
            "A store in use is checked by `cometmq spark audit`, beside its broker; or verify a "
            "copy of its disk's snapshot."
        )
        raise
    with progress("verifying") as show:
        found = verify_store(store, show)
    if output == JSON:
        print_json(msgspec.to_builtins(found))
    else:
        rows = [msgspec.to_builtins(finding) for finding in found.findings]
        if rows or not sys.stdout.isatty():
            print_rows(rows, output, columns=COLUMNS)
        hint(
            f"{found.records} records in [{found.log_min}, {found.log_max}), {found.queues} queues,"
            f" {len(rows)} findings"
        )
    if found.findings:
        raise SystemExit(EXIT_FINDINGS)


@click.command()
@directory
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option(
    "--cut-at-damage",
    is_flag=True,
    help="RocketMQ's way: end the log at the first damaged record, and lose what follows.",
)
@output_option
def repair(store: Path, dry_run: bool, cut_at_damage: bool, output: str) -> None:
    """Recover a store and rebuild its queues from the log.

    Does what a broker does after a bad end, builds all ConsumeQueues from the log's beginning, and
    leaves the store as an orderly end would: every tool takes it for closed. Damaged records stay
    where they are; they are never delivered. Index files that may not have reached the disk go;
    the next broker builds them again.
    """
    from cometmq.shm.os.locks import StoreLock, check_not_in_use
    from cometmq.shm.tools.repair import plan_repair, repair_store
    from cometmq.shm.tools.verify import store_files

    files = store_files(store)
    if dry_run:
        check_not_in_use(store)
        plan = plan_repair(files)
        _tell_damages(plan.log.damages)
        for fault in plan.faults:
            warn(str(fault))
        print_record(
            {"log_end": plan.log.physical_offset, "damaged": len(plan.log.damages),
             "queue_faults": len(plan.faults)},
            output,
        )  # fmt: skip
        return
    locks = [StoreLock(store, byte) for byte in (1, 0)]
    with progress("repairing") as show:
        done = repair_store(
            store, files.segment_bytes, files.queue_segment_bytes,
            cut_at_damage=cut_at_damage, progress=show,
        )  # fmt: skip
    for lock in locks:
        lock.release()
    found = done.store
    _tell_damages(found.damages)
    print_record(
        {"log_end": found.log.physical_offset, "damaged": len(found.damages),
         "queue_faults": len(found.queues.faults), "rebuilt_from": found.queues.begin,
         "offsets_put_back": done.offsets_put_back,
         "index_files_dropped": done.index_files_dropped},
        output,
    )  # fmt: skip


@click.command()
@directory
@click.option("--from", "begin", type=click.IntRange(0), help="Physical offset to begin at.")
@click.option("--to", "end", type=click.IntRange(0), help="Physical offset to end before.")
@click.option("-t", "--topic", "topics", multiple=True, help="Only of this topic; repeatable.")
@click.option(
    "--body",
    type=click.Choice(["base64", "text", "none"]),
    default="base64",
    show_default=True,
    help="As stored in base64, or decompressed as text, or not at all.",
)
def dump(
    store: Path, begin: int | None, end: int | None, topics: tuple[str, ...], body: str
) -> None:
    """Print the records of the log as JSON lines.

    What is damaged is passed over, with a line on standard error.
    """
    from cometmq.shm.log.recovery import find_end
    from cometmq.shm.os.locks import check_not_in_use
    from cometmq.shm.tools.verify import store_files, whole_records

    check_not_in_use(store)
    files = store_files(store)
    found = find_end(store, files.segment_bytes, clean=True)
    low = max([begin or 0, *files.log_starts()[:1]])
    high = found.physical_offset if end is None else min(end, found.physical_offset)
    wanted = set(topics)
    after = low
    for message in whole_records(files, low, high):
        if message.physical_offset != after and after % files.segment_bytes:
            _tell_gap(after, message.physical_offset, files.segment_bytes)
        after = message.physical_offset + message.size
        if not wanted or message.topic in wanted:
            sys.stdout.write(json.dumps(_fields(message, body), ensure_ascii=False) + "\n")


def _tell_gap(begin: int, end: int, segment_bytes: int) -> None:
    """Between two records of one segment there is nothing but damage."""
    if begin // segment_bytes == end // segment_bytes:
        warn(f"no whole record in [{begin}, {end})")


def _tell_damages(damages: tuple[Damage, ...]) -> None:
    for damage in damages:
        warn(str(damage))


def _fields(message: Message, body: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: getattr(message, name)
        for name in (
            "topic", "queue_id", "queue_offset", "physical_offset", "size", "msg_id",
            "offset_msg_id", "tags", "keys", "properties", "flag", "sys_flag", "born_timestamp_ms",
            "store_timestamp_ms", "born_host", "store_host", "reconsume_times",
            "prepared_transaction_offset", "body_crc",
        )
    }  # fmt: skip
    if body == "base64":
        fields["body"] = base64.b64encode(message.stored_body).decode()
    elif body == "text":
        fields["body"] = _text_of(message)
    return fields


def _text_of(message: Message) -> str:
    try:
        return message.body.decode(errors="replace")
    except ValueError:  # only said to be compressed
        return message.stored_body.decode(errors="replace")
