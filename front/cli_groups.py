"""`cometmq group`."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Final

import click

from cometmq import positions
from cometmq.client import Admin
from cometmq.options import LazyGroup, name_server_option, output_option
from cometmq.output import JSON, print_json, print_record, print_rows, warn
from cometmq.positions import Offset, Position, position

_HERE: Final = "cometmq.cli_groups"


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
    that it will pass over. A queue offset of -1: the group has never committed there.
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
@click.option("--force", is_flag=True, help="Although the group has members.")
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

    Consumers that are running would go on where they are and commit over it, so the group must
    have no members.
    """
    if isinstance(to, Offset) and (queue is None or to.value < 0):
        raise click.UsageError("an offset belongs to one queue (--queue), and is not negative")
    with Admin(name_server) as admin:
        members = next((each.members for each in admin.groups() if each.group == name), [])
        if members and not force:
            raise click.ClickException(
                f"group {name} has {len(members)} members ({members[0]}): end them, or --force"
            )
        if members:
            warn(f"{len(members)} members of {name} go on where they are")
        place: str | int | datetime = to.value if isinstance(to, Offset) else to
        try:
            moved = admin.reset_offsets(name, topic, place, queue)
        except ValueError as error:  # no such queue
            raise click.UsageError(str(error)) from None
    rows = [
        {"broker": broker, "topic": topic, "queue_id": queue_id, "queue_offset": queue_offset}
        for (broker, queue_id), queue_offset in moved.items()
    ]
    print_rows(rows, output)
