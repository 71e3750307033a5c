"""`cometmq group create|update|delete`: consumer groups and their settings."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from cometmq.cli.options import name_server_option
from cometmq.cli.output import hint
from cometmq.client import Admin
from cometmq.protocol.errors import GroupInUse

_set_option = click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting by RocketMQ's name, such as consumeEnable=false or retryMaxTimes=3; what is no "
    "number or truth value is JSON. May be repeated.",
)


@click.command()
@click.argument("name", metavar="GROUP")
@_set_option
@name_server_option
def create(name: str, pairs: tuple[str, ...], name_server: str) -> None:
    """Create a group.

    One that is there already with these settings stays as it is; with others it is an error, and
    changed by `group update`.
    """
    settings = _settings(pairs)
    with Admin(name_server) as admin:
        admin.create_group(name, settings)
    hint(f"group {name}: created")


@click.command()
@click.argument("name", metavar="GROUP")
@_set_option
@name_server_option
def update(name: str, pairs: tuple[str, ...], name_server: str) -> None:
    """Change settings of a group.

    What is not named stays as it is. `group describe GROUP -o json` shows all of them.
    consumeEnable=false ends consuming: running consumers are told so, and go on when it is true
    again.
    """
    settings = _settings(pairs)
    if not settings:
        raise click.UsageError("nothing is to be changed: --set KEY=VALUE")
    with Admin(name_server) as admin:
        admin.update_group(name, settings)
    hint(f"group {name}: changed")


@click.command()
@click.argument("name", metavar="GROUP")
@click.option("--keep-retry-topic", is_flag=True, help="What is to be delivered again stays.")
@click.option("--force", is_flag=True, help="Although the group has members.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@name_server_option
def delete(name: str, keep_retry_topic: bool, force: bool, yes: bool, name_server: str) -> None:
    """Delete a group, with its progress and retry topic.

    Consumers that run on in spite of --force begin the group anew.
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete group {name}, and its progress?", abort=True, err=True)
    with Admin(name_server) as admin:
        try:
            admin.delete_group(name, force=force, keep_retry_topic=keep_retry_topic)
        except GroupInUse as error:
            raise click.ClickException(f"{error} (--force)") from None
    hint(f"group {name}: deleted")


def _settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise click.UsageError(f"{pair!r}: KEY=VALUE")
        try:
            settings[key.strip()] = json.loads(text)
        except ValueError:
            settings[key.strip()] = text
    return settings
