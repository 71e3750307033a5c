"""Systems under measurement, by name: CometMQ itself, and its peers."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from cometmq.bench.extra import BenchError
from cometmq.protocol.errors import CometError
from cometmq.protocol.version import install

OWN: Final = "cometmq"
# Ways of our own consumer.
OVER_ZEROMQ: Final = "over ZeroMQ"
SPINNING: Final = "spinning"
PEERS: Final = ("rocketmq", "kafka", "redis", "nats")
NAMES: Final = (OWN, *PEERS)
# Where a system's store can be used without its server: the System of that, and its client.
IN_PROCESS: Final = {OWN: (OWN, "embedded"), "rocketmq": ("rocketmq_store", "java")}
_ALL: Final = (*NAMES, "rocketmq_store")


class Durability(StrEnum):
    """What an acknowledgement promises. Each System says which of its settings that is."""

    PAGE_CACHE = "page cache"  # survives the end of the process
    FSYNC = "fdatasync per acknowledgement"  # survives the power cut


class System(Protocol):
    """A server, with its clients. One is used for one run: start, create, ..., stop.

    May have `fetch()` as well: get what is missing, raise BenchError with what could not be had;
    `unordered`, the modes in which it promises no order within a queue; and `ways`, options of the
    worker for each way that messages may reach a consumer, by what is added to the case's name.
    """

    name: str
    clients: tuple[str, ...]  # kinds of workers; the first is the best official client

    def missing(self) -> str | None:
        """None: it can run. Else one sentence: what could not be had, and the remedy."""

    def start(self, folder: Path, durability: Durability) -> None:
        """Start its processes, with their files below `folder`; return when they serve."""

    def create(self, topic: str, queues: int) -> None: ...

    def command(self, client: str) -> list[str]:
        """The arguments that start a worker process (cometmq.bench.worker)."""

    def endpoint(self) -> dict[str, Any]:
        """What a worker needs to reach it."""

    def processes(self) -> list[int]:
        """The servers' process ids."""

    def version(self) -> str: ...

    def stop(self) -> None:
        """End it and leave nothing, also after a start that failed."""


def system(name: str) -> System:
    """A new System of this name. Raises BenchError for a name that there is not."""
    if name not in _ALL:
        raise BenchError(f"no system {name!r}; there are {', '.join(NAMES)}")
    place = "cometmq.bench.own" if name == OWN else f"cometmq.bench.peers.{name}"
    try:
        module = import_module(place)
    except ModuleNotFoundError as error:
        if error.name == place:
            raise BenchError(f"{name} cannot be measured: {place} is not there") from None
        raise BenchError(
            f"{name} cannot be measured: {error.name} is not installed: {install('bench')}"
        ) from None
    made: System = module.system()
    return made


def usable(name: str) -> System:
    """As `system`, and able to run. Raises BenchError that says what is missing."""
    found = system(name)
    missing = found.missing()
    if missing is not None:
        raise BenchError(f"{name} cannot be measured: {missing}")
    return found


def describe(name: str, *, fetch: bool = False) -> dict[str, str]:
    """A row: what it is, and what it lacks. With `fetch` it first gets what can be got."""
    row = {"system": name, "version": "", "clients": "", "missing": ""}
    try:
        found = system(name)
        if fetch and hasattr(found, "fetch"):
            found.fetch()
        row["clients"] = ", ".join(found.clients)
        row["missing"] = found.missing() or ""
        if not row["missing"]:
            row["version"] = found.version()
    except (CometError, OSError) as error:
        row["missing"] = str(error)
    return row


def describe_all(*, fetch: bool = False) -> list[dict[str, str]]:
    return [describe(name, fetch=fetch) for name in _ALL]
