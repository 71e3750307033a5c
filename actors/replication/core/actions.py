"""What the core wants done, and what it asks its driver. Pure: no I/O.

Whoever drives a `Replica` hands in one event after the other, and carries out what each one
returns: *in order, each action to its end before the next is begun*. If one cannot be carried out
(a sync that fails) the process ends at once; none of the later ones may be done, and nothing may
be sent (rule 10).
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from cometmq.actors.replication.core.frames import AnyFrame, Mark
from cometmq.actors.replication.core.promises import Promises
from cometmq.actors.replication.core.record import GroupRecord


class Service(Enum):
    """What a master does for clients."""

    OPEN = "everything"
    # Its session with the engine may have run out: no invisibility of popped messages, no locks,
    # and no member hears that queues are its own.
    UNSURE = "sends and reads"
    SHORT = "in-sync replicas not enough: reads"
    DEPOSED = "not master: nothing, its session is lost"


class Why(Enum):
    """Why something was refused: a text with the two facts that disagree."""

    OTHER_GROUP = "it is of another group"
    OLD_EPOCH = "it is of epoch {there}, epoch {here} is promised"
    OTHER_SESSION = "it is of session {there}, ours is {here}"
    GAP = "it begins at {there}, our log ends at {here}"
    OVERLAP = "it begins at {there}, our log has all up to {here}"
    WRONG_LENGTH = "it says {there} bytes, {here} came"
    WRONG_CRC = "it says CRC {there}, the bytes have {here}"
    NOT_LEADING = "it is for a master, our epoch was {here} and theirs is {there}"
    UNKNOWN_REPLICA = (
        "the record of version {here} has no such replica, store or incarnation {there}"
    )
    BEYOND_END = "it says {there} is held, our log ends at {here}"
    NOT_THE_MASTER = "it says to lead epoch {there}, our record has epoch {here}"
    BAD_TABLE = "its epoch table does not go onward to epoch {here} and to the log's end at {there}"
    NOT_MARKED = "it says that all up to {there} is the same, which we have not marked up to {here}"
    CURRENT_EPOCH = "it would cut at {there} what the present epoch wrote up to {here}"
    ENGINE_BEHIND = (
        "the record has epoch {there}, {here} is promised: the engine has lost something"
    )


class Action(msgspec.Struct, frozen=True, gc=False):
    """Something to do."""


class Send(Action, frozen=True):
    """A frame to a replica. It may be lost."""

    to: str
    frame: AnyFrame


class Ship(Action, frozen=True):
    """A Bytes frame to a replica: the driver reads the records, checks them, adds length and CRC.

    Records that do not hold are never sent: then the process ends.
    """

    to: str
    epoch: int
    nonce: int
    offset: int
    length: int
    confirm: int


class Append(Action, frozen=True):
    """Write what came with the Bytes frame that this event brought, at the end of the log."""

    offset: int
    length: int


class Truncate(Action, frozen=True):
    """Cut the log to this end, durably. No sync that was begun before is reported after it."""

    to: int


class StartOver(Action, frozen=True):
    """Drop all of the log, of which nothing was ever confirmed; it begins at `at`. Durably."""

    at: int


class Keep(Action, frozen=True):
    """Write the promises durably."""

    promises: Promises


class Get(Action, frozen=True):
    """Read the group's record, linearizably; ends in `learned` with this number."""

    number: int


class Cas(Action, frozen=True):
    """Change the group's record if it still has this version; ends in `cas_applied`, `cas_refused`
    or `cas_unknown` with this ticket. Unknown may still be applied at any later time."""

    ticket: int
    version: int
    record: GroupRecord


class Lead(Action, frozen=True):
    """This replica is the master of a new epoch, which starts at the end of the log.

    Queue offsets are taken from the whole log. From now on `appended` tells what clients bring.
    """

    epoch: int
    start: int


class Serve(Action, frozen=True):
    """What a master does for clients has changed."""

    epoch: int
    service: Service


class StepDown(Action, frozen=True):
    """This replica is no master any more. What was not confirmed is answered "not known".

    Once nothing more is appended, and nobody acts as the master: `stopped` with the log's end.
    """

    epoch: int


class Confirmed(Action, frozen=True):
    """All below is confirmed: may be read, and acknowledged to those who sent it in this epoch."""

    offset: int


class Refuse(Action, frozen=True):
    """Nothing was done with a frame or a record; a line for the log."""

    sender: str
    what: str
    why: Why
    here: int = 0
    there: int = 0

    def __str__(self) -> str:
        facts = self.why.value.format(here=self.here, there=self.there)
        return f"{self.what} of {self.sender} refused: {facts}"


class Stop(Action, frozen=True):
    """This replica ends, and keeps its files; somebody has to look."""

    why: str


class LogView(Protocol):
    """What the core asks of the log, which the driver has at hand. Reading only.

    Where a record does not hold that ends the process, as in Ship: a master with a damaged log must
    not judge those of others.
    """

    def last_record(self, end: int) -> Mark | None:
        """The last whole record before `end`. None: it is not kept, or no record ends there."""

    def whole_records(self, offset: int, end: int, bytes_max: int) -> int:
        """The end of the last record that ends within `bytes_max`; of the first one, if it is
        larger. At most `end`."""
