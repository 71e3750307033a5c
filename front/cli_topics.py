"""`cometmq topic`."""

from __future__ import annotations

import sys
from typing import Final

import click

from cometmq.client import Admin
from cometmq.options import LazyGroup, name_server_option, output_option
from cometmq.output import JSON, hint, print_json, print_record, print_rows
from cometmq.protocol.names import SYSTEM_TOPICS

_HERE: Final = "cometmq.cli_topics"
READ, WRITE = 4, 2
# The topic that new ones are made after. RocketMQ AUTO_CREATE_TOPIC_KEY_TOPIC.
BROKERS_OWN: Final = SYSTEM_TOPICS | {"TBW102"}


@click.group(
    cls=LazyGroup,
    entries={
        "create": (_HERE, "create", "Create topics, or change them."),
        "list": (_HERE, "list_topics", "List topics and how much is in them."),
        "describe": (_HERE, "describe", "Show the queues of a topic."),
        "delete": (_HERE, "delete", "Delete topics, with the progress of all groups in them."),
    },
)
def topic() -> None:
    """Create, list, describe and delete topics.

    A topic that is sent to is created by that, unless autoCreateTopicEnable is off.
    """


@click.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--queues", type=click.IntRange(1, 65535), default=8, show_default=True)
@click.option("--read-queues", type=click.IntRange(1, 65535), help="Where it is to differ.")
@click.option("--write-queues", type=click.IntRange(1, 65535), help="Where it is to differ.")
@click.option(
    "--perm",
    type=click.Choice(["rw", "r", "w"]),
    default="rw",
    show_default=True,
    help="Whether it may be read, written, or both.",
)
@click.option("--broker", metavar="NAME", help="On that broker only; else on all.")
@name_server_option
def create(
    topics: tuple[str, ...],
    queues: int,
    read_queues: int | None,
    write_queues: int | None,
    perm: str,
    broker: str | None,
    name_server: str,
) -> None:
    """Create topics, or change them.

    Messages of one queue keep their order; the members of a group share the queues. To use fewer
    queues, lower --write-queues first, and --read-queues when the others have been read.
    """
    bits = READ * ("r" in perm) | WRITE * ("w" in perm)
    with Admin(name_server) as admin:
        for name in topics:
            try:
                admin.create_topic(
                    name,
                    queues,
                    read_queues=read_queues,
                    write_queues=write_queues,
                    perm=bits,
                    broker=broker,
                )
            except ValueError as error:  # no such broker
                raise click.UsageError(str(error)) from None
            hint(f"topic {name}: created")


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="The brokers' own topics too.")
@name_server_option
@output_option
def list_topics(everything: bool, name_server: str, output: str) -> None:
    """List topics and how much is in them."""
    rows = []
    with Admin(name_server) as admin:
        for name in admin.topics():
            if name in BROKERS_OWN and not everything:
                continue
            found = admin.describe_topic(name)
            rows.append(
                {
                    "topic": name,
                    "read_queues": found.read_queues,
                    "write_queues": found.write_queues,
                    "messages": found.message_count,
                    "brokers": sorted({queue.broker for queue in found.queues}),
                }
            )
    print_rows(
        rows, output, columns=("topic", "read_queues", "write_queues", "messages", "brokers")
    )


@click.command()
@click.argument("name", metavar="TOPIC")
@name_server_option
@output_option
def describe(name: str, name_server: str, output: str) -> None:
    """Show the queues of a topic.

    A queue holds the messages from its min to its max offset, which the next one gets.
    """
    with Admin(name_server) as admin:
        found = admin.describe_topic(name)
    queues = [
        queue._asdict() | {"messages": queue.max_queue_offset - queue.min_queue_offset}
        for queue in found.queues
    ]
    summary = {
        "topic": name,
        "read_queues": found.read_queues,
        "write_queues": found.write_queues,
        "messages": found.message_count,
    }
    if output == JSON:
        print_json(summary | {"queues": queues})
        return
    if sys.stdout.isatty():
        print_record(summary, output)
    print_rows(queues, output)


@click.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@name_server_option
def delete(topics: tuple[str, ...], yes: bool, name_server: str) -> None:
    """Delete topics, with the progress of all groups in them.

    The records stay on the disk until they expire; nobody finds them any more.
    """
    with Admin(name_server) as admin:
        for name in topics:
            if not yes and sys.stdin.isatty():
                click.confirm(f"Delete topic {name}?", abort=True, err=True)
            admin.delete_topic(name)
            hint(f"topic {name}: deleted")
