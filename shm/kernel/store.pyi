"""Types of the kernel: appending, dispatch, index, timers, copying."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

from cometmq.shm.kernel.codec import FileMap, LogView, Message
from cometmq.shm.kernel.live import OwnedCell, QueueCursor, QueueEnds, ReadCell, SleepCell

Buffer = bytes | bytearray | memoryview

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

# --- records ---

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

# --- batches and messages ---

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

def index_hits(
    memory: Any, slots: int, entries: int, topic: bytes, keys: list[bytes], begin_ms: int
) -> list[int]:
    """Which of the keys, by their index, an index file may have at `begin_ms` or later."""

def record_bytes(log: LogView, physical_offset: int) -> bytes | None:
    """The record there, if it is a whole one with the right checksum; None: there is none.

    Raises KeyError where its segment is to be mapped first.
    """

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
