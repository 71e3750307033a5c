"""`cometmq group`: consumer groups, their members, lag and offsets."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any, Final

import click

from cometmq.cli import positions
from cometmq.cli.options import LazyGroup, name_server_option, output_option
from cometmq.cli.output import JSON, hint, print_json, print_record, print_rows, warn
from cometmq.cli.positions import Offset, Position, position
from cometmq.client import Admin
from cometmq.client.administration.groups import refusal_of
from cometmq.protocol.errors import CometError, GroupInUse, GroupNotExist

_HERE: Final = "cometmq.cli.groups"
_LETTERS: Final = "cometmq.cli.dead_letters"
_SETTINGS: Final = "cometmq.cli.group_settings"


@click.group(
    cls=LazyGroup,
    entries={
        "list": (_HERE, "list_groups", "List groups with their members and lag."),
        "describe": (_HERE, "describe", "Show members, progress and lag of a group."),
        "create": (_SETTINGS, "create", "Create a group."),
        "update": (_SETTINGS, "update", "Change settings of a group."),
        "reset": (_HERE, "reset", "Move the progress of a group, forwards or back."),
        "clone": (_HERE, "clone", "Have another group go on where this one has come to."),
        "dlq": (_LETTERS, "dlq", "See, send again and purge what a group has given up."),
        "delete": (_SETTINGS, "delete", "Delete a group, with its progress and retry topic."),
    },
)
def group() -> None:
    """List, describe, change, reset and delete consumer groups.

    A group is created as soon as a consumer of it joins, unless autoCreateSubscriptionGroup is off.
    """


@click.command()
@name_server_option
@output_option
def list_groups(name_server: str, output: str) -> None:
    """List groups with their members and lag.

    An unknown lag is empty (null in JSON), with the reason on standard error.
    """
    rows = []
    with Admin(name_server) as admin:
        for each in admin.groups():
            row = {"group": each.group, "members": len(each.members), "topics": each.topics}
            try:
                rows.append(row | {"lag": admin.describe_group(each.group).lag})
            except GroupNotExist:
                continue  # the group was deleted meanwhile
            except CometError as error:
                warn(f"the lag of group {each.group} is unknown: {refusal_of(error)}")
                rows.append(row | {"lag": None})
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
        "differences": [each._asdict() for each in found.differences],
        "settings": found.settings,
    }
    if output == JSON:
        print_json(summary | {"queues": queues})
        return
    if sys.stdout.isatty():
        subscriptions = [f"{topic}: {tags}" for topic, tags in found.subscriptions.items()]
        del summary["differences"]
        print_record(summary | {"subscriptions": subscriptions}, output)
    for each in found.differences:
        if each.tags:
            wants = f"subscribes to {each.tags} of {each.topic}; most do to {each.usual_tags}"
        else:
            wants = f"does not subscribe to {each.topic}; most do, to {each.usual_tags}"
        warn(f"member {each.member} {wants}")
    columns = ("broker", "topic", "queue_id", "queue_offset", "max_queue_offset", "lag", "member")
    print_rows(queues, output, columns=columns)


@click.command()
@click.argument("name", metavar="GROUP")
@click.option("-t", "--topic", required=True)
@click.option("--to", type=position, help=positions.HELP)
@click.option("--by", type=int, help="So many messages on in each queue, or back: --by=-100.")
@click.option("--queue", type=click.IntRange(0), help="That queue only; an offset needs it.")
@click.option("--clamp", is_flag=True, help="An offset outside of the queue is its nearer end.")
@click.option("--force", is_flag=True, hidden=True, help="Needed no more.")
@name_server_option
@output_option
def reset(
    name: str,
    topic: str,
    to: Position | None,
    by: int | None,
    queue: int | None,
    clamp: bool,
    force: bool,
    name_server: str,
    output: str,
) -> None:
    """Move the progress of a group, forwards or back.

    To a place (--to), or by so many messages (--by). Running consumers go on at the new place
    within a second; what they have read and not committed yet is forgotten. An offset outside of
    its queue is refused, or, with --clamp, the nearer end. What --by leads to ends there as well.
    """
    del force
    if (to is None) == (by is None):
        raise click.UsageError("either a place (--to), or by how many messages (--by)")
    if isinstance(to, Offset) and (queue is None or to.value < 0):
        raise click.UsageError("an offset belongs to one queue (--queue), and is not negative")
    with Admin(name_server) as admin:
        try:
            if by is not None:
                rows = _shift(admin, name, topic, by, queue)
            else:
                assert to is not None
                rows = _reset(admin, name, topic, to, queue, clamp=clamp)
        except ValueError as error:  # no such queue
            raise click.UsageError(str(error)) from None
    print_rows(rows, output)


def _reset(
    admin: Admin, name: str, topic: str, to: Position, queue: int | None, *, clamp: bool
) -> list[dict[str, Any]]:
    is_known = any(each.group == name for each in admin.groups())
    place: str | int | datetime = to.value if isinstance(to, Offset) else to
    moved = admin.reset_offsets(name, topic, place, queue, clamp=clamp)
    if not is_known:
        warn(f"no broker knew group {name} before: a consumer of that name will begin there")
    for (broker, queue_id), queue_offset in moved.items():
        if isinstance(place, int) and queue_offset != place:
            _warn_clamped(broker, topic, queue_id, place, queue_offset)
    return [
        {"broker": broker, "topic": topic, "queue_id": queue_id, "queue_offset": queue_offset}
        for (broker, queue_id), queue_offset in moved.items()
    ]


def _shift(admin: Admin, name: str, topic: str, by: int, queue: int | None) -> list[dict[str, Any]]:
    moves = admin.shift_offsets(name, topic, by, queue)
    for each in moves:
        if each.queue_offset < 0:
            warn(f"queue {each.queue_id} of {topic} on {each.broker}: never committed, not moved")
        elif each.before + by != each.queue_offset:
            _warn_clamped(each.broker, topic, each.queue_id, each.before + by, each.queue_offset)
    return [
        {
            "broker": each.broker,
            "topic": topic,
            "queue_id": each.queue_id,
            "before": each.before,
            "queue_offset": each.queue_offset,
        }
        for each in moves
    ]


def _warn_clamped(broker: str, topic: str, queue_id: int, wanted: int, taken: int) -> None:
    warn(f"queue {queue_id} of {topic} on {broker} has no offset {wanted}: {taken} is taken")


@click.command()
@click.argument("source", metavar="GROUP")
@click.argument("target")
@click.option("-t", "--topic", "topics", multiple=True, help="In that topic only; may be repeated.")
@click.option("--force", is_flag=True, help="Although the target has members.")
@name_server_option
def clone(source: str, target: str, topics: tuple[str, ...], force: bool, name_server: str) -> None:
    """Have another group go on where this one has come to.

    A TARGET that is not there is created, with the settings of GROUP.
    """
    with Admin(name_server) as admin:
        try:
            queues = admin.clone_offsets(source, target, topics or None, force=force)
        except GroupInUse as error:
            raise click.ClickException(f"{error} (--force)") from None
    hint(f"group {target}: {queues} queues are where those of {source} are")
