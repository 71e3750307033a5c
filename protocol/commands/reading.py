"""Reading: commands to the reader processes, of pulls, of queues, searches, mapped stores."""

from __future__ import annotations

from typing import Annotated, Final

from cometmq.protocol.commands.root import (
    EVERY,
    Answer,
    Command,
    Part,
    ServedBy,
    Since,
    by_clients,
    describe,
    read,
)
from cometmq.protocol.integers import INT64_MAX, Int32, Int64, UInt64


class PullMessages(Command, frozen=True, tag=20):
    """Messages of one queue from `queue_offset` on. RocketMQ PULL_MESSAGE. -> PullResult."""

    access = by_clients(read("topic"), later=True, served_by=ServedBy.EVERY)

    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_count: Int64 = 1024
    max_bytes: Int64 = 1_048_576
    suspend_ms: Int64 = 0  # how long an empty answer may wait for a message
    tags: str = "*"  # tag expression; the reader compares hashes, the client the text
    check_crc: bool = True  # False: damaged records come too, whoever asks finds them himself
    sql: Annotated[str, Since("0.2.0")] = ""  # SQL92 expression; "": none


class PullStatus:
    """RocketMQ GetMessageStatus, as far as a client can act on it."""

    FOUND: Final = 0
    NO_MATCHED_MESSAGE: Final = 1  # go on at next_queue_offset
    NO_NEW_MESSAGE: Final = 2  # the end of the queue
    OFFSET_MOVED: Final = 3  # outside [min, max]: go on at next_queue_offset


class PullResult(Answer, frozen=True, tag=21):
    """With FOUND the payload frame holds `count` records as they lie in the CommitLog."""

    status: Int32
    next_queue_offset: Int64
    min_queue_offset: Int64
    max_queue_offset: Int64
    count: Int64 = 0
    # The messages lie so far back that a slave had better be asked for the next ones. RocketMQ
    # suggestWhichBrokerId.
    far_behind: Annotated[bool, Since("0.2.0")] = False
    # Number of the broker's run. With another one the broker may have lost messages that were
    # read: its store may have been restored from a backup. 0: not known.
    run: Annotated[Int64, Since("0.2.0")] = 0


class GetQueueRange(Command, frozen=True, tag=22):
    """-> QueueRange"""

    access = by_clients(describe("topic"), later=True, served_by=ServedBy.EVERY)

    topic: str
    queue_id: Int32


class QueueRange(Answer, frozen=True, tag=23):
    min_queue_offset: Int64
    max_queue_offset: Int64


class SearchOffset(Command, frozen=True, tag=24):
    """The first message stored at or after a time (`upper`: last at or before). -> FoundOffset"""

    access = by_clients(describe("topic"), later=True, served_by=ServedBy.EVERY)

    topic: str
    queue_id: Int32
    timestamp_ms: Int64
    upper: bool = False


class FoundOffset(Answer, frozen=True, tag=25):
    queue_offset: Int64


class GetMessageAt(Command, frozen=True, tag=26):
    """The record at a physical offset. -> PullResult with one record, or Failed(22)."""

    access = by_clients(read(EVERY), later=True, served_by=ServedBy.EVERY)

    physical_offset: Int64


class QueryMessages(Command, frozen=True, tag=27):
    """Messages of a topic that have a key, and were stored in a range of time. -> QueryResult.

    Of those the newest, oldest first. RocketMQ QUERY_MESSAGE; times are exact here.
    """

    access = by_clients(read("topic"), later=True, served_by=ServedBy.EVERY)

    topic: str
    key: str
    max_count: Int64 = 64
    begin_ms: Int64 = 0  # store time, inclusive
    end_ms: Int64 = INT64_MAX  # inclusive
    unique: bool = False  # the key is the message's UNIQ_KEY; else one of its KEYS
    # A physical offset: only messages before it.
    below: Annotated[Int64, Since("0.2.0")] = INT64_MAX


class QueryResult(Answer, frozen=True, tag=28):
    """The payload frame holds `count` records as they lie in the CommitLog; none with 0.

    One answer holds at most 1,024 records, or 4 MiB of them, and is given after 65,536 entries of
    the index were looked at.
    """

    count: Int64
    indexed_physical_offset: Int64  # what lies behind it cannot be found yet
    end_physical_offset: Int64  # the log's end
    # A physical offset: older ones may be found with that `below`; 0 = no.
    more_below: Annotated[Int64, Since("0.2.0")] = 0


class QueueKey(Part, frozen=True):
    topic: str
    queue_id: Int32


class DescribeQueues(Command, frozen=True, tag=50):
    """How far many queues reach, and whose they are. -> QueueRanges, in the order asked for.

    With `durable` a queue ends before its first message that a loss of power could still take.
    """

    access = by_clients(describe("queues.topic"), later=True, served_by=ServedBy.EVERY)

    queues: list[QueueKey]
    durable: bool = False


class QueueReach(Part, frozen=True):
    min_queue_offset: Int64
    max_queue_offset: Int64


class QueueRanges(Answer, frozen=True, tag=51):
    """A queue that does not exist, or never held anything, has (0, 0)."""

    store_id: str  # of the store directory, see shm/state/identity.py; "-" if it has none
    ranges: list[QueueReach]
    segment_bytes: Int64 = 0  # of a CommitLog segment


class SearchOffsets(Command, frozen=True, tag=54):
    """`SearchOffset` for many queues. -> FoundOffsets, in the order asked for."""

    access = by_clients(describe("queues.topic"), later=True, served_by=ServedBy.EVERY)
    new_in = "0.2.0"

    queues: list[QueueKey]
    timestamp_ms: Int64
    upper: bool = False


class FoundOffsets(Answer, frozen=True, tag=55):
    queue_offsets: list[Int64]


class MeasureQueue(Command, frozen=True, tag=52):
    """Where parts of [begin, end) of a queue begin that hold so many bytes or messages at most.

    A part has one message at least. -> QueueParts
    """

    access = by_clients(describe("topic"), later=True, served_by=ServedBy.EVERY)

    topic: str
    queue_id: Int32
    begin: Int64
    end: Int64
    bytes_max: Int64
    count_max: Int64
    marks_max: Int64 = 65_536  # parts after the first; then the answer ends


class QueueParts(Answer, frozen=True, tag=53):
    marks: list[Int64]  # queue offsets at which the second, third ... part begins
    reached: Int64  # below `end`: ask again from here
    size_bytes: Int64  # of the records in [begin, reached)


class ListQueues(Command, frozen=True, tag=56):
    """Every queue that ever held a message, whatever its topic says now: a page. -> QueueList"""

    access = by_clients(describe("topic"), later=True, served_by=ServedBy.EVERY)
    new_in = "0.2.0"

    topic: str = ""  # only that topic's
    after: Int64 = 0  # where the page before ended


class HeldQueue(Part, frozen=True):
    topic: str
    queue_id: Int32
    min_queue_offset: Int64
    max_queue_offset: Int64


class QueueList(Answer, frozen=True, tag=57):
    queues: list[HeldQueue]
    next: Int64 = 0  # where the next page begins; 0: this was the last one


# --- for consumers on the same machine; answered by the first reader ---


class GetLocal(Command, frozen=True, tag=90):
    """Where the store lies, for a client that could map it. -> LocalStore

    Refused with NotMapped unless the client names the boot of this very machine, which who asks
    from elsewhere does not know.
    """

    access = by_clients(read(EVERY), served_by=ServedBy.EVERY)

    boot_id: str


class LocalStore(Answer, frozen=True, tag=91):
    """The store, and which file its control file is: a client believes the file, not the path."""

    path: str
    control_device: UInt64
    control_inode: UInt64
    segment_bytes: Int64
    queue_segment_bytes: Int64
    tail: bool = False  # for clients of 0.1.0; always set
    # The counter (shm/live/control.py) below which messages may be shown.
    cover: Annotated[Int64, Since("0.2.0")] = 2


class AttendQueues(Command, frozen=True, tag=92):
    """A client has the store mapped.

    -> Attended, after `wait_ms`, or as soon as the log begins behind `min_offset`. Refused with
    NotMapped when `nonce` is not what stands in this broker's control file.
    """

    access = by_clients(read(EVERY), later=True, served_by=ServedBy.EVERY)

    nonce: str
    queues: list[QueueKey]  # of clients of 0.1.0; nobody looks at them
    min_offset: Int64 = 0
    wait_ms: Int64 = 0
    # It cannot say that it sleeps (WakeWords): it is woken in any case.
    silent: Annotated[bool, Since("0.2.0")] = False


class Attended(Answer, frozen=True, tag=93):
    min_offset: Int64  # the log begins here
