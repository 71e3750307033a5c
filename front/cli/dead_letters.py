"""`cometmq group dlq`: messages that a group has given up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from cometmq.cli.formatting import as_record
from cometmq.cli.options import LazyGroup, name_server_option, output_option
from cometmq.cli.output import JSON, hint, print_json, print_record, print_rows
from cometmq.client import Admin
from cometmq.client.dead_letters import DeadLetter
from cometmq.protocol.errors import MessageNotFound

_HERE: Final = "cometmq.cli.dead_letters"
_ALL: Final = 1 << 62
COLUMNS: Final = (
    "msg_id", "topic", "attempts", "keys", "tags", "bytes", "stored_ms", "broker", "queue_offset",
)  # fmt: skip


@click.group(
    cls=LazyGroup,
    entries={
        "list": (_HERE, "list_letters", "List the dead letters that are not dealt with."),
        "show": (_HERE, "show", "Print a dead letter."),
        "resend": (_HERE, "resend", "Send dead letters again."),
        "export": (_HERE, "export", "Write dead letters to a file, a line of JSON each."),
        "purge": (_HERE, "purge", "Have all dead letters dealt with."),
    },
)
def dlq() -> None:
    """See, send again and purge what a group has given up.

    Such dead letters lie in the topic %DLQ%GROUP. What was sent again, or purged, is dealt with and
    no longer shown; it stays in that topic until it expires.
    """


def _row(letter: DeadLetter) -> dict[str, Any]:
    message = letter.message
    return {
        "msg_id": message.msg_id,
        "topic": letter.topic,
        "attempts": letter.attempts,
        "keys": message.keys or "",
        "tags": message.tags or "",
        "bytes": len(message.stored_body),
        "stored_ms": message.store_timestamp_ms,
        "broker": letter.broker,
        "queue_offset": message.queue_offset,
    }


@click.command("list")
@click.argument("group", metavar="GROUP")
@click.option("-n", "--count", type=click.IntRange(1), default=100, show_default=True)
@name_server_option
@output_option
def list_letters(group: str, count: int, name_server: str, output: str) -> None:
    """List the dead letters that are not dealt with.

    Oldest first, on each broker.
    """
    with Admin(name_server) as admin:
        letters = admin.dead_letters(group, count + 1)
    print_rows([_row(each) for each in letters[:count]], output, columns=COLUMNS)
    if len(letters) > count:
        hint(f"there are more than {count}: -n shows them")


@click.command()
@click.argument("group", metavar="GROUP")
@click.argument("msg_id")
@name_server_option
@output_option
def show(group: str, msg_id: str, name_server: str, output: str) -> None:
    """Print a dead letter."""
    with Admin(name_server) as admin:
        for each in admin.dead_letters(group, _ALL):
            if each.message.msg_id == msg_id:
                break
        else:
            raise MessageNotFound(f"group {group} has no dead letter {msg_id}")
    record = _row(each) | as_record(each.message) | {"topic": each.topic}
    if output == JSON:
        print_json(record)
    else:
        print_record(record, output)


@click.command()
@click.argument("group", metavar="GROUP")
@click.argument("msg_ids", nargs=-1, metavar="[MSG_ID]...")
@click.option("-t", "--topic", help="To this topic, rather than where each came from.")
@name_server_option
@output_option
@click.pass_context
def resend(
    ctx: click.Context,
    group: str,
    msg_ids: tuple[str, ...],
    topic: str | None,
    name_server: str,
    output: str,
) -> None:
    """Send dead letters again.

    All that are not dealt with, or those of the ids, which stay listed. A line says what became of
    each. Exits with 1 if one of them was not stored.
    """
    with Admin(name_server) as admin:
        resent = admin.resend_dead_letters(group, msg_ids or None, topic=topic)
    rows = [
        {
            "msg_id": each.letter.message.msg_id,
            "topic": topic or each.letter.topic,
            "new_msg_id": each.msg_id,
            "error": str(each.error or ""),
        }
        for each in resent
    ]
    print_rows(rows, output, columns=("msg_id", "topic", "new_msg_id", "error"))
    if any(each.error for each in resent):
        ctx.exit(1)


@click.command()
@click.argument("group", metavar="GROUP")
@click.argument("file", type=click.File("wb"), default="-")
@name_server_option
def export(group: str, file: BinaryIO, name_server: str) -> None:
    """Write dead letters to a file, a line of JSON each."""
    with Admin(name_server) as admin:
        letters = admin.dead_letters(group, _ALL)
    for each in letters:
        record = as_record(each.message) | {"topic": each.topic, "attempts": each.attempts}
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    name = "standard output" if file.name in ("-", "<stdout>") else Path(file.name).name
    hint(f"{len(letters)} dead letters of group {group} are written to {name}")


@click.command()
@click.argument("group", metavar="GROUP")
@name_server_option
def purge(group: str, name_server: str) -> None:
    """Have all dead letters dealt with.

    They are no longer shown, nor sent again.
    """
    with Admin(name_server) as admin:
        count = admin.purge_dead_letters(group)
    hint(f"{count} dead letters of group {group} are dealt with")
