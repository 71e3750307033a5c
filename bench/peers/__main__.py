"""`python -m cometmq.bench.peers fetch [NAMES]`."""

from __future__ import annotations

import sys

import click

from cometmq.bench.peers import fetch
from cometmq.bench.systems import PEERS


@click.group()
def peers() -> None:
    """Other brokers to be measured beside CometMQ."""


@peers.command("fetch")
@click.argument("names", nargs=-1, type=click.Choice(PEERS))
def fetch_command(names: tuple[str, ...]) -> None:
    """Get what is missing. Exit code 1 when something could not be had."""
    found = fetch(names or PEERS, lambda text: click.echo(text, err=True))
    for name, missing in found.items():
        click.echo(f"{name}\t{missing or 'ready'}")
    if any(found.values()):
        sys.exit(1)


if __name__ == "__main__":
    peers()
