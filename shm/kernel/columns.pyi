"""Types of the kernel: many records at once: Arrow columns, walks, verification."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

from cometmq.shm.kernel.codec import Filter, LogView

Buffer = bytes | bytearray | memoryview

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
