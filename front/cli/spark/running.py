"""What the commands of `cometmq spark` share: options, a session, errors, progress, summaries."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cometmq.cli.output import complain, hint, print_record
from cometmq.cli.progress import Progress, progress
from cometmq.cli.spark.shown import plain, print_summary
from cometmq.protocol.version import install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_FINDINGS: Final = 1
EXIT_FAILED: Final = 3
ASIDE: Final = f"{__name__}.aside"  # in click's context: the file with what a JVM says
ASIDE_MAX: Final = 1 << 20
STDERR: Final = 2


def job(function: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong is one line and exit code 3."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            text = text_of(error)
            if text is None:
                show_aside()
                raise
            complain(text)
            raise SystemExit(EXIT_FAILED) from None

    return run


def text_of(error: Exception) -> str | None:
    """None: it is a fault of ours, or no concern of this module."""
    from cometmq.errors import CometError

    if isinstance(error, ModuleNotFoundError) and error.name in ("pyspark", "pyarrow"):
        return f"{error.name} is needed for this: {install('spark')}"
    if isinstance(error, CometError | OSError):
        return str(error)
    if "pyspark" not in sys.modules:
        return None
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException):
        return None
    if "JAVA_GATEWAY_EXITED" in str(error):
        return (
            "Spark did not start: it needs Java 17 (set JAVA_HOME, or PATH), and to know what "
            "--master and --conf say"
        )
    return _cause_of(str(error))


def _cause_of(text: str) -> str:
    """What our own code said in a worker, out of the traces around it."""
    ours = [line.strip() for line in text.splitlines() if line.strip().startswith("cometmq.")]
    return ours[-1].split(": ", 1)[-1] if ours else text.strip().splitlines()[0]


def session_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Of Spark; repeatable."),
        click.option("--driver-memory", default="1g", show_default=True, help="Of Spark's JVM."),
        click.option("--master", default="local[*]", show_default=True, help="Where Spark runs."),
    ):
        function = option(function)
    return function


def source_options(function: Callable[..., None]) -> Callable[..., None]:
    return click.option("-t", "--topic", "topics", multiple=True, help="Repeatable; else all.")(
        store_options(function)
    )


def store_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--name-server", metavar="HOST:PORT", help="Read from running brokers."),
        click.option("--store", type=click.Path(path_type=Path), help="Read a store's files."),
    ):
        function = option(function)
    return function


def source_of(store: Path | None, name_server: str | None, topics: Sequence[str]) -> dict[str, str]:
    """Options of the source `cometmq`."""
    what = {"subscribe": ",".join(topics)} if topics else {"subscribePattern": ".*"}
    return where_of(store, name_server) | what


def where_of(store: Path | None, name_server: str | None) -> dict[str, str]:
    """The same, without topics."""
    if (store is None) == (name_server is None):
        raise click.UsageError("say what to read: --store DIR or --name-server HOST:PORT")
    where = {"store": str(store)} if store is not None else {"namesrv": str(name_server)}
    return {**where, "isolation": "dispatched"}


def session_of(master: str, driver_memory: str, conf: Sequence[str]) -> SparkSession:
    given: dict[str, str] = {}
    for each in conf:
        key, separator, value = each.partition("=")
        if not separator:
            raise click.UsageError(f"--conf {each}: KEY=VALUE is wanted")
        given[key] = value
    # Spark's own launcher warns of a name that leads to the loopback.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from cometmq.spark import session

    wanted = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": driver_memory,
        "spark.sql.session.timeZone": "UTC",
        **given,
    }
    context = click.get_current_context()
    if "spark.log.level" in given:  # who names one wants to see what is logged
        made = session(master, conf=wanted)
    else:
        try:
            with _aside(context):
                made = session(master, conf=wanted)
        except Exception:
            show_aside()
            raise
        made.sparkContext.setLogLevel("FATAL")  # what fails is told of by us, in one sentence
    return made


@contextmanager
def _aside(context: click.Context) -> Iterator[None]:
    """Who starts within has a file as its standard error, as long as it lives: the greeting of a
    JVM, and what its workers complain of when it ends, are nobody's concern."""
    said = context.meta[ASIDE] = context.with_resource(tempfile.TemporaryFile())  # noqa: SIM115
    ours = os.dup(STDERR)
    sys.stderr.flush()
    os.dup2(said.fileno(), STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, STDERR)
        os.close(ours)


def show_aside() -> None:
    """Where that is needed after all: Spark did not come up, or the fault is one of ours."""
    said = click.get_current_context().meta.pop(ASIDE, None)
    if said is not None:
        hint("Spark said:")
        # Not read(): the place in the file is the JVM's too.
        click.echo(os.pread(said.fileno(), ASIDE_MAX, 0), err=True, nl=False)


def tasks(what: str, unit: str = "segments") -> AbstractContextManager[Progress]:
    """Tells what is done and what is left, as all commands do that take long."""
    return progress(what, unit, per=1)


def summary(done: object, output: str) -> None:
    """Print the struct that a job returned."""
    print_summary(plain(done), output)


def plan(record: Mapping[str, Any], output: str) -> None:
    print_record({"dry_run": True, **record}, output)
