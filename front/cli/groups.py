"""`cometmq group`: consumer groups, their members, lag and offsets."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Final

import click

from cometmq.cli import positions
from cometmq.cli.options import LazyGroup, name_server_option, output_option
from cometmq.cli.output import JSON, print_json, print_record, print_rows, warn
from cometmq.cli.positions import Offset, Position, position
from cometmq.client import Admin
from cometmq.protocol.errors import NotOwner

_HERE: Final = "cometmq.cli.groups"


@click.group(
    cls=LazyGroup,
    entries={
        "list": (_HERE, "list_groups", "List groups, their members and what they lag behind."),
        "describe": (_HERE, "describe", "Show members, progress and lag of a group."),
        "reset": (_HERE, "reset", "Move the progress of a group, forwards or back."),
    },
)
def group() -> None:
    """List, describe and reset consumer groups.

    A group is known as soon as a consumer of it has joined.
    """


@click.command()
@name_server_option
@output_option
def list_groups(name_server: str, output: str) -> None:
    """List groups, their members and what they lag behind."""
    with Admin(name_server) as admin:
        rows = [
            {
                "group": each.group,
                "members": len(each.members),
                "lag": admin.describe_group(each.group).lag,
                "topics": each.topics,
            }
            for each in admin.groups()
        ]
    print_rows(rows, output, columns=("group", "members", "lag", "topics"))


@click.command()
@click.argument("name", metavar="GROUP")
@name_server_option
@output_option
def describe(name: str, name_server: str, output: str) -> None:
    """Show members, progress and lag of a group.

    The lag counts the messages still to come, in each queue; of a group with tags, also those
    that it will pass over. A queue offset of -1: the group has never committed there, and all of
    the queue is to come.
    """
    with Admin(name_server) as admin:
        found = admin.describe_group(name)
    queues = [queue._asdict() for queue in found.queues]
    summary = {
        "group": name,
        "lag": found.lag,
        "members": found.members,
        "subscriptions": found.subscriptions,
    }
    if output == JSON:
        print_json(summary | {"queues": queues})
        return
    if sys.stdout.isatty():
        subscriptions = [f"{topic}: {tags}" for topic, tags in found.subscriptions.items()]
        print_record(summary | {"subscriptions": subscriptions}, output)
    columns = ("broker", "topic", "queue_id", "queue_offset", "max_queue_offset", "lag", "member")
    print_rows(queues, output, columns=columns)


@click.command()
@click.argument("name", metavar="GROUP")
@click.option("-t", "--topic", required=True)
@click.option("--to", required=True, type=position, help=positions.HELP)
@click.option("--queue", type=click.IntRange(0), help="That queue only; an offset needs it.")
@click.option("--force", is_flag=True, help="Although members of the group own queues.")
@name_server_option
@output_option
def reset(
    name: str,
    topic: str,
    to: Position,
    queue: int | None,
    force: bool,
    name_server: str,
    output: str,
) -> None:
    """Move the progress of a group, forwards or back.

    A queue that a running consumer owns is moved with --force only: the consumer then goes on at
    the new place, and what it has read and not committed yet is forgotten.
    """
    if isinstance(to, Offset) and (queue is None or to.value < 0):
        raise click.UsageError("an offset belongs to one queue (--queue), and is not negative")
    with Admin(name_server) as admin:
        place: str | int | datetime = to.value if isinstance(to, Offset) else to
        is_known = any(each.group == name for each in admin.groups())
        try:
            moved = admin.reset_offsets(name, topic, place, queue, force=force)
        except NotOwner as error:
            raise click.ClickException(f"{error} (--force)") from None
        except ValueError as error:  # no such queue
            raise click.UsageError(str(error)) from None
    if not is_known:
        warn(f"no broker knew group {name} before: a consumer of that name will begin there")
    rows = [
        {"broker": broker, "topic": topic, "queue_id": queue_id, "queue_offset": queue_offset}
        for (broker, queue_id), queue_offset in moved.items()
    ]
    print_rows(rows, output)
