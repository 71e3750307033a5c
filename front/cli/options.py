"""What several commands have in common: the tree of commands, and options of one meaning."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click

from cometmq.cli.interrupts import ending_on_ctrl_c
from cometmq.cli.output import JSON, TABLE

DEFAULT_NAME_SERVER: Final = "tcp://127.0.0.1:9876"
NAME_SERVER_VARIABLE: Final = "COMETMQ_NAME_SERVER"

# Environment variables that are the command line's own and no settings of a broker.
OWN_VARIABLES: Final = frozenset({NAME_SERVER_VARIABLE})

# A command's module and name there, and its line in the help.
Entry = tuple[str, str, str]


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used.

    Args:
        entries: by name; the help line is the first of the command's docstring, repeated here so
            that the group's help imports none of them.
    """

    def __init__(self, *args: Any, entries: Mapping[str, Entry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, name, _ = entry
        with ending_on_ctrl_c():
            found: click.Command = getattr(import_module(module), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in self.entries.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.entries and not args[0].startswith("-"):
            near = self._near(ctx, args[0])
            meant = f'; did you mean "{near[0]}"?' if near else ""
            raise click.UsageError(f'no such command "{args[0]}"{meant}', ctx)
        return super().resolve_command(ctx, args)

    def _near(self, ctx: click.Context, name: str) -> list[str]:
        """What may have been meant, best first: the same name one group down, or a similar one."""
        from difflib import get_close_matches

        groups = ((group, self.get_command(ctx, group)) for group in self.entries)
        inside = [f"{group} {name}" for group, found in groups if name in _entries_of(found)]
        return inside + get_close_matches(name, list(self.entries))


def _entries_of(command: click.Command | None) -> Mapping[str, Entry]:
    return command.entries if isinstance(command, LazyGroup) else {}


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice([TABLE, JSON]),
    default=TABLE,
    show_default=True,
    help="A table (tab-separated values in a pipe), or JSON.",
)

wait_option = click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for a broker that is not there yet.",
)

name_server_option = click.option(
    "--name-server",
    metavar="HOST:PORT",
    envvar=NAME_SERVER_VARIABLE,
    default=DEFAULT_NAME_SERVER,
    show_default=True,
    show_envvar=True,
    help='Where brokers are looked up; several separated by ";".',
)
