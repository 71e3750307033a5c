"""The command line: its tree of commands, and what an error or Ctrl-C becomes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from cometmq.cli.interrupts import EXIT_INTERRUPTED, ending_on_ctrl_c
from cometmq.cli.options import LazyGroup
from cometmq.cli.output import complain
from cometmq.protocol.version import VERSION

EXIT_FAILED: Final = 1
EXIT_NOT_REACHABLE: Final = 3
EXIT_PIPE_CLOSED: Final = 141  # as a shell has it for SIGPIPE

_EPILOG: Final = """\
\b
Data goes to standard output, progress and hints to standard error.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nobody answers there,
130 interrupted (Ctrl-C).
"""


class _TopGroup(LazyGroup):
    """Ends quietly when whoever reads our output has enough of it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # What is still buffered goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(EXIT_PIPE_CLOSED)


@click.group(
    cls=_TopGroup,
    entries={
        "broker": ("cometmq.cli.broker", "broker", "Run a broker, with a name server of its own."),
        "namesrv": ("cometmq.cli.broker", "namesrv", "Run a name server alone."),
        "ping": (
            "cometmq.cli.health",
            "ping",
            "Ask whether brokers answer, for health checks.",
        ),
        "stat": ("cometmq.cli.stat", "stat", "Show what a running broker is doing."),
        "topic": ("cometmq.cli.topics", "topic", "Create, change, describe and delete topics."),
        "msg": ("cometmq.cli.messages", "msg", "Send, read and find messages."),
        "group": (
            "cometmq.cli.groups",
            "group",
            "List, describe, change, reset and delete consumer groups.",
        ),
        "cluster": (
            "cometmq.cli.cluster",
            "cluster",
            "Groups of replicas that elect their master, and lose nothing.",
        ),
        "store": ("cometmq.cli.store", "store", "Look at the files of a store, and mend them."),
        "spark": ("cometmq.cli.spark", "spark", "Jobs over stores, archives and running brokers."),
        "config": ("cometmq.cli.config", "config", "Show and explain settings."),
        "bench": ("cometmq.bench.cli", "bench", "Measure CometMQ, and other brokers beside it."),
        "demo": ("cometmq.cli.demo", "demo", "See it work: real lines, two groups, and a kill -9."),
    },
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, message="cometmq %(version)s")
def cli() -> None:
    """CometMQ: a durable message broker for Python, on Apache RocketMQ's own files.

    \b
    cometmq broker                        # in one terminal
    cometmq msg send -t HDFS < HDFS.log   # in another: every line is a message
    cometmq msg tail -t HDFS              # prints them
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command line; its exit code. Errors are told as one line."""
    try:
        code = cli.main(args=arguments, prog_name="cometmq", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # out of the making of a class
            return EXIT_INTERRUPTED
        with ending_on_ctrl_c():  # nobody would catch it here
            code = _code_of(error)
            if code is None:
                raise
            complain("\n".join([str(error), *getattr(error, "__notes__", ())]))
            return code


def _code_of(error: Exception) -> int | None:
    """The exit code of an error that people can understand; None: it is a fault of ours."""
    from cometmq.errors import CometError, NotReachable

    if isinstance(error, NotReachable):
        return EXIT_NOT_REACHABLE
    return EXIT_FAILED if isinstance(error, CometError | OSError) else None
