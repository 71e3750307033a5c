"""Types of the native kernel. Whatever is per message, or must be atomic, is in there."""

from collections.abc import Iterable, Sequence
from typing import Any, final

Buffer = bytes | bytearray | memoryview

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

def unique_id(batch: Buffer, index: int) -> str:
    """The UNIQ_KEY of the message of that index in a batch body, or "" if it has none."""

@final
class Message:
    """A message as a consumer sees it: a view on a record. Decoded when asked for.

    It keeps the whole buffer that it came in alive.
    """

    topic: str
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
    size: int  # bytes of the record
    magic: int
    record: bytes  # the raw record

class RecordDamaged(Exception):
    """A record whose bytes contradict themselves; args: (reason, position in the buffer)."""

def decode(
    buffer: bytes, tags: Iterable[str] | None = None, check_crc: bool = True
) -> list[Message]:
    """The messages in records that stand one after the other, as a pull answers them.

    With tags only messages whose tag is exactly one of them. Raises RecordDamaged.
    """

def java_hash(text: str) -> int:
    """Java's String.hashCode over UTF-16 units, as a signed 32-bit number."""

def crc32(buffer: Buffer, value: int = 0) -> int:
    """CRC-32 as zlib's, unmasked."""
