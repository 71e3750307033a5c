"""`cometmq config`: what is set, and what it means."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from cometmq.cli.broker import load
from cometmq.cli.options import LazyGroup, output_option
from cometmq.cli.output import print_record, print_rows
from cometmq.conf import Origin, explain_option, explain_options, show_settings

_HERE: Final = "cometmq.cli.config"


@click.group(
    cls=LazyGroup,
    entries={
        "show": (_HERE, "show", "Show the settings a broker would run with."),
        "explain": (_HERE, "explain", "Explain a setting, or all of them in a line each."),
    },
)
def config() -> None:
    """Show and explain settings.

    Of these the later wins: the default, a broker.conf, the environment (COMETMQ_FLUSH_DISK_TYPE
    for flushDiskType), --set.
    """


@click.command()
@click.option("-c", "--config", "file", metavar="FILE", help="A broker.conf, RocketMQ's or ours.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="As for `broker`.")
@click.option("--changed", is_flag=True, help="Only what is not left at its default.")
@output_option
def show(file: str | None, pairs: tuple[str, ...], changed: bool, output: str) -> None:
    """Show the settings a broker would run with.

    And who set each: a default, a line of the file, the environment, or --set.
    """
    loaded = load(file, pairs)
    rows = [
        {
            "key": setting.key,
            "value": setting.value,
            "readable": setting.readable,
            "set_by": setting.place or setting.origin.value,
        }
        for setting in show_settings(loaded.settings, loaded.origins)
        if not changed or setting.origin is not Origin.DEFAULT
    ]
    print_rows(rows, output, columns=("key", "value", "readable", "set_by"))


@click.command()
@click.argument("key", required=False)
@output_option
def explain(key: str | None, output: str) -> None:
    """Explain a setting, or all of them in a line each.

    KEY is RocketMQ's spelling, the one in Python, or the environment variable.
    """
    if key is not None:
        print_record(msgspec.structs.asdict(explain_option(key)), output, title=key)
        return
    rows = [
        {"key": each.key, "default": each.default_readable, "meaning": each.help}
        for each in explain_options()
    ]
    print_rows(rows, output)
