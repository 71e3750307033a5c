"""Inside the family: commands from one process of a broker to another."""

from __future__ import annotations

from cometmq.protocol.commands.administration import Hold
from cometmq.protocol.commands.reading import QueueKey
from cometmq.protocol.commands.root import (
    Answer,
    Command,
    Part,
    ServedBy,
    by_family,
)
from cometmq.protocol.commands.topics import BrokerEndpoints, TopicList
from cometmq.protocol.errors import FlushSlaveTimeout, SlaveNotAvailable
from cometmq.protocol.integers import Int32, Int64


class Finish(Command, frozen=True, tag=4):
    """End in order. -> Done once the work is settled. Taken only from the family itself."""

    access = by_family(served_by=ServedBy.EVERY)


class TopicsChanged(Command, frozen=True, tag=75):
    """Coordinator to commitlog: a page of the topics. -> TopicsKnown"""

    access = by_family(served_by=ServedBy.EVERY)

    topics: TopicList


class EndpointsChanged(Command, frozen=True, tag=71):
    """Supervisor to coordinator: where the processes listen now. -> Done"""

    access = by_family(later=True, served_by=ServedBy.EVERY)

    endpoints: BrokerEndpoints


class BeginRun(Command, frozen=True, tag=176):
    """Ha to supervisor, in a group that elects its master: end all processes but those of the name
    server and of ha, change the log if that is said, and start them again. -> RunBegun once the
    new ones are under way, and nothing of the old ones is left.

    Args:
        epoch: that this replica is the master of; 0: it follows.
        cut_to: the log is cut to this end, durably; -1: it stays.
        begin_at: all of the log is dropped, durably, and it begins there; -1: it stays.
        pid: of the process that orders it. The order of one that has died meanwhile is not carried
            out; 0: it is carried out in any case.
    """

    access = by_family(later=True, served_by=ServedBy.EVERY)

    epoch: Int64
    cut_to: Int64 = -1
    begin_at: Int64 = -1
    pid: Int64 = 0


class RunBegun(Answer, frozen=True, tag=177):
    end: Int64  # of the log, as the old run has left it


class DiskState(Command, frozen=True, tag=72):
    """Cleaner to commitlog: whether writes are taken, and if not, why. -> Done"""

    access = by_family(served_by=ServedBy.EVERY)

    writable: bool
    reason: str = ""


class SetHolds(Command, frozen=True, tag=87):
    """Coordinator to cleaner: these are all the holds there are. -> HoldList

    Each list has a place: a later life of the coordinator has a higher epoch, and within one the
    number grows. One that comes late, when a later one is known, changes nothing.
    """

    access = by_family(served_by=ServedBy.EVERY)

    epoch: Int64
    number: Int64
    holds: list[Hold]


class HoldsWanted(Command, frozen=True, tag=88):
    """Cleaner to coordinator: say SetHolds. -> Done"""

    access = by_family(served_by=ServedBy.EVERY)


class RebuildIndex(Command, frozen=True, tag=74):
    """Reader to dispatcher: that index file is damaged. -> Done"""

    access = by_family(served_by=ServedBy.EVERY)

    file: str


class Cover:
    """How safe what was stored must be before it is answered: the least of what is named.

    A sum of these; WRITTEN alone asks for nothing. POLICY is what the broker's settings promise a
    client's send.
    """

    WRITTEN = 0  # readers may see it; a killed process does not lose it
    FLUSHED = 1  # it is on this machine's disk
    REPLICATED = 2  # as many slaves as inSyncReplicas says have it; refused where none is wanted
    POLICY = -1


class Position(Part, frozen=True, order=True):
    """How far a deriver has come. Numbers count within an epoch; what either is, it says itself: a
    queue's reader may have queue offsets for numbers, in the one epoch 0."""

    epoch: Int64 = 0
    number: Int64 = 0

    def __str__(self) -> str:
        return f"({self.epoch}, {self.number})"


class Derivation(Part, frozen=True):
    """What a deriver says of its records: by which step they came (protocol/derived.py)."""

    deriver: str
    before: Position
    after: Position  # above it
    note: bytes | None = None  # kept with the position; None: as it was


class AppendRecords(Command, frozen=True, tag=76):
    """Any actor to commitlog: store these records, all or none, in this order. -> RecordsAppended

    One payload frame, made by the kernel's InnerEncoder (actors/runtime/inner.py): each record has
    every field of RocketMQ's, for one of `queues`; topics may be the broker's own, and need not be
    known. Records for a queue that a known topic does not have go to one that it has. Together they
    must fit into a segment. If the whole machine fails before the answer, the first of them may be
    stored.

    With `derived` it is a derived write: either all records and the deriver's new position are
    stored, or neither, whatever fails; a repeated one is not stored again. There may be no records.
    Without `derived` and records it is a durability request: it is answered once everything in the
    log is as safe as the ack level demands.

    Raises MessageIllegal, MessageTooLarge; DiskFull, ShuttingDown, SystemBusy,
    ServiceNotAvailable as a send does: then nothing of it is stored. OffsetIllegal where the
    deriver has come to another position than `before`.
    """

    access = by_family(later=True)

    queues: list[QueueKey]
    count: Int64
    cover: Int32 = Cover.POLICY
    derived: Derivation | None = None


class RecordsAppended(Answer, frozen=True, tag=77):
    """The payload frame has two signed 64-bit numbers of this machine's byte order a record: its
    queue offset and its physical offset (`frame.cast("q")`). Empty for what was there already."""

    code: Int32  # 0; or 10, 11, 12: stored, but not covered in time
    store_timestamp_ms: Int64
    text: str = ""
    already: bool = False  # an earlier command has stored it; it was not looked at

    @property
    def is_kept(self) -> bool:
        """Whether it is as safe as this machine makes it. A slave that is late, or away, is told of
        by the `ha` process; the broker does not stop for it."""
        return self.code in (0, SlaveNotAvailable.code, FlushSlaveTimeout.code)


class GetDerived(Command, frozen=True, tag=79):
    """Any actor to commitlog: how far has a deriver come? -> DerivedPosition

    With what it wrote on the way there; under SYNC_FLUSH some of both may not be on the disk yet.
    """

    access = by_family()

    deriver: str


class DerivedPosition(Answer, frozen=True, tag=85):
    """Where the deriver goes on."""

    is_known: bool  # False: it has written nothing, or was forgotten
    position: Position
    note: bytes = b""
