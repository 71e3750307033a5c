"""`cometmq broker` and `cometmq namesrv`: the commands that serve until they are told to end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cometmq.cli.options import DEFAULT_NAME_SERVER, OWN_VARIABLES, LazyGroup, output_option
from cometmq.cli.output import JSON, hint, warn
from cometmq.conf import BrokerSettings, Loaded, load_settings

if TYPE_CHECKING:
    from cometmq.actors.launch.broker import BrokerActor

_DEFAULTS = BrokerSettings()
NAMESRV_DESCRIPTORS: Final = 40  # ZeroMQ's, those that it keeps for bad times, the first clients'


def load(file: str | None, pairs: Iterable[str]) -> Loaded:
    """Settings from all sources, with every warning told on standard error."""
    environment = {key: value for key, value in os.environ.items() if key not in OWN_VARIABLES}
    loaded = load_settings(file, environment=environment, pairs=pairs)
    for warning in loaded.warnings:
        warn(warning)
    return loaded


def pairs_of(options: Mapping[str, object | None], pairs: Iterable[str]) -> list[str]:
    """What options of their own say, behind `--set`, which they overrule."""
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*pairs, *given]


def with_store_of_port(loaded: Loaded) -> BrokerSettings:
    """A broker on another port has another store, unless somebody says which."""
    settings, port = loaded.settings, loaded.settings.port
    if port in (0, _DEFAULTS.port) or "storePathRootDir" in loaded.origins:
        return settings
    return replace(settings, store_path_root_dir=Path(f"store-{port}"))


def with_sizes_of_store(settings: BrokerSettings, origins: Collection[str]) -> BrokerSettings:
    """The sizes of segments are those of the store's files, unless somebody says which."""
    from cometmq.shm.tools.start_checks import sizes_there

    sizes = sizes_there(settings.store_path_root_dir)
    keys = {key: size for key, size in sizes.items() if key not in origins}
    return BrokerSettings.from_keys({**settings.as_keys(), **keys}) if keys else settings


@click.group(
    cls=LazyGroup,
    entries={
        "list": (
            "cometmq.cli.health",
            "list_brokers",
            "List the brokers that a name server knows.",
        ),
    },
    invoke_without_command=True,
)
@click.option("-c", "--config", "file", metavar="FILE", help="A broker.conf, RocketMQ's or ours.")
@click.option("--store", metavar="DIR", help="The store; made if it is not there. [./store]")
@click.option("--port", type=click.IntRange(0, 65535), help="The name server's. [9876]")
@click.option("--name-server", metavar="HOST:PORT", help="Register there; start none.")
@click.option("--log-file", metavar="FILE", help="Log there, with rotation. [standard error]")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any other setting.")
@output_option
@click.pass_context
def broker(
    context: click.Context,
    file: str | None,
    store: str | None,
    port: int | None,
    name_server: str | None,
    log_file: str | None,
    pairs: tuple[str, ...],
    output: str,
) -> None:
    """Run a broker, with a name server of its own.

    It needs no configuration, and takes RocketMQ's broker.conf as it stands; keys that it does not
    know are named in a warning. `cometmq config show` tells what is in effect.

    It listens on loopback: --set bindAddress=0.0.0.0 --set brokerIP1=ADDRESS opens it to others.
    The name server has the port, and the broker's other processes the ones behind it; --port 0
    takes whatever is free. A second broker on the machine needs another --port only: its store is
    then ./store-PORT.

    Ctrl-C, SIGTERM or SIGHUP ends it in order: settings are read at the start alone, topics and
    groups are changed by commands. SIGUSR1 has it write what it is doing to its log (the counters,
    and where every thread of every process is to standard error); SIGUSR2 does nothing.
    """
    if context.invoked_subcommand is not None:
        return
    from cometmq.actors.launch.supervisor import run_broker

    options = {
        "storePathRootDir": store,
        "port": port,
        "namesrvAddr": name_server,
        "logFile": log_file,
    }
    loaded = load(file, pairs_of(options, pairs))
    settings = with_sizes_of_store(with_store_of_port(loaded), loaded.origins)
    run_broker(settings, lambda actor: _announce(actor, settings, output))


def _announce(actor: BrokerActor, settings: BrokerSettings, output: str) -> None:
    """In the broker's own thread, once it serves."""
    ready: dict[str, Any] = {
        "broker": actor.endpoints.broker,
        "store": str(settings.store_path_root_dir.absolute()),
        "name_server": actor.public_name_server,
        "pid": os.getpid(),
    }
    if output == JSON:
        click.echo(json.dumps(ready))
        return
    server = ready["name_server"]
    where = "" if server == DEFAULT_NAME_SERVER else f" --name-server {server}"
    click.echo(
        f"broker {ready['broker']} is ready: store {ready['store']}, name server {server}, "
        f"pid {ready['pid']}; try: echo hello | cometmq msg send -t greetings{where}"
    )


@click.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9876, show_default=True)
@output_option
def namesrv(bind: str, port: int, output: str) -> None:
    """Run a name server alone.

    Brokers register with it when they are started with --name-server HOST:PORT; clients ask it
    where they are. What it knows is in memory only: after a restart the brokers tell it again,
    within half a minute. Port 0 takes one that is free.
    """
    import zmq

    from cometmq.actors.coordination.namesrv import NameServerActor
    from cometmq.actors.launch.addresses import bracketed
    from cometmq.actors.launch.binding import port_holder
    from cometmq.actors.launch.zygote import say_stacks_on_signal
    from cometmq.actors.runtime.listeners.connections import ConnectionLimits
    from cometmq.actors.runtime.logs import set_up_logging
    from cometmq.protocol.commands import Finish
    from cometmq.protocol.wire.descriptors import need
    from cometmq.shm.os.libc import name_thread

    need(NAMESRV_DESCRIPTORS, "a name server")
    settings = load(None, ()).settings
    set_up_logging("namesrv", settings)
    name_thread("cmq-namesrv")
    try:
        server = NameServerActor.start(
            bind=[(f"tcp://{bracketed(bind)}:{port or '*'}", False)],
            limits=ConnectionLimits.of(settings),
        )
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise click.ClickException(
                f"--bind {bind} --port {port}: cannot listen there: {error}"
            ) from None
        holder = port_holder(port)
        raise click.ClickException(
            f"port {port} is taken by {holder}; choose another with --port"
        ) from None
    actor = server._actor_weakref()
    assert actor is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: server.tell(Finish()))
    say_stacks_on_signal()
    _announce_name_server(actor.addresses[0], output)
    actor.ended.wait()
    zmq.Context.instance().destroy(linger=200)


def _announce_name_server(address: str, output: str) -> None:
    if output == JSON:
        click.echo(json.dumps({"name_server": address, "pid": os.getpid()}))
        return
    click.echo(f"name server {address} is ready, pid {os.getpid()}")
    hint(f"start a broker: cometmq broker --name-server {address}")
