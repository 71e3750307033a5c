"""Every command and answer on ZeroMQ, declared once.

A command is a MessagePack array whose first element is its tag. Fields are only ever added, at the
end, with a default: an older sender gets the default, an older receiver ignores the rest. What a
command carries in bulk (batches, records) travels in frames of its own behind it.

Names in `-> X` say which answer comes back; every command may be answered by `Failed` instead.
"""

from __future__ import annotations

from typing import Final

import msgspec

PROTOCOL_VERSION: Final = 1


class Command(msgspec.Struct, frozen=True, array_like=True):
    """The root of all commands and answers."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A structure inside a command."""


# --- everybody ---------------------------------------------------------------------------------


class Failed(Command, frozen=True, tag=0):
    """The typed error of any command: `errors.from_code(code, text)`."""

    code: int
    text: str


class Done(Command, frozen=True, tag=1):
    """The plain yes."""


class Ping(Command, frozen=True, tag=2):
    """Is anybody there? -> Pong. Answered by every process."""


class Pong(Command, frozen=True, tag=3):
    role: str
    pid: int
    version: str


class Finish(Command, frozen=True, tag=4):
    """End in order. -> Done once the work is settled. Taken only from the family itself."""


class GetStatistics(Command, frozen=True, tag=5):
    """-> Statistics. Answered by every process."""


class Statistics(Command, frozen=True, tag=6):
    role: str
    values: dict[str, int | float | str]


# --- sending: the commitlog process --------------------------------------------------------------


class Section(Part, frozen=True):
    """One batch for one queue: its elements stand in the payload frame of the same index."""

    topic: str
    queue_id: int
    count: int
    sys_flag: int = 0
    wait: bool = True  # False: answer without waiting for flush or replica (RocketMQ's WAIT)


class SendMessages(Command, frozen=True, tag=10):
    """Store batches, one payload frame a section, in RocketMQ's batch body layout.

    -> SendResult, one entry a section. A section is stored whole or not at all; but when the whole
    broker is killed before the answer, the first messages of a section may be found stored.
    """

    sections: list[Section]
    born_timestamp_ms: int
    born_host: str = ""  # "ip:port"; empty: unknown, stored as 0.0.0.0:0
    oneway: bool = False  # no answer is wanted


class SectionResult(Part, frozen=True):
    code: int  # 0 = stored; 10 = stored, but not yet on the disk; else an error's code
    queue_offset: int = -1  # of the first message; the others follow
    physical_offset: int = -1  # of the first message
    text: str = ""


class SendResult(Command, frozen=True, tag=11):
    results: list[SectionResult]
    store_timestamp_ms: int = 0
    store_host: str = ""


# Staged: batches that nobody sees until one command stores all of them, once. A *sink* numbers its
# commits by epochs; what it sends for one lies in stages, a stage for each attempt of each task.


class StageMessages(Command, frozen=True, tag=12):
    """Put batches behind the `first` ones that a stage has, one payload frame a section. -> Done

    A stage is made by its first batch. What it has already is passed over, so that a command whose
    answer was lost may come again. What is not committed is dropped after `stagedLease`.
    """

    sink: str
    epoch: int
    stage: str
    first: int
    sections: list[Section]
    born_timestamp_ms: int
    born_host: str = ""


class CloseStage(Command, frozen=True, tag=13):
    """The stage is whole with so many batches. -> Done, once it is on the disk."""

    sink: str
    epoch: int
    stage: str
    batches: int


class CommitStages(Command, frozen=True, tag=14):
    """Store what these closed stages hold, all of it, once. -> StagesCommitted

    An epoch that is not above the last one that was committed is not stored again. All other
    stages of this epoch and of those before are dropped.
    """

    sink: str
    epoch: int
    stages: list[str]


class StagesCommitted(Command, frozen=True, tag=15):
    already: bool  # by an earlier command; these stages were not looked at
    messages: int = 0


class DropStages(Command, frozen=True, tag=16):
    """Forget stages that will not be committed; a stage that is not there is no error. -> Done"""

    sink: str
    epoch: int
    stages: list[str]


# --- reading: the reader processes ----------------------------------------------------------------


class PullMessages(Command, frozen=True, tag=20):
    """Messages of one queue from `queue_offset` on. RocketMQ PULL_MESSAGE. -> PullResult."""

    topic: str
    queue_id: int
    queue_offset: int
    max_count: int = 1024
    max_bytes: int = 1_048_576
    suspend_ms: int = 0  # how long an empty answer may wait for a message
    tags: str = "*"  # tag expression; the reader compares hashes, the client the text
    check_crc: bool = True  # False: damaged records come too, whoever asks finds them himself


class PullStatus:
    """RocketMQ GetMessageStatus, as far as a client can act on it."""

    FOUND: Final = 0
    NO_MATCHED_MESSAGE: Final = 1  # go on at next_queue_offset
    NO_NEW_MESSAGE: Final = 2  # the end of the queue
    OFFSET_MOVED: Final = 3  # outside [min, max]: go on at next_queue_offset


class PullResult(Command, frozen=True, tag=21):
    """With FOUND the payload frame holds `count` records as they lie in the CommitLog."""

    status: int
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    count: int = 0


class GetQueueRange(Command, frozen=True, tag=22):
    """-> QueueRange"""

    topic: str
    queue_id: int


class QueueRange(Command, frozen=True, tag=23):
    min_queue_offset: int
    max_queue_offset: int


class SearchOffset(Command, frozen=True, tag=24):
    """The first message stored at or after a time (`upper`: last at or before). -> FoundOffset"""

    topic: str
    queue_id: int
    timestamp_ms: int
    upper: bool = False


class FoundOffset(Command, frozen=True, tag=25):
    queue_offset: int


class GetMessageAt(Command, frozen=True, tag=26):
    """The record at a physical offset. -> PullResult with one record, or Failed(22)."""

    physical_offset: int


class QueryMessages(Command, frozen=True, tag=27):
    """Messages of a topic that have a key, and were stored in a range of time. -> QueryResult.

    Of those the newest, oldest first. RocketMQ QUERY_MESSAGE; times are exact here.
    """

    topic: str
    key: str
    max_count: int = 64
    begin_ms: int = 0  # store time, inclusive
    end_ms: int = (1 << 63) - 1  # inclusive
    unique: bool = False  # the key is the message's UNIQ_KEY; else one of its KEYS


class QueryResult(Command, frozen=True, tag=28):
    """The payload frame holds `count` records as they lie in the CommitLog; none with 0."""

    count: int
    indexed_physical_offset: int  # what lies behind it cannot be found yet
    end_physical_offset: int  # the log's end


class QueueKey(Part, frozen=True):
    topic: str
    queue_id: int


class DescribeQueues(Command, frozen=True, tag=50):
    """How far many queues reach, and whose they are. -> QueueRanges, in the order asked for.

    With `durable` a queue ends before its first message that a loss of power could still take.
    """

    queues: list[QueueKey]
    durable: bool = False


class QueueReach(Part, frozen=True):
    min_queue_offset: int
    max_queue_offset: int


class QueueRanges(Command, frozen=True, tag=51):
    """A queue that does not exist, or never held anything, has (0, 0)."""

    store_id: str  # of the store directory, see shm/identity.py; "-" if it has none
    ranges: list[QueueReach]
    segment_bytes: int = 0  # of a CommitLog segment


class MeasureQueue(Command, frozen=True, tag=52):
    """Where parts of [begin, end) of a queue begin that hold so many bytes or messages at most.

    A part has one message at least. -> QueueParts
    """

    topic: str
    queue_id: int
    begin: int
    end: int
    bytes_max: int
    count_max: int
    marks_max: int = 65_536  # parts after the first; then the answer ends


class QueueParts(Command, frozen=True, tag=53):
    marks: list[int]  # queue offsets at which the second, third ... part begins
    reached: int  # below `end`: ask again from here
    size_bytes: int  # of the records in [begin, reached)


# --- topics, groups, offsets: the coordinator -----------------------------------------------------


class TopicInfo(Part, frozen=True):
    topic: str
    read_queues: int = 8
    write_queues: int = 8
    perm: int = 6  # 4 read, 2 write, 1 inherit


class BrokerEndpoints(Part, frozen=True):
    """Where the processes of one broker listen, as ZeroMQ addresses."""

    cluster: str
    broker: str
    broker_id: int
    commitlog: str
    readers: list[str]
    coordinator: str


class BrokerRoute(Part, frozen=True):
    endpoints: BrokerEndpoints
    info: TopicInfo


class TopicRoute(Command, frozen=True, tag=30):
    """Which brokers serve a topic, and with how many queues."""

    topic: str
    brokers: list[BrokerRoute]


class EnsureTopic(Command, frozen=True, tag=31):
    """The topic's route on this broker; made with defaults if unknown and allowed. -> TopicRoute"""

    topic: str


class CreateTopic(Command, frozen=True, tag=32):
    """Create or change a topic. -> TopicRoute. Queue numbers never shrink below 1."""

    info: TopicInfo


class DeleteTopic(Command, frozen=True, tag=33):
    """-> Done. Its offsets are forgotten; its records stay until they expire."""

    topic: str


class ListTopics(Command, frozen=True, tag=34):
    """-> TopicList"""


class TopicList(Command, frozen=True, tag=35):
    topics: list[TopicInfo]


class Subscription(Part, frozen=True):
    topic: str
    tags: str = "*"


class JoinGroup(Command, frozen=True, tag=40):
    """Join, stay in, or learn the share of a group: membership, heartbeat and assignment in one.

    -> GroupShare, at once when it differs from `version`, else after at most `wait_ms`.
    `owned` names the queues that the member still works on: a queue is given to another member
    only when its owner no longer names it, or has left, or was silent for the session time.
    """

    group: str
    member: str  # unique per consumer
    subscriptions: list[Subscription]
    owned: list[QueueKey] = []
    version: int = -1
    wait_ms: int = 0


class GroupShare(Command, frozen=True, tag=41):
    """The queues that this member owns now. A queue missing here must be given up."""

    version: int
    queues: list[QueueKey]
    members: int
    session_timeout_ms: int


class LeaveGroup(Command, frozen=True, tag=42):
    """-> Done. The member's queues are free at once."""

    group: str
    member: str


class QueueOffset(Part, frozen=True):
    topic: str
    queue_id: int
    queue_offset: int  # the next message to consume


class CommitOffsets(Command, frozen=True, tag=43):
    """Keep a group's progress. -> Done once it survives a kill of the coordinator.

    With a member that does not own one of the queues: NotOwner, and nothing is kept.
    An empty member is an administrator; only that one may move offsets back.
    """

    group: str
    offsets: list[QueueOffset]
    member: str = ""


class FetchOffsets(Command, frozen=True, tag=44):
    """-> GroupOffsets; queue_offset -1 where nothing was ever committed."""

    group: str
    queues: list[QueueKey]


class GroupOffsets(Command, frozen=True, tag=45):
    offsets: list[QueueOffset]


class ListGroups(Command, frozen=True, tag=46):
    """-> GroupList"""


class GroupInfo(Part, frozen=True):
    group: str
    members: list[str]
    topics: list[str]


class GroupList(Command, frozen=True, tag=47):
    groups: list[GroupInfo]


class DescribeGroup(Command, frozen=True, tag=48):
    """-> GroupDescription"""

    group: str


class GroupQueue(Part, frozen=True):
    topic: str
    queue_id: int
    queue_offset: int  # committed; -1 = never
    member: str  # owner, or empty


class GroupDescription(Command, frozen=True, tag=49):
    group: str
    members: list[str]
    subscriptions: list[Subscription]
    queues: list[GroupQueue]


# --- routes: the name server ----------------------------------------------------------------------


class RegisterBroker(Command, frozen=True, tag=60):
    """A broker and all its topics; replaces what it registered before. -> Done. Every 30 s.

    Refused when another live broker has the same name and id at other endpoints.
    """

    endpoints: BrokerEndpoints
    topics: list[TopicInfo]


class UnregisterBroker(Command, frozen=True, tag=61):
    """-> Done"""

    cluster: str
    broker: str
    broker_id: int


class GetRoute(Command, frozen=True, tag=62):
    """-> TopicRoute, or Failed(17). Brokers are listed by name."""

    topic: str


class ListBrokers(Command, frozen=True, tag=63):
    """-> BrokerList"""


class BrokerList(Command, frozen=True, tag=64):
    brokers: list[BrokerEndpoints]


# --- inside the family ----------------------------------------------------------------------------


class TopicsChanged(Command, frozen=True, tag=70):
    """Coordinator to commitlog: all topics that may be written. -> Done"""

    topics: list[TopicInfo]


class EndpointsChanged(Command, frozen=True, tag=71):
    """Supervisor to coordinator: where the processes listen now. -> Done"""

    endpoints: BrokerEndpoints


class DiskState(Command, frozen=True, tag=72):
    """Cleaner to commitlog: whether writes are taken, and if not, why. -> Done"""

    writable: bool
    reason: str = ""


class DeleteSegments(Command, frozen=True, tag=73):
    """Delete what fileReservedTime allows now, whatever the hour. -> DeletedSegments

    Taken by the coordinator, which hands it on to the cleaner; so are the commands on holds.
    RocketMQ DELETE_EXPIRED_COMMITLOG.
    """


class RebuildIndex(Command, frozen=True, tag=74):
    """Reader to dispatcher: that index file is damaged. -> Done"""

    file: str


class WakeSleepers(Command, frozen=True, tag=78):
    """Reader to dispatcher: for so long somebody may sleep on the ends of these queues. -> Done

    The dispatcher wakes him by futex. A topic of "" means the counter `dispatched`.
    """

    queues: list[QueueKey]
    lease_ms: int


# --- cleaning: the coordinator, for the cleaner ---------------------------------------------------


class Hold(Part, frozen=True):
    """Nothing at or above that physical offset is deleted while the hold is there."""

    name: str
    physical_offset: int
    expires_ms: int = 0  # milliseconds since 1970; 0 = never


class PlaceHold(Command, frozen=True, tag=80):
    """Place a hold, or move one of the same name and renew its lease. -> HoldList

    What is deleted already cannot be held: an offset below the log is taken for its beginning.
    """

    name: str
    physical_offset: int = 0
    lease_ms: int = 0  # 0 = until it is dropped
    store_id: str = ""  # refused by a broker whose store is another one; "" = of any


class DropHold(Command, frozen=True, tag=81):
    """-> HoldList. It is no error if there is none."""

    name: str


class ListHolds(Command, frozen=True, tag=82):
    """-> HoldList"""


class HoldList(Command, frozen=True, tag=83):
    """A hold below `min_physical_offset` was overridden: the disk was too full."""

    holds: list[Hold]
    min_physical_offset: int  # the log begins here


class DeletedSegments(Command, frozen=True, tag=84):
    segments: list[int]  # start offsets
    segment_bytes: int
    min_physical_offset: int
    held_by: list[str] = []  # holds that kept more from being deleted


# --- consumers on the same machine: the first reader ----------------------------------------------


class GetLocal(Command, frozen=True, tag=90):
    """Where the store lies, for a client that could map it. -> LocalStore

    Refused with NotMapped unless the client names the boot of this very machine, which who asks
    from elsewhere does not know.
    """

    boot_id: str


class LocalStore(Command, frozen=True, tag=91):
    """The store, and which file its control file is: a client believes the file, not the path."""

    path: str
    control_device: int
    control_inode: int
    segment_bytes: int
    queue_segment_bytes: int
    tail: bool = False  # the writer tells of each queue how far it is written (AppendedTable)


class AttendQueues(Command, frozen=True, tag=92):
    """A client has the store mapped, and may sleep on these queues until it asks again.

    -> Attended, after `wait_ms`, or as soon as the log begins behind `min_offset`. Refused with
    NotMapped when `nonce` is not what stands in this broker's control file.
    """

    nonce: str
    queues: list[QueueKey]
    min_offset: int = 0
    wait_ms: int = 0


class Attended(Command, frozen=True, tag=93):
    min_offset: int  # the log begins here


# --- clients on the same machine: the commitlog actor ---------------------------------------------


class GetLine(Command, frozen=True, tag=94):
    """Where this process listens to clients of its machine without ZeroMQ between. -> LineAddress

    Refused with NotLocal unless the client names the boot of this very machine.
    """

    boot_id: str


class LineAddress(Command, frozen=True, tag=95):
    name: str  # of a Unix socket, in the abstract namespace
    uid: int  # the user who listens there, and the only one, beside root, who is let in


def _all(root: type[Command]) -> list[type[Command]]:
    return [child for kind in root.__subclasses__() for child in (kind, *_all(kind))]


COMMANDS: Final = tuple(_all(Command))
