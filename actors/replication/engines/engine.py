"""Interface of the engines that decide the single small record of a broker group.

A group's record names its master and the replicas that are in sync with it. It changes only by
compare-and-set, in an engine that many brokers share: a SQLite file or etcd. An engine also keeps
*sessions*, which say which brokers are alive, and notifies the brokers that *watch* a group.

    engine = open_engine("etcd://a:2379,b:2379,c:2379")
    session = engine.open_session("orders", broker_id=1, ttl_s=2)
    before = engine.get("orders")
    outcome = engine.cas("orders", before and before.version, record)

A call blocks at most for the engine's time-out, so an actor calls from a separate thread.
Descriptors (`Watch.fileno`, `Session.fileno`), which the actor's inbox listens to, report changes.
Handles, sessions and watches are thread-safe. None of them survives a fork: each process opens its
own, and one that is used in another process raises EngineError.

No argument about safety may rest on a session, since a process may be stopped between its look at
the clock and its next action. Fencing by the record's epoch protects acknowledged messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

RECORD_BYTES_MAX: Final = 65_536
BROKER_ID_MAX: Final = 2**63 - 1  # a Java long, as RocketMQ's brokerId
TTL_S_MIN: Final = 0.5
TTL_S_MAX: Final = 60.0
TIMEOUT_S: Final = 2.0  # of a call, unless told otherwise


def now_s() -> float:
    """CLOCK_BOOTTIME in seconds: it goes on while the machine sleeps, and nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stored(NamedTuple):
    """A group's record as the engine has it.

    A version is a positive integer. Those of a group only ever grow, also when the record was
    deleted and made again in between; they do not grow by one.
    """

    record: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The change is made, and survives whatever the engine survives."""

    version: int  # of the record now; of a deletion, below that of any record made later


@dataclass(frozen=True, slots=True)
class Refused:
    """The change is not made and never will be: the version was another one."""

    current: Stored | None  # what was there when it was refused, or later


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer was lost: the change is made, or is not, or will be made yet, once.

    A record that is read unchanged does not say that it failed: it may be on its way. Only once the
    group's version is another one than was expected can it no longer be made; whether it was that
    change shows in the record.
    """

    why: str


Outcome = Applied | Refused | Unknown


@dataclass(frozen=True, slots=True)
class View:
    """A group as it was seen at one moment; it may have changed since."""

    stored: Stored | None
    alive: frozenset[int]  # broker ids with a session
    at_s: float  # `now_s` before the engine was asked: nothing in it is older


class Holding(Enum):
    """Of a session, as far as its holder can know."""

    HELD = "held"  # nobody was told that it has ended
    IN_DOUBT = "in doubt"  # not renewed in time: it may have ended. It may be held again
    LOST = "lost"  # it has ended, for good


class Session(Protocol):
    """Says that a broker is there, until it is closed, its process ends, or it cannot be renewed.

    A thread of the process renews it. Others are told that it has ended at the earliest when its
    time to live has passed since the last renewal; the holder counts from before it asked for that
    renewal. So `holding` is no longer HELD before anybody may act on its end, also in a process
    that was stopped meanwhile: it looks at the clock, not at what its thread has found out.
    """

    group: str
    broker_id: int
    ttl_s: float  # as the engine has granted it: it may round up, and have bounds of its own

    @property
    def holding(self) -> Holding: ...

    def left_s(self) -> float:
        """Seconds for which it is HELD if nothing comes between; 0 if it is not."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read once `holding` has changed, until `clear`."""
        ...

    def clear(self) -> None: ...

    def close(self) -> None:
        """End it; others are told at once if the engine can be reached, else by its time."""
        ...


class Watch(Protocol):
    """Sees the last change of a group's record or sessions; of several in a row perhaps only that.

    What is seen does not go back: versions grow from view to view.
    """

    group: str

    @property
    def view(self) -> View | None:
        """The newest. Its `at_s` grows while the engine can be reached, also without a change.
        None before the first."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read when record or sessions differ from the last `take`."""
        ...

    def take(self) -> View | None:
        """The newest view; the descriptor is quiet until there is another one."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A handle on one engine. Opening it asks nobody: the first call finds out.

    Raises of every call:
        EngineUnreachable: nobody has answered in time; no record was changed. Try again. A session
            that was being opened may be there for its time to live.
        EngineFault: it answered what cannot be: another program, a damaged file, no permission.
        EngineError: the handle is closed, or of another process.
        NameIllegal: of a group; ArgumentIllegal: of another argument.
    """

    where: str  # for messages: what it is and where

    def get(self, group: str) -> Stored | None:
        """The record, linearizable: as it was at one moment during the call."""
        ...

    def cas(self, group: str, expected: int | None, record: bytes) -> Outcome:
        """Put the record there if its version is the expected one; None: if there is no record.

        Raises RecordTooLarge over RECORD_BYTES_MAX; EngineUnreachable only if the change was not
        sent, or is known not to be made.
        """
        ...

    def delete(self, group: str, expected: int) -> Outcome:
        """Remove the record if its version is the expected one. For a group that is given up."""
        ...

    def open_session(self, group: str, broker_id: int, ttl_s: float) -> Session:
        """Be there. Raises SessionHeld while another session of that id lives: that of a broker
        that was killed does for its time to live."""
        ...

    def alive(self, group: str) -> frozenset[int]:
        """The ids of all brokers of the group that have a session, linearizable."""
        ...

    def watch(self, group: str) -> Watch:
        """See changes of the group, from now on; the first view comes without one."""
        ...

    def close(self) -> None:
        """Ends its sessions and watches too. A second time does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
