"""`cometmq ping` and `cometmq broker list`: which brokers there are, and whether they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

from cometmq.cli.options import name_server_option, output_option
from cometmq.cli.output import print_rows
from cometmq.client.routes import Routes
from cometmq.protocol.commands import BrokerEndpoints, Ping, Pong
from cometmq.protocol.errors import CometError, NotReachable

COLUMNS = ("broker", "process", "address", "answers", "ms", "version", "pid", "error")


@click.command()
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True,
    metavar="SECONDS", help="For each answer.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Print nothing: the exit code says it.")
@click.argument("address", metavar="[HOST:PORT]", required=False)
@name_server_option
@output_option
@click.pass_context
def ping(
    context: click.Context,
    timeout: float,
    quiet: bool,
    address: str | None,
    name_server: str,
    output: str,
) -> None:
    """Ask whether brokers answer, for health checks.

    HOST:PORT is their name server's address, as --name-server is.

    Every process that clients talk to is asked. Exit code 0: all answer. 1: some do not. 3: no name
    server answers, or it knows no broker, or none of a broker's processes answers.
    """
    is_given = context.get_parameter_source("name_server") is ParameterSource.COMMANDLINE
    if address is not None and is_given:
        raise click.UsageError(
            f"{address} and --name-server {name_server} are both the name server's address: give "
            "it once"
        )
    routes = Routes(name_server if address is None else address)
    try:
        rows = [
            _row(routes, broker.broker, process, address, timeout)
            for broker in routes.masters(timeout)
            for process, address in processes_of(broker)
        ]
    finally:
        routes.close()
    if not quiet:
        print_rows(rows, output, columns=COLUMNS)
    silent = [row for row in rows if not row["answers"]]
    if len(silent) == len(rows):
        raise NotReachable(f"none of {len(rows)} processes answers within {timeout:g} s")
    if silent:
        raise CometError(
            f"{len(silent)} of {len(rows)} processes do not answer within {timeout:g} s: "
            + ", ".join(f"{row['process']} of {row['broker']}" for row in silent)
        )


def processes_of(broker: BrokerEndpoints) -> Iterator[tuple[str, str]]:
    """Those that clients talk to, and where."""
    yield "commitlog", broker.commitlog
    yield "coordinator", broker.coordinator
    for number, address in enumerate(broker.readers):
        yield f"reader-{number}", address


def _row(
    routes: Routes, broker: str, process: str, address: str, timeout_s: float
) -> dict[str, Any]:
    row = dict.fromkeys(COLUMNS) | {"broker": broker, "process": process, "address": address}
    began = time.monotonic()
    try:
        pong = routes.ask(address, Ping(), Pong, timeout_s, name=process)
    except CometError as error:
        return row | {"answers": False, "error": str(error)}
    ms = round((time.monotonic() - began) * 1000, 1)
    return row | {"answers": True, "ms": ms, "version": pong.version, "pid": pong.pid}


@click.command()
@name_server_option
@output_option
def list_brokers(name_server: str, output: str) -> None:
    """List the brokers that a name server knows."""
    routes = Routes(name_server)
    try:
        found = routes.brokers()
    finally:
        routes.close()
    rows = [
        {
            "broker": each.broker,
            "id": each.broker_id,
            "cluster": each.cluster,
            "commitlog": each.commitlog,
            "coordinator": each.coordinator,
            "readers": each.readers,
        }
        for each in sorted(found, key=lambda each: (each.broker, each.broker_id))
    ]
    print_rows(
        rows, output, columns=("broker", "id", "cluster", "commitlog", "coordinator", "readers")
    )
