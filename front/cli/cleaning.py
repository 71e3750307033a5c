"""`cometmq store clean`, `hold`, `release`, `holds`: what running brokers delete, and what not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from cometmq.cli.options import name_server_option, output_option
from cometmq.cli.output import hint, print_rows, warn
from cometmq.client import Admin
from cometmq.client.administration.descriptions import HoldDescription
from cometmq.shm.os.files import segment_name

COLUMNS: Final = ("broker", "name", "physical_offset", "expires", "overridden")

broker_option = click.option("--broker", metavar="NAME", help="On that broker only; else on all.")
hold_argument = click.argument("name", metavar="HOLD")


@click.command()
@broker_option
@name_server_option
@output_option
def clean(broker: str | None, name_server: str, output: str) -> None:
    """Have brokers delete what is old enough, now.

    Segments of the log older than fileReservedTime go, whatever deleteWhen says. Prints each of
    them; the queues and the index follow.
    """
    with _admin(name_server) as admin:
        found = admin.delete_expired(broker=broker)
    rows = [
        {"broker": each.broker, "segment": segment_name(start), "bytes": each.segment_bytes}
        for each in found
        for start in each.segments
    ]
    print_rows(rows, output, columns=("broker", "segment", "bytes"))
    for each in found:
        hint(f"{each.broker}: {len(each.segments)} segments deleted")
        if each.held_by:
            warn(f"{each.broker}: held by {', '.join(each.held_by)}")


@click.command()
@hold_argument
@click.option(
    "--from", "begin", type=click.IntRange(0), default=0, help="Physical offset; else all of it."
)
@click.option("--lease", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="It ends by itself after that time.")  # fmt: skip
@broker_option
@name_server_option
@output_option
def hold(
    name: str, begin: int, lease: float | None, broker: str | None, name_server: str, output: str
) -> None:
    """Keep the log from being deleted, for the time being.

    Nothing at or above a physical offset goes while the hold is there, also after a restart. A
    disk that is fuller than diskSpaceCleanForciblyRatio overrides it.
    """
    with _admin(name_server) as admin:
        found = admin.place_hold(name, begin, lease_s=lease, broker=broker)
    _print(found, output)


@click.command()
@hold_argument
@broker_option
@name_server_option
@output_option
def release(name: str, broker: str | None, name_server: str, output: str) -> None:
    """End a hold."""
    with _admin(name_server) as admin:
        if not any(each.name == name and broker in (None, each.broker) for each in admin.holds()):
            names = sorted({each.name for each in admin.holds()})
            there = f"there are {', '.join(names)}" if names else "there is none"
            raise click.ClickException(f"no hold {name}: {there}")
        found = admin.drop_hold(name, broker=broker)
    _print(found, output)


@click.command()
@broker_option
@name_server_option
@output_option
def holds(broker: str | None, name_server: str, output: str) -> None:
    """List what keeps the log from being deleted."""
    with _admin(name_server) as admin:
        found = admin.holds(broker=broker)
    _print(found, output)


@contextmanager
def _admin(name_server: str) -> Iterator[Admin]:
    with Admin(name_server) as admin:
        try:
            yield admin
        except ValueError as error:  # no such broker
            raise click.UsageError(str(error)) from None


def _print(found: Iterable[HoldDescription], output: str) -> None:
    rows = [
        each._asdict() | {"expires": each.expires and each.expires.isoformat(" ", "seconds")}
        for each in found
    ]
    print_rows(rows, output, columns=COLUMNS)
