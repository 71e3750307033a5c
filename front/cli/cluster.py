"""`cometmq cluster`: groups of replicas that elect their master; and one on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cometmq.cli.options import LazyGroup, output_option
from cometmq.cli.output import JSON, hint
from cometmq.cluster.folder import ClusterFolder, pairs_to_settings
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ArgumentIllegal

if TYPE_CHECKING:
    from cometmq.cluster.looking import GroupStatus

GROUP: Final = "cluster"
REPLICAS: Final = 3
MIN_IN_SYNC: Final = 2

_HERE: Final = "cometmq.cli.cluster"
_LOOK: Final = "cometmq.cli.cluster_look"
_CHANGE: Final = "cometmq.cli.cluster_change"


@click.group(
    cls=LazyGroup,
    entries={
        "init": (_HERE, "init", "Make a cluster on this machine, and run it."),
        "run": (_HERE, "run", "Run a cluster that is there, or one replica of it."),
        "status": (_LOOK, "status", "Show who is master, who is in sync, and why not."),
        "watch": (_LOOK, "watch", "Print each change, until Ctrl-C."),
        "failover": (_CHANGE, "failover", "Name another master."),
        "add": (_CHANGE, "add_replica", "Add a replica."),
        "remove": (_CHANGE, "remove_replica", "Remove a replica."),
    },
)
def cluster() -> None:
    """Groups of replicas that elect their master, and lose nothing.

    \b
    cometmq cluster init --store ./try          # in one terminal: three brokers
    cometmq cluster status --store ./try        # in another
    kill -9 -- -PID                             # the master's, as status tells it
    cometmq cluster failover --store ./try --to n0

    --store DIR is a cluster on this machine, as `init` makes it. One on several machines is named
    by the broker.conf of a replica here (-c FILE), or by --engine URL and --group NAME.
    docs/replication.md tells how to set it up.
    """


@click.command()
@click.option("--store", metavar="DIR", required=True, help="All of the cluster; made if need be.")
@click.option(
    "--replicas", type=click.IntRange(3, 15), help=f"How many, from 3 to 15. [{REPLICAS}]"
)
@click.option(
    "--min-in-sync",
    type=click.IntRange(2, 15),
    help=f"How many must have a message before it is acknowledged. [{MIN_IN_SYNC}]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="The name server's; the replicas take the ones behind it. 0: free ones, which stay. [0]",
)
@click.option("--group", metavar="NAME", help=f"The group's name, its brokers' as well. [{GROUP}]")
@click.option(
    "--engine",
    metavar="URL",
    help="Engine that stores the group's record: etcd://host:port,... [SQLite in DIR]",
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting of each one.")
@output_option
def init(
    store: str,
    replicas: int | None,
    min_in_sync: int | None,
    port: int | None,
    group: str | None,
    engine: str | None,
    pairs: tuple[str, ...],
    output: str,
) -> None:
    """Make a cluster on this machine, and run it.

    A name server and three brokers, to be tried out: one machine is still one machine. DIR gets a
    folder for each of them, and one for the engine, which decides who is master. Ctrl-C ends all in
    order; the next time the same DIR goes on with what is there.

    A replica that dies is not started again, so that a kill -9 can be looked at: how to start it is
    printed. For brokers on several machines see docs/replication.md.
    """
    path = Path(store)
    settings = pairs_to_settings(pairs)
    given = {
        "--replicas": replicas, "--min-in-sync": min_in_sync, "--port": port, "--group": group,
        "--engine": engine, "--set": pairs or None,
    }  # fmt: skip
    if ClusterFolder.is_at(path):
        folder = ClusterFolder(path)
        _check_same(folder, given)
        hint(f"{folder.path}: goes on with the cluster that is there")
    else:
        if engine is not None:
            from cometmq.cluster.running import check_new

            access = BrokerSettings.from_keys(settings).engine_access
            check_new(engine, group or GROUP, access)
        folder = ClusterFolder.make(
            path,
            group=group or GROUP,
            replicas=replicas or REPLICAS,
            min_in_sync=min_in_sync or MIN_IN_SYNC,
            port=port or 0,
            engine=engine,
            settings=settings,
        )
    run_all(folder, output)


def _check_same(folder: ClusterFolder, given: Mapping[str, object]) -> None:
    """What was decided when the cluster was made stays."""
    file = folder.file
    port = int(file.name_server.rpartition(":")[2])
    there: dict[str, tuple[object, ...]] = {
        "--replicas": (len(folder.replicas),),
        "--min-in-sync": (file.min_in_sync,),
        "--port": (port, 0),
        "--group": (file.group,),
        "--engine": (file.engine,),
    }
    for option, value in given.items():
        if value is None or value in there.get(option, ()):
            continue
        if option == "--set":
            raise ArgumentIllegal(
                f"--set: the cluster is there already; change {folder.path}/*/broker.conf"
            )
        raise ArgumentIllegal(
            f"{option} {value}: the cluster in {folder.path} has {there[option][0]}; leave it out"
        )


@click.command()
@click.option("--store", metavar="DIR", required=True, help="As `init` has made it.")
@click.argument("replica", required=False)
@output_option
def run(store: str, replica: str | None, output: str) -> None:
    """Run a cluster that is there, or one replica of it.

    Without REPLICA as `init` does. With one, its broker alone, until Ctrl-C: one that has died
    while the others are run elsewhere, or that was added.
    """
    folder = ClusterFolder(Path(store))
    if replica is None:
        run_all(folder, output)
    else:
        run_one(folder, replica, output)


def run_all(folder: ClusterFolder, output: str) -> None:
    from cometmq.actors.replication.engines.opening import open_engine
    from cometmq.cluster.running import ClusterRun, ensure_formed

    with open_engine(folder.file.engine, access=folder.engine_access) as engine:
        ensure_formed(folder, engine)
        hint(f"starting {len(folder.replicas)} replicas in {folder.path}; Ctrl-C ends them")
        ClusterRun(folder, engine, say, lambda status: _announce(folder, status, output)).run()


def say(line: str) -> None:
    """With the time, on standard error."""
    hint(f"{datetime.now():%H:%M:%S} {line}")


def _announce(folder: ClusterFolder, status: GroupStatus, output: str) -> None:
    """Messages are taken, for the first time."""
    server = status.name_server
    if output == JSON:
        ready = {
            "name_server": server,
            "group": status.group,
            "master": status.master,
            "epoch": status.epoch,
            "store": str(folder.path),
            "pid": os.getpid(),
        }
        click.echo(json.dumps(ready))
        return
    where = server.removeprefix("tcp://")
    click.echo(
        f"the cluster is ready: name server {server}, master {status.master}; "
        f"try: echo hello | cometmq msg send -t greetings --name-server {where}"
    )


def run_one(folder: ClusterFolder, name: str, output: str) -> None:
    from cometmq.actors.launch.supervisor import run_broker

    folder.replica(name)

    def ready(_actor: object) -> None:
        if output == JSON:
            click.echo(json.dumps({"replica": name, "pid": os.getpid()}))
        else:
            click.echo(f"{name} runs, process {os.getpid()}; Ctrl-C ends it")

    run_broker(folder.settings_of(name), ready)
