"""Types of the kernel: records and messages: what every process reads and writes them with."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Self, final, overload

Buffer = bytes | bytearray | memoryview

REASONS: Final[tuple[str, ...]]
GATHER_DONE: Final[int]
GATHER_UNMAPPED: Final[int]

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

# --- the timer wheel ---

def element_due_ms(batch: Buffer, index: int, now: int) -> int:
    """When an element of a client's batch body is due; -1: it does not say."""

def timing(deliver_at: datetime | None, deliver_after: timedelta | float | None) -> tuple[str, str]:
    """(name, value) of the property that says when a message is to be delivered. Raises
    ArgumentIllegal."""

def delayed_code(stored: Buffer, levels_ms: array[int]) -> int:
    """tagsCode of a record of the delay topic, with so long a wait of each level. Raises
    RecordDamaged."""

def due_ms_by(stored: Buffer, clock: int, ahead: int) -> int:
    """When a record of the wheel's topic is due by a wall clock so many ms ahead of that clock.
    Raises RecordDamaged."""

def due_ms_of(stored: Buffer) -> int:
    """When a record of the wheel's topic is due; -1: it does not say. Raises RecordDamaged."""

# --- dispatch and gather ---

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

def batch_keys(batch: Buffer, count: int) -> list[bytes]:
    """The one key of each message of a batch body. Raises BatchIllegal where there is none, or
    several."""

def batch_without(batch: Buffer, left_out: list[int]) -> bytes:
    """A batch body without the messages of these indexes, which ascend. It has been checked."""

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
