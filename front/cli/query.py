"""`cometmq msg query`: messages by key and time."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import click

from cometmq.cli.options import name_server_option, output_option
from cometmq.cli.output import JSON, hint, print_json, print_rows
from cometmq.cli.positions import position

_TIME = "a time (2026-11-21T08:00, local unless it names a zone), or how long ago (10min, 2h)."


def _time(value: Any) -> datetime:
    """An option's type: a position in time."""
    found = position(value)
    if not isinstance(found, datetime):
        raise click.BadParameter(f"{value!r} is none of: {_TIME}")
    return found


@click.command()
@click.option("-t", "--topic", required=True)
@click.option("-k", "--key", required=True, help="One of the keys they were sent with.")
@click.option("--unique", is_flag=True, help="The key is the id that the producer gave a message.")
@click.option("--from", "begin", type=_time, help=f"Stored since: {_TIME}")
@click.option("--to", "end", type=_time, help="Stored until.")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="At most so many: the newest. Older ones are told of on standard error.",
)
@click.option("-f", "--format", "template", metavar="FORMAT", help="As for `msg tail`.")
@name_server_option
@output_option
def query(
    topic: str,
    key: str,
    unique: bool,
    begin: datetime | None,
    end: datetime | None,
    count: int,
    template: str | None,
    name_server: str,
    output: str,
) -> None:
    """Print the messages of a topic that have a key, oldest first.

    \b
    cometmq msg query -t HDFS --key blk_-1608999687919862906
    cometmq msg query -t HDFS --key blk_-1608999687919862906 --from 2h -o json

    Keys are indexed a moment after their messages are stored.
    """
    from cometmq.cli.formatting import as_record, compile_format
    from cometmq.client import Admin

    with Admin(name_server) as admin:
        messages = admin.query_messages(
            topic, key, begin=begin, end=end, max_count=count + 1, unique=unique
        )
    if len(messages) > count:
        hint(f"these are the newest {count}; there are older ones: -n {10 * count} shows more")
        messages = messages[-count:]
    if template is not None and output != JSON:
        render = compile_format(template)
        sys.stdout.buffer.writelines(render(message) for message in messages)
        return
    records = [as_record(message) for message in messages]
    if output == JSON:
        print_json(records)
        return
    rows = [{name: record.get(name) for name in _COLUMNS} for record in records]
    print_rows(rows, output, columns=_COLUMNS)


_COLUMNS = ("store_timestamp_ms", "queue_id", "queue_offset", "tags", "keys", "msg_id", "body")

__all__ = ["query"]
