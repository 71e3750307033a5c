"""`cometmq topic`: to list, create, change and delete topics."""

from __future__ import annotations

import sys
from typing import Final, TextIO

import click

from cometmq.cli.options import LazyGroup, name_server_option, output_option
from cometmq.cli.output import JSON, hint, print_json, print_record, print_rows, warn
from cometmq.client import Admin
from cometmq.protocol.names import SYSTEM_TOPICS

_HERE: Final = "cometmq.cli.topics"
READ, WRITE = 4, 2
QUEUES_MAX: Final = 4_096  # of one topic, on one broker
SHOWN_MAX: Final = 20  # topics that are named one by one
# The topic that new ones are made after. RocketMQ AUTO_CREATE_TOPIC_KEY_TOPIC.
BROKERS_OWN: Final = SYSTEM_TOPICS | {"TBW102"}


@click.group(
    cls=LazyGroup,
    entries={
        "create": (_HERE, "create", "Create topics."),
        "update": (_HERE, "update", "Change a topic."),
        "list": (_HERE, "list_topics", "List topics and how much is in them."),
        "describe": (_HERE, "describe", "Show the queues of a topic."),
        "delete": (_HERE, "delete", "Delete topics, with the progress of all groups in them."),
    },
)
def topic() -> None:
    """Create, change, describe and delete topics.

    A topic that is sent to is created by that, unless autoCreateTopicEnable is off.
    """


PERM: Final = click.Choice(["rw", "r", "w"])
QUEUES: Final = click.IntRange(1, QUEUES_MAX)


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--queues", type=QUEUES, default=8, show_default=True)
@click.option("--read-queues", type=QUEUES, help="Where it is to differ.")
@click.option("--write-queues", type=QUEUES, help="Where it is to differ.")
@click.option(
    "--perm",
    type=PERM,
    default="rw",
    show_default=True,
    help="Whether it may be read, written, or both.",
)
@click.option(
    "--from",
    "file",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="Names of more topics, one a line; - for the standard input.",
)
@click.option("--broker", metavar="NAME", help="On that broker only; else on all.")
@name_server_option
@output_option
def create(
    topics: tuple[str, ...],
    queues: int,
    read_queues: int | None,
    write_queues: int | None,
    perm: str,
    file: TextIO | None,
    broker: str | None,
    name_server: str,
    output: str,
) -> None:
    """Create topics.

    One that is there already with these settings stays as it is.

    With other settings it is an error, and changed by `topic update`. Messages of one queue keep
    their order; the members of a group share the queues.
    """
    wanted = [*topics, *_names_in(file)]
    if not wanted:
        raise click.UsageError("no topic is named: TOPIC or --from FILE")
    with Admin(name_server) as admin:
        try:
            refused = admin.create_topics(
                wanted,
                queues,
                read_queues=read_queues,
                write_queues=write_queues,
                perm=_bits(perm),
                broker=broker,
            )
        except ValueError as error:  # no such broker
            raise click.UsageError(str(error)) from None
    bad = {name for name, _ in refused}
    made = [name for name in wanted if name not in bad]
    if output == JSON:
        errors = {name: str(refusal) for name, refusal in refused}
        print_json([{"topic": name, "error": errors.get(name)} for name in wanted])
        made = []
    for name in made[:SHOWN_MAX]:
        hint(f"topic {name}: created")
    if len(made) > SHOWN_MAX:
        hint(f"and {len(made) - SHOWN_MAX} more")
    for _, refusal in refused[1:SHOWN_MAX]:  # the first is the error that it ends with
        warn(str(refusal))
    if refused:
        raise refused[0][1]


@click.command()
@click.argument("name", metavar="TOPIC")
@click.option("--queues", type=QUEUES)
@click.option("--read-queues", type=QUEUES, help="Where it is to differ.")
@click.option("--write-queues", type=QUEUES, help="Where it is to differ.")
@click.option("--perm", type=PERM, help="Whether it may be read, written, or both.")
@click.option("--broker", metavar="NAME", help="On that broker only; else on all that have it.")
@click.option("--force", is_flag=True, help="Although that hides messages which are not read.")
@name_server_option
def update(
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    broker: str | None,
    force: bool,
    name_server: str,
) -> None:
    """Change a topic.

    What is not given stays as it is.

    To use fewer queues, lower --write-queues first, and --read-queues when the others have been
    read: while a group has not, or nobody reads them, it is refused.
    """
    if not (queues or read_queues or write_queues or perm):
        raise click.UsageError("nothing to change: --queues, --read-queues, --write-queues, --perm")
    with Admin(name_server) as admin:
        admin.update_topic(
            name,
            queues,
            read_queues=read_queues,
            write_queues=write_queues,
            perm=_bits(perm) if perm else None,
            broker=broker,
            force=force,
        )
    hint(f"topic {name}: changed")


def _bits(perm: str) -> int:
    return READ * ("r" in perm) | WRITE * ("w" in perm)


def _names_in(file: TextIO | None) -> list[str]:
    return [line.strip() for line in file or () if line.strip()]


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="The brokers' own topics too.")
@name_server_option
@output_option
def list_topics(everything: bool, name_server: str, output: str) -> None:
    """List topics and how much is in them."""
    with Admin(name_server) as admin:
        rows = [
            {
                "topic": found.topic,
                "read_queues": found.read_queues,
                "write_queues": found.write_queues,
                "messages": found.message_count,
                "brokers": sorted({queue.broker for queue in found.queues}),
            }
            for found in admin.describe_topics()
            if everything or found.topic not in BROKERS_OWN
        ]
    print_rows(
        rows, output, columns=("topic", "read_queues", "write_queues", "messages", "brokers")
    )


@click.command()
@click.argument("name", metavar="TOPIC")
@name_server_option
@output_option
def describe(name: str, name_server: str, output: str) -> None:
    """Show the queues of a topic.

    A queue holds the messages from its min to its max offset, which the next one gets. Queues
    that the topic has no more are shown as long as they hold messages.
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
@output_option
def delete(topics: tuple[str, ...], yes: bool, name_server: str, output: str) -> None:
    """Delete topics, with the progress of all groups in them.

    The records stay on the disk until they expire. A topic of that name that is made later, also by
    whoever goes on sending to it, has those that are left.
    """
    with Admin(name_server) as admin:
        for name in topics:
            if not yes and sys.stdin.isatty():
                click.confirm(f"Delete topic {name}?", abort=True, err=True)
            admin.delete_topic(name)
            if output != JSON:
                hint(f"topic {name}: deleted")
    if output == JSON:
        print_json([{"topic": name, "error": None} for name in topics])
