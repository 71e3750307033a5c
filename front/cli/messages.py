"""`cometmq msg`: the options; what they do is in `sending` and `tailing`."""

from __future__ import annotations

import sys
from typing import Final

import click

from cometmq.cli import positions
from cometmq.cli.options import LazyGroup, name_server_option, output_option, wait_option
from cometmq.cli.output import JSON, print_json
from cometmq.cli.positions import position

_HERE: Final = "cometmq.cli.messages"


@click.group(
    cls=LazyGroup,
    entries={
        "send": (_HERE, "send", "Send every line of files, or of standard input, as a message."),
        "tail": (_HERE, "tail", "Print the messages of a topic, and those to come."),
        "get": (_HERE, "get", "Print the message of an id."),
        "query": (
            "cometmq.cli.query",
            "query",
            "Print the messages of a topic that have a key, oldest first.",
        ),
        "scheduled": (
            "cometmq.cli.scheduled",
            "scheduled",
            "List the messages that wait for a time of their own.",
        ),
    },
)
def msg() -> None:
    """Send, read and find messages."""


@click.command()
@click.option("-t", "--topic", required=True, help="Created if it is new and that is allowed.")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(allow_dash=True))
@click.option("--tags", metavar="TAG", help="The tag of all messages.")
@click.option("--tags-from", metavar="FROM", help="Each message's tag, out of its line.")
@click.option("--keys", metavar="WORDS", help="Keys for every message, separated by spaces.")
@click.option("--keys-from", metavar="FROM", help="Key of each message, taken from its line.")
@click.option("--ordering-key", metavar="KEY", help="All into the queue of that key, in order.")
@click.option(
    "-k",
    "--ordering-key-from",
    metavar="FROM",
    help="Each message's ordering key, out of its line: those of one key keep their order.",
)
@click.option("-p", "--property", "properties", multiple=True, metavar="NAME=VALUE")
@click.option("--queue", type=click.IntRange(0), help="All into that queue, in their order.")
@click.option("--count", type=click.IntRange(1), help="Stop after so many messages.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds that a broker may be away before sending fails.",
)
@click.option("--receipts", is_flag=True, help="Also a line for each message, where it is stored.")
@wait_option
@name_server_option
@output_option
def send(topic: str, files: tuple[str, ...], output: str, **options: object) -> None:
    """Send every line of files, or of standard input, as a message.

    \b
    cometmq msg send -t HDFS --tags-from 5 < HDFS.log
    cometmq msg send -t HDFS --tags-from 'dfs\\.(\\w+)' --keys-from '(blk_-?\\d+)' HDFS.log

    A line's bytes are sent as they are, without the end of line; empty lines are skipped. FROM is
    the number of a field, from 1, where blanks separate fields, or a regular expression: its first
    group, or its whole match if it has none. It is matched against the line's text, so \\w is a
    letter of any script. A line without a match gets no tag, or no key. A key has no spaces.

    Lines spread over the topic's queues, and have no order among each other there, but those with
    the same -k. Nothing is lost: what counts as acknowledged is stored. A broker that goes away
    and comes back is waited for; some lines may then be stored twice.
    """
    from cometmq.cli.sending import LineSource, Sender, SendOptions

    for name in ("tags", "keys", "ordering_key"):
        if options[name] and options[f"{name}_from"]:
            raise click.UsageError("a value for all and one out of each line: choose one of them")
    if options["queue"] is not None and (options["ordering_key"] or options["ordering_key_from"]):
        raise click.UsageError("--queue and an ordering key both say which queue: choose one")
    settings = SendOptions.from_command_line(topic, options)
    Sender(settings, output).run(LineSource(files or ("-",)))


@click.command()
@click.option("-t", "--topic", required=True)
@click.option(
    "--from",
    "start",
    type=position,
    help=f"Where to begin: {positions.HELP} [earliest; with -g: where the group is]",
)
@click.option("-n", "--count", type=click.IntRange(1), help="Stop after so many messages.")
@click.option("--until-end", is_flag=True, help="Stop where the topic ends now.")
@click.option("--tags", default="*", metavar="EXPR", help="Only these: 'paid || refunded'.")
@click.option(
    "--where",
    "sql",
    default="",
    metavar="SQL",
    help="Only these: \"amount > 5 AND TAGS = 'paid'\".",
)
@click.option("--queue", type=click.IntRange(0), help="Only that queue.")
@click.option("-g", "--group", help="Read as a member of a group, and acknowledge.")
@click.option("-f", "--format", "template", metavar="FORMAT", help="What to print of each; below.")
@wait_option
@name_server_option
@output_option
def tail(topic: str, output: str, **options: object) -> None:
    """Print the messages of a topic, and those to come.

    \b
    cometmq msg tail -t HDFS                          # from the beginning, then follow
    cometmq msg tail -t HDFS --from 10min --until-end
    cometmq msg tail -t HDFS --from end -f '%t/%p @%o %T %g %k: %s\\n'
    cometmq msg tail -t HDFS -n 3 -o json | jq .body

    It follows until Ctrl-C, unless -n or --until-end says when to stop. Without -g it belongs to
    no group: it reads every queue, disturbs no consumer and leaves no trace on the broker. What is
    there already comes in the order in which it was stored.

    \b
    FORMAT, as in kcat, printed as it stands: end it with \\n. Default '%s\\n'.
      %s body           %S bytes of it    %k keys           %K bytes of them
      %t topic          %p queue id       %o queue offset   %T store time, ms
      %g tag            %h properties     %i message id     %I offset message id
      %b born host      %% a percent      \\n \\t \\r \\0 \\\\ as in C
    """
    from cometmq.cli.tailing import TailOptions, run_tail

    run_tail(TailOptions.from_command_line(topic, options), output)


@click.command()
@click.argument("message_id", metavar="ID")
@click.option("-t", "--topic", help="Its topic: then ID may be the one that its producer made.")
@click.option("-f", "--format", "template", metavar="FORMAT", help="As for `msg tail`.")
@name_server_option
@output_option
def get(
    message_id: str, topic: str | None, template: str | None, name_server: str, output: str
) -> None:
    """Print the message of an id.

    ID is an offset message id: 32 hexadecimal digits of host, port and physical offset (56 with
    IPv6), as `msg tail -f %I` prints them and RocketMQ's tools do. With -t it may also be the
    message id that its producer made (%i).
    """
    from cometmq.cli.formatting import as_record, compile_format
    from cometmq.cli.output import print_record
    from cometmq.client import Admin

    try:
        with Admin(name_server) as admin:
            message = admin.get_message(message_id, topic=topic)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if template is not None and output != JSON:
        sys.stdout.buffer.write(compile_format(template)(message))
        return
    record = as_record(message)
    if output == JSON:
        print_json(record)
    else:
        print_record(record, output)
