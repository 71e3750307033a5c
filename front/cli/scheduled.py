"""`cometmq msg scheduled`: messages that wait for a time of their own."""

from __future__ import annotations

from typing import Any, Final

import click

from cometmq.cli.options import name_server_option, output_option
from cometmq.cli.output import hint, print_rows
from cometmq.client import Admin
from cometmq.client.scheduled import Scheduled

COLUMNS: Final = (
    "due_ms", "topic", "msg_id", "keys", "tags", "bytes", "broker", "recall_handle",
)  # fmt: skip


def _row(each: Scheduled) -> dict[str, Any]:
    message = each.message
    return {
        "due_ms": each.due_ms,
        "topic": each.topic,
        "msg_id": message.msg_id,
        "keys": message.keys or "",
        "tags": message.tags or "",
        "bytes": len(message.stored_body),
        "broker": each.broker,
        "recall_handle": each.recall_handle,
    }


@click.command()
@click.option("-t", "--topic", help="For that one alone.")
@click.option("-n", "--count", type=click.IntRange(1), default=100, show_default=True)
@name_server_option
@output_option
def scheduled(topic: str | None, count: int, name_server: str, output: str) -> None:
    """List the messages that wait for a time of their own.

    The next first. `Producer.recall` takes the recall handle of one that is not to be delivered.
    """
    with Admin(name_server) as admin:
        waiting = admin.scheduled(topic, count + 1)
    print_rows([_row(each) for each in waiting[:count]], output, columns=COLUMNS)
    if len(waiting) > count:
        hint(f"there are more than {count}: -n shows them")
