"""Types of the native kernel. Whatever is per message, or must be atomic, is in there."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Self, final, overload

Buffer = bytes | bytearray | memoryview

REASONS: Final[tuple[str, ...]]
DISPATCH_DONE: Final[int]
DISPATCH_BLANK: Final[int]
DISPATCH_NEW_QUEUE: Final[int]
DISPATCH_NEED_ROOM: Final[int]
DISPATCH_BAD: Final[int]
DISPATCH_GAP: Final[int]
DISPATCH_TAKEN: Final[int]
INDEX_DONE: Final[int]
INDEX_BLANK: Final[int]
INDEX_FULL: Final[int]
INDEX_NEED_ROOM: Final[int]
INDEX_BAD: Final[int]
INDEX_ENOUGH: Final[int]
INDEX_FOUND: Final[int]
GATHER_DONE: Final[int]
GATHER_UNMAPPED: Final[int]
COUNTER_BYTES: Final[int]
DOORBELLS_MAX: Final[int]

class BatchIllegal(ValueError):
    """A batch body that is not what it says; nothing of it was taken."""

class RecordTooLarge(ValueError):
    """A message over the limits; args: (what, its size, the limit)."""

def layout_sizes() -> dict[str, int]:
    """Sizes as the kernel was compiled with them."""

# --- files in memory ---

def file_maps() -> int:
    """How many FileMaps this process has open."""

@final
class FileMap:
    """A file in memory, from its first byte on: a buffer without a descriptor, for any thread.

    Ranges may begin and end anywhere in the file. Raises OSError, and ValueError once closed.
    """

    def __init__(self, descriptor: int, count: int, writable: bool = False) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> bytes: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None:
        """Unmap. Raises BufferError while somebody looks at it."""

    def let_go(self) -> None:
        """Unmap, with the last view of it at the latest."""

    def advise(self, advice: int, begin: int = 0, count: int | None = None) -> None: ...
    def sync(self, begin: int, count: int) -> None: ...
    def lock(self, begin: int, count: int) -> None: ...
    def unlock(self, begin: int, count: int) -> None: ...

# --- records ---

QUEUE_OFFSET_MAX: Final[int]

def is_queue_name(topic: str, queue_id: int) -> bool:
    """Whether records may belong to such a queue: then it is a folder's name, inside the store."""

def stored_at(
    buffer: Any,
    segment_start: int,
    physical_offset: int,
    size: int,
    topic: bytes,
    queue_id: int,
    queue_offset: int,
) -> int | None:
    """The store time of the record that a queue's entry points at; None if the entry does not hold.

    Args:
        buffer: the log's segment; an entry that leads outside of it does not hold.
    """

def find_record(buffer: Any, segment_start: int, begin: int, end: int, not_before: int = 0) -> int:
    """The first whole record that begins in [begin, end) and says that it lies there; or -1."""

def whole_records(buffer: Any, segment_start: int, begin: int, end: int, most: int) -> int:
    """Where a piece of the log of about `most` bytes ends, with whole records; -1."""

def records_before(
    buffer: Any, segment_start: int, begin: int, end: int, most: int, topic: bytes
) -> tuple[int, int, int]:
    """As `whole_records`, to the first record of that topic at most.

    (reached, where that record's body lies in the buffer or -1, how many bytes it has).
    """

def scan(
    buffer: Any,
    segment_start: int,
    begin: int,
    end: int,
    check_crc: bool = True,
    check_position: bool = True,
    count_max: int = ...,
) -> tuple[int, int, int, int, int]:
    """Walk records in [begin, end), which lies in one segment.

    (reached, index into REASONS, whole records, the last one's physical offset or -1, its time).
    """

def find_last(
    buffer: Any, segment_start: int, begin: int, end: int, topic: bytes
) -> tuple[int, int, int, int, int]:
    """The last record of a topic in [begin, end), which lies in one segment.

    (reached, its physical offset or -1, its size, records behind it, time of the one before it).
    """

@final
class QueueCursor:
    """The writer's end of one topic queue. Raises ValueError for a topic that is too long."""

    topic: str
    queue_id: int
    next_offset: int
    barred: bool  # an Appender has to ask before it appends to it
    slot: int  # in the queue table; -1: it is not known yet
    def __init__(
        self, topic: str, queue_id: int, next_offset: int = 0, auto_version: bool = True
    ) -> None: ...

@final
class LogAppender:
    """Lays records into the current segment. Has one user, the holder of the put lock."""

    segment_start: int
    last_store_timestamp: int
    store_host: bytes
    physical_offset: int
    remaining: int
    wanted: int  # bytes that found no room last, with a blank behind them
    batch_queue_offset: int  # of the first message that append_batch laid down
    count: int  # messages laid down, from what `publishes` found on
    def __init__(
        self, store_host: bytes, max_message_bytes: int, crc_property: bool = False
    ) -> None: ...
    def attach(
        self, buffer: Any, segment_start: int, physical_offset: int, reserved_to: int = -1
    ) -> None: ...
    def reserve_to(self, physical_offset: int) -> None:
        """File space of the segment is there below this."""
    def detach(self) -> None: ...
    def take_step_back(self) -> tuple[int, int] | None: ...
    def publishes(
        self,
        wrote: OwnedCell,
        timestamp: OwnedCell,
        messages: OwnedCell,
        steps: OwnedCell,
        step_bytes: int,
        on_step: Callable[[], None],
    ) -> None:
        """Which counters `publish` moves; `on_step` is called with every `step_bytes` written."""
    def tells(self, ends: QueueEnds) -> None:
        """Where `publish` tells how far the queues reach that were appended to."""
    def publish(self) -> None:
        """Whatever was laid down may be seen. Sleepers go on sleeping until `wake`."""
    def wake(self) -> None:
        """Wake those who sleep on queues, if `wake_queues` has not, and ring for everyone who
        sleeps on `wrote`; and on `steps`, if it has come so far."""
    def wake_queues(self) -> None:
        """Wake those who sleep on queues alone: whoever reads what was published."""
    def syncs(self, flushed: ReadCell, wanted: OwnedCell, count: OwnedCell, max_bytes: int) -> None:
        """Which counters `sync` and `want` look at and move."""
    def sync(self) -> int:
        """Make what is published durable; below which offset it is. 0: ask the flush process."""
    def want(self) -> None:
        """Have the flush process make durable what is published."""
    def roll(self, buffer: Any, segment_start: int, reserved_to: int = -1) -> None:
        """Close this segment with a blank and go on in the next, in one step for all threads."""
    def write_blank(self) -> None: ...
    def append(
        self,
        queue: QueueCursor,
        body: Buffer,
        properties: bytes = b"",
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: bytes | None = None,
        store_timestamp: int = 0,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> int:
        """The record's physical offset, or -1 when it does not fit into the segment."""
    def append_many(
        self, queue: QueueCursor, bodies: list[bytes], start: int = 0, properties: bytes = b""
    ) -> int:
        """The index of the first body that was not appended."""
    def append_all(self, queue: QueueCursor, bodies: list[bytes], properties: bytes = b"") -> int:
        """The first one's queue offset, or -1 when they do not fit into the segment."""
    def check_all(self, queue: QueueCursor, bodies: list[bytes], properties: bytes = b"") -> None:
        """Raises RecordTooLarge if they, or one of them, fit into no segment; BatchIllegal for an
        empty one."""
    def append_batch(
        self,
        queue: QueueCursor,
        batch: Buffer,
        count: int,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: bytes | None = None,
        store_timestamp: int = 0,
        reconsume_times: int = 0,
    ) -> int:
        """The first record's physical offset, or -1 when the batch does not fit."""
    def count_fitting(
        self, queue: QueueCursor, batch: Buffer, born_bytes: int, room: int
    ) -> tuple[int, int]:
        """(elements of a checked batch that fit into so many bytes, where the next one begins)."""

    def check_batch(self, queue: QueueCursor, batch: Buffer, count: int, born_bytes: int) -> int:
        """Bytes of a batch's records. Raises what `append_batch` would raise of it."""

# --- records of the broker's own actors ---

@final
class InnerEncoder:
    """Builds the payload of AppendRecords."""

    size: int
    count: int
    def __init__(self, *, size_max: int = 4194304, properties_max: int = 32767) -> None: ...
    def add(
        self,
        queue: int,
        body: Buffer,
        properties: bytes = b"",
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: bytes = b"",
        store_host: bytes = b"",
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> int:
        """The record's index. Raises BatchFull; RecordTooLarge for one that can be none."""
    def add_many(
        self,
        queue: int,
        bodies: Sequence[Buffer],
        start: int = 0,
        properties: bytes = b"",
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: bytes = b"",
        store_host: bytes = b"",
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> int:
        """The index of the first body that was not added."""
    def add_batch(
        self,
        queue: int,
        batch: Buffer,
        start: int = 0,
        *,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: bytes = b"",
    ) -> tuple[int, int]:
        """(where the next element begins, how many were added). Raises BatchIllegal."""
    def add_stored(
        self,
        queue: int,
        stored: Buffer,
        properties: bytes | None = None,
        *,
        reconsume_times: int | None = None,
        sys_flag: int | None = None,
        prepared_offset: int | None = None,
    ) -> int:
        """Add a copy of a record as it lies in the log; its index. Raises RecordDamaged."""
    def cut(self, size: int, count: int) -> None: ...
    def take(self) -> bytes:
        """The payload; the encoder is empty again."""

# --- clients' messages that wait ---

@final
class WaitingBatch:
    """A client's batch body, checked, whose records get more properties. Raises BatchIllegal,
    RecordTooLarge.

    Args:
        now: what a delay counts from, in ms; -1: no element says when it is to be delivered.
        latest: time that is accepted.
        up_at: from which byte of `more` on it says when it was stored, by CLOCK_BOOTTIME.
        half: of transactions: each names its own, or begins one under its UNIQ_KEY.
    """

    size: int  # bytes of its records in the log
    count: int
    earliest: int  # time of those that recall another; -1: none does
    places: list[int]  # physical offsets of halves that were laid down
    def __init__(
        self,
        log: LogAppender,
        queue: QueueCursor,
        batch: Buffer,
        count: int,
        more: bytes,
        *,
        now: int = -1,
        latest: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: bytes = b"",
        up_at: int = -1,
        half: bool = False,
    ) -> None: ...
    def append(self, store_timestamp: int = 0) -> int | None:
        """Physical offset of the first record; None if it does not fit."""

# --- delay levels ---

DELAYS_DONE: Final[int]
DELAYS_EARLY: Final[int]
DELAYS_NEW_QUEUE: Final[int]
DELAYS_AHEAD: Final[int]
DELAYS_ODD: Final[int]

def fill_due(
    encoder: InnerEncoder,
    payload: Buffer,
    begin: int,
    queues: dict[bytes, int],
    delay: int,
    wall: int,
    clock: int,
    up: int,
) -> tuple[int, int, int, Any]:
    """(a DELAYS_ reason, the byte and the queue offset of the record that is next, ms or the key of
    a queue). Raises RecordDamaged."""

def again_properties(message: Message, topic: bytes, tail: bytes, waits: bool) -> bytes:
    """The properties of a copy that comes again, as they stand in its record."""

# --- the timer wheel ---

TIMERS_DONE: Final[int]
TIMERS_NO_ROOM: Final[int]
TIMERS_OCCUPIED: Final[int]
TIMERS_UNMAPPED: Final[int]
TIMERS_NEW_QUEUE: Final[int]
TIMERS_ROLL: Final[int]
TIMERS_EARLY: Final[int]
TIMERS_LARGE: Final[int]
TIMERS_NOWHERE: Final[int]
TIMERS_SKEW_MS: Final[int]

def element_due_ms(batch: Buffer, index: int, now: int) -> int:
    """When an element of a client's batch body is due; -1: it does not say."""

def timing(deliver_at: datetime | None, deliver_after: timedelta | float | None) -> tuple[str, str]:
    """(name, value) of the property that says when a message is to be delivered. Raises
    ArgumentIllegal."""

def delayed_code(stored: Buffer, levels_ms: array[int]) -> int:
    """tagsCode of a record of the delay topic, with so long a wait of each level. Raises
    RecordDamaged."""

@final
class HalfEnds:
    """Ends of transactions by columns. Raises ValueError for columns that do not fit together."""

    def __init__(
        self,
        group: str,
        transactions: list[str],
        commits: list[bool],
        counts: list[int],
        topics: list[str],
        topic_of: list[int],
        queue_offsets: list[int],
        physical_offsets: list[int],
    ) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def committed(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def queues(self) -> list[tuple[str, int]]: ...
    def pick(
        self,
        segment: Buffer | FileMap,
        start: int,
        limit: int,
        outcomes: bytearray,
        base: int,
        bytes_max: int,
    ) -> bool:
        """Whether all of them are as most are: then an EndsBatch can be made of them."""

    def note(self, outcomes: bytearray, base: int, span_max: int, words: tuple[int, int]) -> None:
        """Note the outcomes of what was picked."""

@final
class EndsBatch:
    """A mark, the copies of what picked ends commit, and their op: checked against the log.

    Raises RecordTooLarge."""

    def __init__(
        self,
        log: LogAppender,
        ends: HalfEnds,
        queues: list[QueueCursor],
        mark_queue: QueueCursor,
        mark: bytes,
        op_queue: QueueCursor,
        op_head: bytes,
        letters: bytes,
    ) -> None: ...
    @property
    def size(self) -> int: ...
    def append(self, store_timestamp: int = 0) -> tuple[int, int] | None:
        """Physical offset of the mark, queue offset of the op; None: there is no room."""

def op_text(ended: list[tuple[int, Any]], letters: bytes) -> tuple[bytes, bytes]:
    """The body of the op that says so, and the letter of each outcome. Raises ValueError."""

def note_ended(
    outcomes: bytearray, base: int, span_max: int, ended: Iterable[tuple[int, int]]
) -> None:
    """Note outcomes, a byte each from number `base` on."""

def due_ms_by(stored: Buffer, clock: int, ahead: int) -> int:
    """When a record of the wheel's topic is due by a wall clock so many ms ahead of that clock.
    Raises RecordDamaged."""

def due_ms_of(stored: Buffer) -> int:
    """When a record of the wheel's topic is due; -1: it does not say. Raises RecordDamaged."""

@final
class TimerWheel:
    """What waits, by the second in which it is due. One thread uses it."""

    end: int  # of the timer log
    pending: int  # messages
    second: int  # that is being delivered
    at_due: int
    at_place: int
    last_place: int
    read_place: int
    next: int
    passed: list[tuple[int, int, int]]
    is_askew: bool  # something was put that is due before it comes up
    left: int  # ms until what `fill` came to last is due
    def __init__(
        self,
        slots: Any,
        units: LogView,
        end: int,
        at_due: int,
        at_place: int,
        passed: list[tuple[int, int, int]],
    ) -> None: ...
    def put(
        self, records: Buffer, window_ms: int, frontier: int
    ) -> tuple[int, int, list[int], list[int]]:
        """(a TIMERS_ reason, queue offset of the first that was not taken, physical offsets of
        what is overdue, and of what does not say when it is due)."""
    def load(self, log_max: int) -> None:
        """Chain what waits, from `end` on."""
    def turn_back(self, now: int) -> None: ...
    def follow_clock(self, clock: int, ahead: int, moves: list[tuple[int, int, int, int]]) -> None:
        """Where the wall clock is by a clock that nobody sets; what was stored anew."""
    def find_recalls(self, log: LogView, since: int) -> None:
        """Have all count that recalls others and is due since."""
    def askew(
        self, log: LogView, begin: int, position: int, count_max: int
    ) -> tuple[int, list[tuple[int, int]], int]:
        """(a TIMERS_ reason, [(physical offset, position of its unit)] of what is due before it
        comes up, the position in the timer log where the search goes on)."""
    def pass_over(self, position: int) -> None:
        """What that unit is about was stored anew."""
    def drop_before(self, start: int) -> None: ...
    def over(self) -> list[int]:
        """Segments of the timer log in which nothing waits."""
    def turn(self, now: int) -> bool:
        """Whether something is due."""
    def take_recalls(self, count_max: int) -> list[int]: ...
    def fill(
        self,
        encoder: InnerEncoder,
        log: LogView,
        queues: dict[bytes, int],
        recalled: set[bytes],
        now: int,
        up: int,
        count_max: int,
        begin: int,
    ) -> tuple[int, int, Any]:
        """(a TIMERS_ reason, number that is next, a physical offset or the key of a queue)."""
    def place_of(self, number: int) -> tuple[int, int]: ...
    def advance(self, number: int) -> None: ...
    def next_due(self, horizon: int) -> int: ...
    def relink(self) -> None: ...

@final
class InnerBatch:
    """A payload of AppendRecords, checked. Raises BatchIllegal, RecordTooLarge."""

    size: int  # bytes of its records in the log
    count: int
    def __init__(
        self, log: LogAppender, queues: list[QueueCursor], payload: Buffer, count: int
    ) -> None: ...
    def append(self, store_timestamp: int = 0) -> bytes | None:
        """Queue offset and physical offset of each as int64s; None if it does not fit."""

# --- appending from any thread of the writer's process ---

@final
class Gate:
    """Whether an Appender goes straight to the log. Shut inside `with`, and in a fork."""

    def __enter__(self) -> Gate: ...
    def __exit__(self, *_: object) -> None: ...
    def bar(self, barred: bool = True) -> None:
        """Have everybody ask, from now on until `bar(False)`."""

@final
class Sleepers:
    """The threads of this process that sleep on counters with one doorbell."""

    def __init__(self, doorbell_fd: int) -> None: ...
    def end(self) -> None:
        """Nobody sleeps any more."""
    def wait(self, cell: SleepCell, at_least: int, timeout_s: float) -> bool:
        """Sleep until the counter is there; False if it is not after the time."""

@final
class Appender:
    """Appends messages to one queue of an embedded broker."""

    queue: QueueCursor
    topic: str
    queue_id: int
    def __init__(
        self,
        log: LogAppender,
        gate: Gate,
        queue: QueueCursor,
        desk: Any,  # see actors/launch/hosted.py
        sleepers: Sleepers,
        flushed: SleepCell | None,
        synced: OwnedCell | None,
        timeout_s: float,
        unflushed_max: int,
        slaves: bool = False,
    ) -> None: ...
    def append(
        self,
        body: Buffer,
        tags: str | None = None,
        keys: str | None = None,
        properties: dict[str, str] | None = None,
        wait: bool = True,
    ) -> int:
        """Append one message; its queue offset."""
    def append_many(
        self,
        bodies: Iterable[Buffer],
        tags: str | None = None,
        keys: str | None = None,
        properties: dict[str, str] | None = None,
        wait: bool = True,
    ) -> range:
        """Append messages that differ in their bodies only, all or none; their queue offsets."""
    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until everything that was appended before is on the disk."""

# --- dispatch and gather ---

@final
class Dispatcher:
    """Writes a ConsumeQueue entry for every record. Has one user, the dispatcher process."""

    last_store_timestamp: int
    def __init__(self, levels_ms: array[int]) -> None: ...
    def add_queue(
        self, topic: str, queue_id: int, next_index: int, published: Any, published_at: int
    ) -> int: ...
    def attach(
        self, slot_number: int, segment: Any, first_index: int, limit_index: int
    ) -> None: ...
    def detach(self, slot_number: int) -> None: ...
    def next_index(self, slot_number: int) -> int: ...
    def set_next_index(self, slot_number: int, next_index: int) -> None: ...
    def find(self, topic: str, queue_id: int) -> int: ...
    def put(
        self, slot_number: int, index: int, physical_offset: int, size: int, tags_code: int
    ) -> None: ...
    def dispatch(
        self, buffer: Any, segment_start: int, begin: int, end: int, enough: int = ...
    ) -> tuple[int, int, int, int]:
        """(reached, a DISPATCH_ reason, slot or -1, queue offset or index into REASONS)."""

def fillers_end(units: Any, begin: int, end: int) -> int:
    """The first entry in [begin, end) that is no filler; `end` if all are."""

def last_real(units: Any, begin: int, end: int) -> int:
    """The last entry in [begin, end) that is no filler; -1 if all are."""

def units_before(units: Any, end: int, bound: int) -> int:
    """How many of the first `end` entries name records that begin before `bound`: they ascend.

    Where an entry contradicts its neighbours, all are looked at.
    """

def units_end(units: Any, begin: int, end: int) -> int:
    """The first ConsumeQueue entry in [begin, end) that is not valid; `end` if all are."""

def fill_units(units: Any, begin: int, end: int) -> None:
    """Write RocketMQ's fillers into the entries [begin, end)."""

# --- index files ---

@final
class Indexer:
    """Puts the keys of records into one index file. Has one user, the dispatcher process."""

    end_physical_offset: int  # of the last record that was put; -1 before the first file
    end_timestamp: int
    count: int  # the next entry's number
    def attach(
        self, memory: Any, slots: int, entries: int, limit: int, split: bool = False
    ) -> None: ...
    def set_limit(self, limit: int) -> None: ...
    def detach(self) -> None: ...
    def index(
        self, buffer: Any, segment_start: int, begin: int, end: int, count_max: int
    ) -> tuple[int, int]:
        """(reached, an INDEX_ reason)."""

def index_hash(topic: str, key: str) -> int:
    """The hash that an entry of the key has."""

def first_keyed(
    buffer: Any, segment_start: int, begin: int, end: int, above: int = -1
) -> tuple[int, int]:
    """The first record that belongs into the index: (reached, INDEX_FOUND or why there is none)."""

def index_chain(
    memory: Any,
    slots: int,
    entries: int,
    key_hash: int,
    begin_ms: int,
    end_ms: int,
    count_max: int,
    start: int = -1,
    exact: bool = False,
    below: int = 0x7FFFFFFFFFFFFFFF,
) -> tuple[list[int], int, bool]:
    """(physical offsets, the newest first; where to go on or 0; whether the chain holds)."""

def index_is_whole(memory: Any, slots: int, entries: int, may_be_cut: bool = True) -> bool:
    """Whether all slots and chains are what putting these entries one by one makes of them."""

@final
class LogView:
    """The CommitLog's segments as one address space, mapped as they are needed."""

    segment_bytes: int
    starts: list[int]
    def __init__(self, segment_bytes: int) -> None: ...
    def set(self, segment_start: int, buffer: Any) -> None: ...
    def drop(self, segment_start: int) -> None: ...
    def clear(self) -> None: ...

class Filter:
    """An SQL92 filter. Raises ValueError of a program that could do anything but its work."""

    depth: int  # of its stack
    def __init__(
        self,
        code: bytes,
        names: tuple[bytes, ...],
        texts: tuple[bytes, ...],
        longs: tuple[int, ...],
        doubles: tuple[float, ...],
    ) -> None: ...
    def matches(self, properties: bytes) -> bool:
        """Whether it is TRUE of these properties, as they lie in a record."""
    def outcome(self, properties: bytes) -> bool | str | None:
        """None: unknown; "failed": a comparison of what cannot be compared."""

def gather(
    log: LogView,
    units: Any,
    first_index: int,
    begin: int,
    end: int,
    log_min: int,
    log_max: int,
    topic: bytes,
    queue_id: int,
    limits: tuple[int, int, int, int, int, int, int, int],
    codes: Sequence[int] | None = None,
    skip_removed: bool = True,
    check_crc: bool = True,
    filter: Filter | None = None,
) -> tuple[int, bytes | None, int, int, int, int, int, list[tuple[int, int, int]] | None]:
    """(reason, payload, count, next index, unreadable entries, detail, last physical offset,
    what does not hold: (queue offset, physical offset, index into REASONS), or None)."""

# --- records as Arrow buffers ---

COLUMN_NAMES: Final[tuple[str, ...]]
ARCHIVE_NAMES: Final[tuple[str, ...]]
COLUMNS_DONE: Final[int]
COLUMNS_FULL: Final[int]
COLUMNS_UNMAPPED: Final[int]
COLUMNS_GONE: Final[int]
COLUMNS_HOLE: Final[int]
COLUMNS_DAMAGED: Final[int]

@final
class ArrowBuffer:
    """Memory of one column. It is written again only when nobody looks at it any more."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class QueueSpans:
    """Queues and a stretch of each: what is wanted of a log, or what was seen in it."""

    def __len__(self) -> int: ...
    def add(self, topic: str, queue_id: int, begin: int, end: int) -> None: ...
    def items(self) -> list[tuple[str, int, int, int]]:
        """(topic, queue id, begin, end) of each."""
    def survey(self, buffer: Any, segment_start: int, begin: int, end: int) -> tuple[int, int]:
        """Widen the stretches by what lies in [begin, end): (reached, index into REASONS)."""

@final
class Columns:
    """Collects records into one batch of Arrow columns after another. One thread uses it.

    What does not hold stops it, and is not taken. `null_body`: a body whose CRC does not hold, or
    that cannot be unfolded, is null instead.
    """

    rows: int  # in the batch so far
    detail: int  # with COLUMNS_UNMAPPED: the start of the segment
    nulled: int  # bodies that became null
    # With COLUMNS_DAMAGED: (reason, queue offset or -1, physical offset, CRC that the record says,
    # CRC that its body has, details or ""); both CRCs are -1 where they are not what is wrong.
    damage: tuple[str, int, int, int, int, str]
    def __init__(
        self,
        names: Sequence[str],
        broker: str,
        *,
        rows_max: int = 16_384,
        bytes_max: int = 4_194_304,
        check_crc: bool = True,
        decompress: bool = True,
        null_body: bool = False,
        tags: Iterable[str] | None = None,
        keys: Iterable[str] | None = None,
        begin_ms: int = -1,
        end_ms: int = ...,
        filter: Filter | None = None,
    ) -> None: ...
    def gather(
        self,
        log: LogView,
        units: Any,
        first_index: int,
        begin: int,
        end: int,
        log_min: int,
        log_max: int,
        topic: bytes,
        queue_id: int,
    ) -> tuple[int, int]:
        """Take the records of ConsumeQueue entries: (a COLUMNS_ reason, index reached)."""
    def decode_run(
        self,
        buffer: Any,
        at: int,
        topic: bytes,
        queue_id: int,
        next_index: int,
        end: int,
        gaps: bool = False,
    ) -> tuple[int, int, int]:
        """Take records of one queue as a pull answers them: (a COLUMNS_ reason, position, index).

        Raises RecordDamaged when they do not even stand one after the other.
        """
    def scan(
        self,
        buffer: Any,
        segment_start: int,
        begin: int,
        end: int,
        wanted: QueueSpans | None = None,
    ) -> tuple[int, int]:
        """Take the records of a segment: (a COLUMNS_ reason, physical offset reached)."""
    def take(self) -> tuple[int, list[tuple[int, tuple[ArrowBuffer, ...]]]]:
        """(rows, for each column (nulls, buffers)).

        The next batch takes other memory as long as somebody looks at these buffers.

        Buffers: (data) for numbers, (validity, offsets, data) for text and bytes, (none, offsets,
        offsets of names, names, offsets of values, values) for the properties.
        """

def unit_marks(
    units: Any,
    first_index: int,
    begin: int,
    end: int,
    bytes_max: int,
    count_max: int,
    held_bytes: int,
    held_count: int,
    marks_max: int,
) -> tuple[list[int], int, int, int, int]:
    """(where parts begin, reached, bytes, bytes and messages of the part that is not full)."""

def units_below(units: Any, begin: int, end: int, bound: int) -> int:
    """One past the last of the entries [begin, end) whose record ends at or below `bound`."""

# --- Arrow columns as batch bodies ---

NO_QUEUE: Final[int]

class RowIllegal(ValueError):
    """A row that cannot become a message; args: (row in the batch, column, what is wrong)."""

@final
class ArrowText:
    """A column of text or bytes with 32-bit offsets; what its buffers say is checked before use."""

    rows: int
    def __init__(
        self,
        validity: Buffer | None,
        offsets: Buffer,
        data: Buffer | None,
        start: int,
        rows: int,
        size: int = 0,
    ) -> None: ...

@final
class RowEncoder:
    """Turns rows into batch bodies, one open body for each slot: a queue, or "any" of a topic."""

    size: int  # bytes in open bodies
    def __init__(
        self, *, batch_bytes: int = 262_144, body_max: int = 4_194_304, multi_tags: bool = False
    ) -> None:
        """`multi_tags`: tags may be joined by ||; else such a tag is refused."""
    def encode(
        self,
        rows: int,
        topics: Any | None,
        routes: list[tuple[int, int, Any]],
        queue_ids: Any | None,
        ordering: ArrowText | None,
        body: ArrowText,
        keys: ArrowText | None,
        tags: ArrowText | None,
        properties: tuple[ArrowText, ArrowText, ArrowText] | None = None,
        flags: Any | None = None,
    ) -> list[tuple[int, bytes, int]]:
        """Add rows; the bodies that became full: [(slot, body, count)].

        `topics`, `queue_ids` and `flags` are arrays of int32; `routes` hold (first slot, queues,
        slot of each queue id). Raises RowIllegal; rows before that one may have been added.
        """
    def drain(self) -> list[tuple[int, bytes, int]]:
        """All bodies that are open, by slot. Then there are no slots."""

# --- whole segments ---

WALK_DONE: Final[int]
WALK_BLANK: Final[int]
WALK_DAMAGED: Final[int]
WALK_WINDOW: Final[int]
VERIFY_DONE: int
VERIFY_SEGMENT: int
VERIFY_WRONG: int
WALK_KINDS: Final[tuple[str, ...]]
RECORD_FIELDS: Final[tuple[str, ...]]

class LogWalk:
    """Goes over the records of segments, for audits and archives. One thread uses it.

    `special` gives the tagsCode of a raw record of the delay topic.
    """

    # (index into WALK_KINDS, lane or -1, queue offset, physical offset, five numbers to say)
    findings: list[tuple[int, int, int, int, int, int, int, int, int]]
    records: int
    left_out: int  # findings beyond `findings_max` of a kind and queue
    def __init__(
        self, special: Callable[[bytes], int] | None = None, findings_max: int = 100
    ) -> None: ...
    def __len__(self) -> int: ...
    def name(self, number: int) -> tuple[str, int]:
        """(topic, queue id) of a lane."""
    def lanes(self) -> list[dict[str, Any]]:
        """What was seen of each queue (and day), in the order in which they were met."""
    def group(self, buffer: Any, segment_start: int, begin: int, end: int) -> tuple[int, int]:
        """Note where records lie, by queue and day: (reached, index into REASONS)."""
    def fill(self, columns: Columns, number: int, first: int, buffer: Any) -> tuple[int, int]:
        """Put a lane's records into columns: (a COLUMNS_ reason, the number reached)."""
    def attach(self, number: int, units: Any, first_index: int, limit_index: int) -> None: ...
    def detach(self) -> None: ...
    def audit(
        self, buffer: Any, segment_start: int, begin: int, end: int
    ) -> tuple[int, int, int, int]:
        """(reached, a WALK_ reason, lane, queue offset or index into REASONS)."""

@final
class StoreVerify(LogWalk):
    """Compares a log's records with their entries. One thread uses it."""

    def verify(
        self, buffer: Any, segment_start: int, begin: int, end: int
    ) -> tuple[int, int, int, int]:
        """(reached, a WALK_ reason, lane, queue offset or index into REASONS)."""
    def tally_of(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """(one past the last queue offset that a record has, entries that are a record's)."""

def live_units(units: Any, begin: int, end: int, log_min: int) -> int:
    """Entries that stand for a record at `log_min` or behind."""

def wrong_unit(
    units: Any,
    first_index: int,
    begin: int,
    end: int,
    log: Any,
    log_start: int,
    log_min: int,
    log_max: int,
    segment_bytes: int,
    topic: bytes,
    queue_id: int,
) -> tuple[int, int, int]:
    """The first entry that does not hold: (queue offset, a VERIFY_ reason, index into REASONS)."""

def wrong_index_entry(
    memory: Any,
    slots: int,
    entries: int,
    begin: int,
    log: Any,
    log_start: int,
    log_min: int,
    log_max: int,
    segment_bytes: int,
) -> tuple[int, int, int]:
    """As `wrong_unit`, of an index file: (number, a VERIFY_ reason, index into REASONS)."""

def put_records(segment: Any, segment_start: int, rows: int, columns: list[Any]) -> None:
    """Write records where they lay, from the columns RECORD_FIELDS. Raises ValueError."""

# --- counters ---

WAKE_WORDS_BYTES: int

@final
class WakeWords:
    """A word (futex) for each cell, on which processes sleep that have no doorbell."""

    writable: bool
    silent: bool  # a process may sleep on words that it cannot write
    def __init__(self, memory: Any) -> None: ...
    def wake_everybody(self) -> None:
        """Have all sleepers look again."""
    def is_slept_on(self, number: int) -> bool: ...

class ReadCell:
    """Anyone's view of a counter in the control file."""

    value: int  # acquire order
    def __init__(
        self,
        memory: Any,
        at: int,
        words: int = 1,
        wake_words: WakeWords | None = None,
        number: int = 0,
    ) -> None: ...

class SleepCell(ReadCell):
    """The view of a process that sleeps until the counter moves. Needs writable memory."""

    def __init__(
        self,
        memory: Any,
        at: int,
        doorbell: int,
        words: int = 1,
        wake_words: WakeWords | None = None,
        number: int = 0,
    ) -> None: ...
    def arm(self) -> None: ...
    def disarm(self) -> None: ...

class InvariantBroken(AssertionError):
    """A counter was to be published above one that bounds it."""

class OwnedCell(ReadCell):
    """The writer's end. One process opens it."""

    def __init__(
        self,
        memory: Any,
        at: int,
        doorbells: Sequence[int] = (),
        words: int = 1,
        second: bool = False,
        wake_words: WakeWords | None = None,
        number: int = 0,
    ) -> None: ...
    def bounded(self, name: str, bounds: tuple[tuple[str, ReadCell], ...]) -> None:
        """Never to be published above these; a bound of 0 is one whose writer has not begun."""
    def publish(self, value: int) -> None: ...
    def move(self, value: int) -> None: ...
    def raise_to(self, value: int) -> None: ...
    def wake(self) -> None: ...
    def wake_moved(self) -> None: ...
    def has_sleepers(self) -> bool: ...
    def advance(self, value: int) -> None: ...
    def reset(self, value: int) -> None: ...

# --- sleeping on counters without a doorbell ---

SLEEP_CELLS_MAX: int

class Bell:
    """Wakes a sleeper of the same process; what was rung before it sleeps is not lost."""

    def ring(self) -> None: ...

class Sleeper:
    """Sleeps until one of several cells moves, or its bell is rung. One thread uses it."""

    def __init__(self, cells: Sequence[ReadCell], bell: Bell) -> None: ...
    def look(self) -> None:
        """From now on a change counts."""
    def hear(self) -> None:
        """What the bell was rung for is about to be looked at."""
    def sleep(self, timeout_s: float, spin_s: float = 0) -> bool:
        """Whether something moved within the time. Raises OSError on a kernel before 5.16."""

def wait_until(cell: ReadCell, least: int, timeout_s: float) -> bool: ...

# --- the ends of queues ---

STRIPES: int

@final
class QueueEnds:
    """Tells how far the writer has come with each queue: for the commitlog process."""

    def __init__(
        self,
        memory: Any,
        at: int,
        slots: int,
        stripes: Sequence[OwnedCell],
        dispatcher_fd: int = -1,
    ) -> None: ...
    def place(self, queue: QueueCursor, slot: int) -> None:
        """Tell of this queue from now on; what was appended to it before is told at once."""

class QueueWatch:
    """Which of many queues reach beyond an offset, each under a key. One thread uses it.

    A look costs as much as there are stripes, and queues in the stripes that have moved.
    """

    def __init__(self, memory: Any, at: int, slots: int, stripes: Sequence[ReadCell]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...
    def set(self, key: Any, slot: int, offset: int) -> None:
        """Name this queue when it reaches beyond the offset, once; then it has to be set again."""
    def discard(self, key: Any) -> None: ...
    def end(self, slot: int) -> int:
        """How far a queue is written, watched or not."""
    def stripes(self) -> list[int]:
        """Those with any queue that is watched."""
    def news(self, count_max: int) -> list[Any]:
        """The keys of queues beyond their offsets, at most so many."""

# --- RocketMQ's JSON ---

def quote_keys(content: Buffer) -> bytes:
    """The same text with quotes around the integers that stand as keys without. Never fails; where
    the text is no JSON, neither is what comes out."""

def integer_pairs(table: dict[int, int]) -> str:
    """`1:20,2:30` of a table. Raises TypeError for what is no integer, OverflowError for one of
    more than 64 bits."""

def indexed_pairs(values: array[int]) -> str:
    """`1:20,2:30` of an array of integers of 64 bits, by their index; without the least integer
    that there is, which says that nothing stands there."""

# --- batches and messages ---

class BatchFull(Exception):
    """The message does not fit into this batch any more."""

@final
class BatchEncoder:
    """Builds one batch body: messages for one queue, in RocketMQ's batch layout.

    Every message gets a UNIQ_KEY property, RocketMQ's client-made id, unless `unique_keys` is off.
    """

    count: int  # messages in it
    size: int  # bytes in it
    def __init__(
        self, *, size_max: int = 262_144, count_max: int = 65_536, unique_keys: bool = True
    ) -> None: ...
    def add(
        self,
        body: Buffer,
        tags: str | None = None,
        keys: str | None = None,
        properties: dict[str, str] | None = None,
        flag: int = 0,
    ) -> int:
        """The message's index in the batch.

        An empty batch takes a message of any size up to 16 MiB; after that BatchFull is raised when
        the message would take the batch over size_max or count_max.
        Raises ValueError for property text that holds 0x01 or 0x02, or properties over 32,767
        bytes, and TypeError for a body that is no buffer.
        """
    def add_many(
        self,
        bodies: Sequence[Buffer],
        start: int = 0,
        tags: str | None = None,
        keys: str | None = None,
        properties: dict[str, str] | None = None,
        flag: int = 0,
    ) -> int:
        """Add bodies[start:] until the batch is full; the index of the first that was not added."""
    def take(self) -> bytes:
        """The batch body; the encoder is empty again."""

def decompress(body: bytes, sys_flag: int) -> bytes:
    """The plain body of a compressed one. Raises BodyIllegal, CodecMissing."""

def unique_id(batch: Buffer, index: int) -> str:
    """The UNIQ_KEY of the message of that index in a batch body, or "" if it has none."""

def element_start(batch: Buffer, index: int) -> int:
    """Where the message of that index begins in a batch body. Raises IndexError."""

@final
class Message:
    """A message as a consumer sees it: a view on a record. Decoded when asked for.

    It keeps the whole buffer that it arrived in alive. It can be copied and pickled; a pickle holds
    only the record. In the process of the consumer that received the message, a copy can be
    acknowledged and replied to like the message itself; in another process it is a value.
    """

    topic: str  # of a retry in a handler: what it was sent to
    stored_topic: str  # as it lies in the log
    queue_id: int
    queue_offset: int
    physical_offset: int
    body: bytes  # decompressed if it was compressed
    stored_body: bytes  # as it lies in the log
    tags: str | None
    keys: str | None
    properties: dict[str, str]
    raw_properties: bytes
    msg_id: str  # UNIQ_KEY, or the offset message id
    offset_msg_id: str
    flag: int
    sys_flag: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    born_host: str  # "ip:port", IPv6 in brackets
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    is_queued: bool  # whether a ConsumeQueue gets an entry for it
    tags_code: int
    size: int  # bytes of the record
    magic: int
    record: bytes  # the raw record

    def reply(
        self, body: Buffer, *, properties: Mapping[str, str] | None = None, timeout_s: float = 10.0
    ) -> Any:
        """Answer a request (`Producer.request`), in a handler or after a poll.

        It returns when the requester has the reply, and the broker, if it is set to
        (`storeReplyMessageEnable`), has stored it. Of an asyncio consumer's message it is awaited:
        `await message.reply(b"done")`.

        Args:
            body: bytes-like, not empty.
            properties: text by name.
            timeout_s: until then it is tried again whatever may pass.

        Raises:
            RequesterGone when nobody waits for it any more; ArgumentIllegal where the message is no
            request; MessageIllegal, MessageTooLarge; NotConfirmed, NotReachable, SystemBusy when
            the time is up: the requester may have it.
        """

def message_from(
    record: bytes,
    is_restored: bool = False,
    reconsume_times: int | None = None,
    source: Any = None,
) -> Message: ...

class RecordDamaged(Exception):
    """A record whose bytes contradict themselves; args: (reason, position in the buffer)."""

class QuickSend:
    """A producer's `send` as long as there is an open batch that takes the message."""

    def __init__(
        self,
        open: dict[str, tuple[Any, BatchEncoder, int]],
        later: dict[str, tuple[Any, BatchEncoder, int]],
        receipt: Any,
        slow: Any,
    ) -> None: ...
    def send(
        self,
        topic: str,
        body: Any,
        *,
        tags: str | None = None,
        keys: Any = None,
        properties: Any = None,
        ordering_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        wait: bool = True,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | float | None = None,
    ) -> Any: ...

def decode(
    buffer: Any,
    tags: Iterable[str] | None = None,
    check_crc: bool = True,
    filter: Filter | None = None,
) -> list[Message]:
    """The messages in records that stand one after the other, as a pull answers them.

    With tags only messages whose tag is exactly one of them, and with a filter those that it is
    TRUE of. Raises RecordDamaged.
    """

def deliver(
    log: LogView,
    units: Any,
    first_index: int,
    begin: int,
    end: int,
    log_min: int,
    log_max: int,
    topic: bytes,
    queue_id: int,
    count_max: int,
    bytes_max: int,
    scan_max: int,
    codes: Sequence[int] | None = None,
    tags: Iterable[str] | None = None,
    filter: Filter | None = None,
) -> tuple[int, list[Message], int, int, int, int, list[tuple[int, int, int]] | None]:
    """`gather` and `decode` in one: (reason, messages, bytes, next index, unreadable entries,
    detail, what does not hold as `gather` has it)."""

TAIL_DONE: int
TAIL_UNMAPPED: int
TAIL_STRANGE: int

@final
class TailView:
    """Entries [first, end) that a queue is about to get, and the first ones of them.

    `is_stuck`: what comes behind them is for the dispatcher to judge.
    """

    first: int
    end: int
    units: bytes
    is_stuck: bool

class Tail:
    """The records of the log between two places, by their queues. One thread uses it."""

    begin: int  # physical offsets
    reached: int
    is_strange: bool  # what lies at `reached`
    def __init__(self, log: LogView) -> None: ...
    def restart(self, begin: int) -> None:
        """Forget what was seen, and begin there."""
    def give_up(self) -> None:
        """What comes next is for the dispatcher to judge, until the next restart."""
    def scan(self, end: int) -> int:
        """Look at all records up to there; a TAIL_ reason."""
    def view(
        self, topic: str, queue_id: int, high: int, queue_offset: int, count_max: int
    ) -> TailView:
        """What a queue is about to get, from an offset on if that is in it."""

class KeyTail:
    """The newest record of each key of some topics, in a stretch of the log. One thread uses it."""

    begin: int  # physical offsets
    reached: int
    count: int  # of keys
    def __init__(self, log: LogView) -> None: ...
    def restart(self, begin: int) -> None:
        """Forget what was seen, and begin there."""
    def watches(self, topic: bytes) -> bool: ...
    def watch(self, topic: bytes) -> None:
        """Note its keys as well, from the next restart on."""
    def scan(self, end: int) -> int:
        """Look at all records up to there; a TAIL_ reason. TAIL_STRANGE: `reached` has damage."""
    def skip_to(self, place: int) -> None:
        """Damage lies before that place: a record that does not hold has no key."""
    def find(self, topic: bytes, keys: list[bytes]) -> list[tuple[int, int]]:
        """(index, physical offset) of each of these keys that is there."""

def batch_keys(batch: Buffer, count: int) -> list[bytes]:
    """The one key of each message of a batch body. Raises BatchIllegal where there is none, or
    several."""

def batch_without(batch: Buffer, left_out: list[int]) -> bytes:
    """A batch body without the messages of these indexes, which ascend. It has been checked."""

def index_hits(
    memory: Any, slots: int, entries: int, topic: bytes, keys: list[bytes], begin_ms: int
) -> list[int]:
    """Which of the keys, by their index, an index file may have at `begin_ms` or later."""

def record_bytes(log: LogView, physical_offset: int) -> bytes | None:
    """The record there, if it is a whole one with the right checksum; None: there is none.

    Raises KeyError where its segment is to be mapped first.
    """

def runs(messages: list[Message]) -> list[tuple[str, int, int, int, int]]:
    """Messages as runs of one queue: (topic, queue_id, first offset, last offset, count) each."""

def set_source(messages: list[Message], source: object) -> None:
    """What the `reply` of these messages asks."""

def source_of(message: Message) -> object:
    """What `set_source` has said; None: nothing."""

def restore_topics(messages: list[Message]) -> None:
    """Have each of these, which lie in a retry topic, name the topic that it was sent to."""

def count_attempts(messages: list[Message], count: int = 1) -> None:
    """These are handed out again: so many more of `reconsume_times`."""

def stretches(messages: list[Message]) -> list[tuple[int, int]]:
    """Messages of one queue, in any order, as stretches without a gap: (first offset, count)."""

def encode_properties(
    tags: str | None = None, keys: str | None = None, properties: dict[str, str] | None = None
) -> bytes:
    """RocketMQ's property text of a message. Raises ValueError for 0x01 or 0x02 in it."""

def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """RocketMQ's offset message id."""

def java_hash(text: str) -> int:
    """Java's String.hashCode over UTF-16 units, as a signed 32-bit number."""

def crc32(buffer: Any, value: int = 0) -> int:
    """CRC-32 as zlib's, unmasked."""

# --- copying ---

COPY_MORE: Final[int]
COPY_ROOM: Final[int]
COPY_GAP: Final[int]
COPY_FRAME: Final[int]
COPY_RECORD: Final[int]
COPY_CLOSED: Final[int]
COPY_STREAM_BYTES: Final[int]
COPY_FRAME_MAX: Final[int]

def unset_bytes(size: int) -> bytearray:
    """It has whatever its memory had: for who fills all of it before anybody looks."""

@final
class LogCopy:
    """Takes a master's frames and lays whole records down as they are."""

    end: int  # physical offset of the next byte
    held: int  # bytes of a record that is not whole yet
    frames: int  # since the last `forget`
    frame_offset: int  # of the last one
    frame_bytes: int
    why: str  # what is wrong with the record at the log's end
    def __init__(
        self,
        log: LogAppender,
        record_max: int,
        cursor_of: Callable[[str, int], QueueCursor | None],
    ) -> None: ...
    def receive(self, fd: int) -> int:
        """Take what a socket holds: so many bytes, 0 at its end, -1 for nothing. Raises OSError."""
    def feed(self, content: Buffer) -> int:
        """As `receive`, from memory; how many bytes there was room for."""
    def take(self) -> int:
        """Lay down what has come; one of the COPY_ reasons why it stopped."""
    def follow(self, fd: int, other_fd: int, timeout_s: float) -> int:
        """Sleep until `other_fd` can be read, and meanwhile lay down and publish what comes."""
    def forget(self) -> None:
        """The connection is lost: what is not whole comes again."""
