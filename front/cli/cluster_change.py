"""`cometmq cluster failover`, `add` and `remove`: what an operator decides about a group."""

from __future__ import annotations

import click

from cometmq.cli.cluster_look import opened, place_options
from cometmq.cli.output import hint
from cometmq.cluster.administration import SERVE_S, FailOver, add, remove, wait_heard
from cometmq.cluster.folder import BROKER_CONF, ClusterFolder
from cometmq.cluster.looking import GroupStatus
from cometmq.cluster.place import GroupPlace


@click.command()
@click.option("--to", metavar="REPLICA", help="Whom to name. [in sync, with the longest log]")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=SERVE_S, show_default=True,
    metavar="SECONDS", help="How long to wait until it serves.",
)  # fmt: skip
@place_options
def failover(to: str | None, timeout: float, place: GroupPlace) -> None:
    """Name another master.

    Only a replica that is in sync and there can be named: it has everything that was acknowledged.
    The former master follows it. Waits until the new one serves, and says how long nobody did.
    """
    with opened(place) as (engine, looker):
        change = FailOver(engine, looker, to)
        was = f", it was {change.was}" if change.was else ""
        named = f"{change.to} is the master of epoch {change.epoch}{was}"
        if change.to not in place.stores:
            click.echo(f"{named}; whether it serves yet is seen on its machine")
            return
        hint(named)
        away_s = change.wait_served(timeout)
        click.echo(f"{change.to} serves; messages were not taken for {away_s:.2f} s")


@click.command("add")
@click.argument("replica")
@click.argument("address", required=False)
@place_options
def add_replica(replica: str, address: str | None, place: GroupPlace) -> None:
    """Add a replica.

    ADDRESS is host:port, where it takes the connections of the others; of a cluster on this
    machine (--store DIR) a free port by default, and its folder and broker.conf are made as well.
    It begins with an empty store, and is in sync once it has everything.
    """
    if place.folder is not None:
        address = place.folder.add(replica, address).address
    elif address is None:
        raise click.UsageError("ADDRESS is needed: where the replica takes others' connections")
    with opened(place) as (engine, _):
        add(engine, place.group, replica, address)
    click.echo(f"{replica} is a replica of {place.group}, at {address}; it is not in sync yet")
    if place.folder is not None:
        from cometmq.cluster.running import run_command

        hint(f"{place.folder.path / replica / BROKER_CONF} is its configuration")
        hint(f"start it: {run_command(place.folder.path, replica)}")
    else:
        hint(
            f"start its broker with an empty store, dLegerSelfId={replica}, and dLegerPeers of all "
            "replicas, itself at the end"
        )


def _is_left_over(folder: ClusterFolder, found: GroupStatus, replica: str) -> bool:
    return found.replica(replica) is None and replica in (each.name for each in folder.replicas)


@click.command("remove")
@click.argument("replica")
@place_options
def remove_replica(replica: str, place: GroupPlace) -> None:
    """Remove a replica.

    Not the master, nor one that the group needs: three stay, and of those in sync as many as must
    have a message. Its broker stops by itself; its files stay.
    """
    with opened(place) as (engine, looker):
        # A former attempt may have come as far as the record, and no further.
        if place.folder is None or not _is_left_over(place.folder, looker.look(), replica):
            wait_heard(looker, replica)
            remove(engine, place.group, replica)
    if place.folder is not None:
        place.folder.remove(replica)
        hint(f"its files stay in {place.folder.path / replica}")
    click.echo(f"{replica} is no replica of {place.group} any more")
