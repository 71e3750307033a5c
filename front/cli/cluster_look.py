"""`cometmq cluster status` and `watch`: how a group stands."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from cometmq.actors.replication.engines.engine import Engine, Watch
from cometmq.actors.replication.engines.errors import EngineError
from cometmq.cli.broker import load
from cometmq.cli.options import output_option
from cometmq.cli.output import JSON, console, fitting, print_json, print_record, print_rows, warn
from cometmq.cluster.changes import changes
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.looking import GroupStatus, Looker, sized
from cometmq.cluster.place import GroupPlace
from cometmq.protocol.errors import CometError, StoreError

LOOK_S: Final = 1.0


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which group; the command gets `place`."""

    @click.option("--store", metavar="DIR", help="A cluster on this machine, of `cluster init`.")
    @click.option("-c", "--config", "file", metavar="FILE", help="The broker.conf of a replica.")
    @click.option("--engine", metavar="URL", help="What keeps the group's record; with --group.")
    @click.option("--group", metavar="NAME", help="The group's name; with --engine.")
    @click.option(
        "--set",
        "pairs",
        multiple=True,
        metavar="KEY=VALUE",
        help="With --engine or -c: how it is spoken to, as groupEngineCaFile=FILE.",
    )
    @wraps(command)
    def with_place(
        *args: Any,
        store: str | None,
        file: str | None,
        engine: str | None,
        group: str | None,
        pairs: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        return command(*args, place=place_of(store, file, engine, group, pairs), **kwargs)

    return with_place


def place_of(
    store: str | None,
    file: str | None,
    engine: str | None,
    group: str | None,
    pairs: Sequence[str] = (),
) -> GroupPlace:
    named = sum((store is not None, file is not None, engine is not None or group is not None))
    if named != 1 or (engine is None) != (group is None):
        raise click.UsageError(
            "one of: a cluster on this machine (--store DIR), the broker.conf of a replica "
            "(-c FILE), or a group (--engine URL --group NAME)"
        )
    if store is not None:
        if pairs:
            raise click.UsageError("--set: a cluster on this machine has its own settings")
        return GroupPlace.of_folder(ClusterFolder(Path(store)))
    settings = load(file, pairs).settings
    if file is not None:
        return GroupPlace.of_settings(settings)
    return GroupPlace(group=group or "", engine=engine or "", access=settings.engine_access)


@contextmanager
def opened(place: GroupPlace) -> Iterator[tuple[Engine, Looker]]:
    with ExitStack() as stack:
        engine = stack.enter_context(place.open())
        yield engine, stack.enter_context(Looker(place, engine))


@click.command()
@place_options
@output_option
def status(place: GroupPlace, output: str) -> None:
    """Show who is master, who is in sync, and why not.

    Of a replica on this machine also its process, and how far its log is; of others what is
    known of them here. It works while any of them are down, or all.

    Exit code 0: messages are taken. 1: they are not, and why.
    """
    with opened(place) as (_, looker):
        found = looker.look()
    if output == JSON:
        print_json(found.as_record())
    else:
        _print(found, output)
    if not found.serves:
        raise CometError(f"group {found.group} takes no messages: {found.why}")


def _print(found: GroupStatus, output: str) -> None:
    record = {
        "group": found.group,
        "epoch": found.epoch,
        "master": found.master,
        "min_in_sync": found.min_in_sync,
        "name_server": found.name_server,
        "engine": found.engine,
    }
    rows = [
        {
            "replica": each.name,
            "role": each.role,
            "in_sync": each.in_sync,
            "epoch": each.epoch,
            "lag_bytes": each.lag_bytes,
            "lag_s": each.lag_s,
            "pid": None if each.pid is None else str(each.pid),
            "address": each.address,
            "why": each.why,
        }
        for each in found.replicas
    ]
    if not sys.stdout.isatty():
        print_rows(rows, output)
        return
    print_record(record, output)
    shown = [
        {
            **{name: row[name] for name in row if name != "why"},
            "lag_bytes": None if row["lag_bytes"] is None else sized(int(str(row["lag_bytes"]))),
        }
        for row in rows
    ]
    terminal = console()
    terminal.print(fitting(shown, terminal, spare=("epoch", "lag_s", "address")))
    for each in found.replicas:
        if each.why:
            click.echo(f"{each.name}: {each.why}")


@click.command()
@place_options
@output_option
def watch(place: GroupPlace, output: str) -> None:
    """Print each change, until Ctrl-C.

    Who is elected, who comes and goes, who joins the in-sync set or leaves it. With -o json a line
    with all of it each time.
    """
    with opened(place) as (engine, looker):
        watched = engine.watch(place.group)
        before: GroupStatus | None = None
        trouble = ""
        while True:
            now, said = _looked(looker)
            if said and said != trouble:
                warn(said)
            trouble = said
            if now is not None:
                before = _tell(before, now, output)
            _wait(watched)


def _looked(looker: Looker) -> tuple[GroupStatus | None, str]:
    """How the group stands; or what is wrong, which may pass."""
    try:
        return looker.look(), ""
    except (EngineError, StoreError, OSError) as error:
        return None, str(error)


def _tell(before: GroupStatus | None, now: GroupStatus, output: str) -> GroupStatus:
    lines = list(changes(before, now))
    if not lines:
        return now
    at = datetime.now().astimezone()
    if output == JSON:
        said = {"time": at.isoformat(), "changes": lines, **now.as_record()}
        click.echo(json.dumps(said))
    else:
        for line in lines:
            click.echo(f"{at:%Y-%m-%d %H:%M:%S} {line}")
    sys.stdout.flush()
    return now


def _wait(watched: Watch) -> None:
    """For a change of the record or of sessions; a process that ends is not told of."""
    poll = select.poll()
    poll.register(watched.fileno(), select.POLLIN)
    if poll.poll(LOOK_S * 1000):
        watched.take()
