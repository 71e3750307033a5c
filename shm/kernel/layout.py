"""Every binary layout of the store and of the batch body, declared once.

The native kernel takes its positions and sizes from here as well:

    python -m cometmq.shm.kernel.layout > shm/kernel/layout.pxi

A test compares the printed file with these declarations. All integers are big-endian and there is
no padding, as RocketMQ writes them; source of the numbers: RocketMQ's MessageExtEncoder,
MessageDecoder, ConsumeQueue, IndexFile, StoreCheckpoint, TimerWheel and TimerLog.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from cometmq.protocol import names

_WIDTHS: Final = {"u8": 1, "i8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_CODES: Final = {
    "u8": "B",
    "i8": "b",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
}


class Layout:
    """Named fixed-width fields, one after the other; packs and unpacks them."""

    def __init__(self, name: str, fields: dict[str, str], *, byte_order: str = ">") -> None:
        self.name = name
        self.fields = fields
        self._struct = struct.Struct(byte_order + "".join(_CODES[kind] for kind in fields.values()))
        self.size = self._struct.size
        self.at: dict[str, int] = {}
        position = 0
        for field, kind in fields.items():
            self.at[field] = position
            position += _WIDTHS[kind]
        assert position == self.size, f"{name} has padding"

    def pack(self, **values: int) -> bytes:
        return self._struct.pack(*(values[field] for field in self.fields))

    def pack_in_order(self, *values: int) -> bytes:
        """All fields, as they stand: for a hot path."""
        return self._struct.pack(*values)

    def unpack(self, buffer: Any, at: int = 0) -> dict[str, int]:
        return dict(zip(self.fields, self._struct.unpack_from(buffer, at), strict=True))

    def as_pxi(self) -> str:
        """The layout as a Cython enum: NAME_FIELD = position, NAME_BYTES = size."""
        lines = [f"cdef enum:  # {self.name}"]
        lines += [f"    {self.name}_{field.upper()} = {at}" for field, at in self.at.items()]
        lines.append(f"    {self.name}_BYTES = {self.size}")
        return "\n".join(lines)


# A record begins with these. The hosts are 8 bytes (IPv4 and port) or 20 (IPv6 and port), so what
# stands behind bornHost moves; those fields are in RECORD_AFTER_HOSTS-style pieces below.
RECORD_HEAD: Final = Layout(
    "RECORD_HEAD",
    {
        "total_size": "i32",
        "magic": "u32",
        "body_crc": "i32",  # CRC-32 of the stored body & 0x7FFFFFFF
        "queue_id": "i32",
        "flag": "i32",
        "queue_offset": "i64",
        "physical_offset": "i64",
        "sys_flag": "i32",
        "born_timestamp": "i64",
    },
)
assert RECORD_HEAD.size == 48

# Between the store host and the body.
RECORD_MIDDLE: Final = Layout(
    "RECORD_MIDDLE",
    {
        "reconsume_times": "i32",
        "prepared_transaction_offset": "i64",
        "body_length": "i32",
    },
)
assert RECORD_MIDDLE.size == 16

# RocketMQ CommitLog, the end-of-segment blank.
BLANK: Final = Layout("BLANK", {"size": "i32", "magic": "u32"})

# What a master sends its slave ahead of the log's bytes (RocketMQ DefaultHAConnection).
HA_FRAME: Final = Layout("HA_FRAME", {"physical_offset": "i64", "size": "i32"})

# One element of a client batch body (RocketMQ MessageDecoder.encodeMessage): this head, the body,
# an i16 length and the properties.
BATCH_ELEMENT: Final = Layout(
    "BATCH_ELEMENT",
    {
        "total_size": "i32",
        "magic": "i32",  # 0
        "body_crc": "i32",  # 0; the broker computes it
        "flag": "i32",
        "body_length": "i32",
    },
)
assert BATCH_ELEMENT.size == 20

# In front of each batch of a stage (shm/state/staging.py): then come the head and the batch.
STAGE_ENTRY: Final = Layout(
    "STAGE_ENTRY",
    {
        "crc": "u32",  # CRC-32 of head and batch
        "head_bytes": "i32",
        "batch_bytes": "i32",
    },
)

# In front of each record of an actor's batch (AppendRecords): then come born host, store host,
# properties and body. Hosts have 8 or 20 bytes; 0 means the broker's own.
INNER_RECORD: Final = Layout(
    "INNER_RECORD",
    {
        "total_size": "i32",  # with this head
        "queue": "i32",  # index of its queue in the command
        "flag": "i32",
        "sys_flag": "i32",
        "born_timestamp": "i64",  # 0: when it is stored
        "reconsume_times": "i32",
        "prepared_transaction_offset": "i64",
        "body_length": "i32",
        "properties_length": "i16",
        "born_host_length": "u8",
        "store_host_length": "u8",
    },
)
assert INNER_RECORD.size == 44

# RocketMQ ConsumeQueue, CQ_STORE_UNIT_SIZE.
CONSUME_QUEUE_UNIT: Final = Layout(
    "CONSUME_QUEUE_UNIT",
    {
        "physical_offset": "i64",  # of the record's first byte
        "size": "i32",  # bytes of the whole record
        "tags_code": "i64",  # Java String.hashCode of the tag, sign-extended; 0 = no tag
    },
)
assert CONSUME_QUEUE_UNIT.size == 20

# RocketMQ StoreCheckpoint; the file is one page, the rest zero.
CHECKPOINT: Final = Layout(
    "CHECKPOINT",
    {
        "physic_msg_timestamp": "i64",
        "logics_msg_timestamp": "i64",
        "index_msg_timestamp": "i64",
        "master_flushed_offset": "i64",
        "confirm_physical_offset": "i64",
    },
)
CHECKPOINT_FILE_BYTES: Final = 4096

# RocketMQ IndexFile.
INDEX_HEADER: Final = Layout(
    "INDEX_HEADER",
    {
        "begin_timestamp": "i64",
        "end_timestamp": "i64",
        "begin_physical_offset": "i64",
        "end_physical_offset": "i64",
        "hash_slot_count": "i32",
        "index_count": "i32",  # the next entry's number; entry 0 is never used
    },
)
assert INDEX_HEADER.size == 40
INDEX_ENTRY: Final = Layout(
    "INDEX_ENTRY",
    {
        "key_hash": "i32",
        "physical_offset": "i64",
        "time_difference": "i32",  # seconds since begin_timestamp
        "previous": "i32",  # number of the previous entry of the same slot; 0 = none
    },
)
assert INDEX_ENTRY.size == 20

# The timer wheel (RocketMQ TimerWheel, TimerLog): for each second a slot, with a chain of units.
TIMER_SLOT: Final = Layout(
    "TIMER_SLOT",
    {
        "second": "i64",  # since 1970; of another one: the slot is empty
        "first": "i64",  # position in the timer log
        "last": "i64",
        "count": "i32",
        "magic": "i32",  # 0
    },
)
assert TIMER_SLOT.size == 32

TIMER_UNIT: Final = Layout(
    "TIMER_UNIT",
    {
        "size": "i32",
        "previous": "i64",  # position of the one before in its slot; -1 = none
        "magic": "i32",
        "base_ms": "i64",
        "after_ms": "i32",  # the slot's time, less base_ms
        "physical_offset": "i64",
        "record_size": "i32",
        "topic_hash": "i32",
        "zero": "i64",
    },
)
assert TIMER_UNIT.size == 52

TIMER_CHECK: Final = Layout(
    "TIMER_CHECK",
    {
        "last_read_ms": "i64",
        "log_end": "i64",
        "queue_offset": "i64",
        "master_queue_offset": "i64",
        "state_version": "i64",
        "version_ms": "i64",
        "version_counter": "i64",
    },
)

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB  # the topic's length takes two bytes
MAGIC_BLANK: Final = 0xCBD43194

SYS_COMPRESSED: Final = 0x1
SYS_MULTI_TAGS: Final = 0x2
SYS_TRANSACTION_MASK: Final = 0xC
SYS_TRANSACTION_PREPARED: Final = 0x4
SYS_TRANSACTION_COMMIT: Final = 0x8
SYS_TRANSACTION_ROLLBACK: Final = 0xC
SYS_BORN_HOST_V6: Final = 0x10
SYS_STORE_HOST_V6: Final = 0x20
SYS_INNER_BATCH: Final = 0x80
SYS_COMPRESSION_SHIFT: Final = 8
SYS_COMPRESSION_MASK: Final = 0x700

TIMER_WHEEL_SLOTS: Final = 1_209_600
TIMER_DEFAULT: Final = 1  # magic of a unit
TIMER_ROLL: Final = 2
TIMER_DELETE: Final = 4
TIMER_MAGIC_MASK: Final = 0xF

PROPERTIES_MAX_BYTES: Final = 32767
# The appended-CRC property: name, 0x01, ten digits, 0x02.
CRC_PROPERTY_NAME: Final = "__CRC32#"
CRC_PROPERTY_BYTES: Final = 20

LAYOUTS: Final = (
    RECORD_HEAD,
    RECORD_MIDDLE,
    BLANK,
    HA_FRAME,
    BATCH_ELEMENT,
    STAGE_ENTRY,
    INNER_RECORD,
    CONSUME_QUEUE_UNIT,
    CHECKPOINT,
    INDEX_HEADER,
    INDEX_ENTRY,
    TIMER_SLOT,
    TIMER_UNIT,
    TIMER_CHECK,
)
_NUMBERS: Final = {
    name: value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, int) and not name.startswith("_")
} | {"TOPIC_MAX": names.TOPIC_MAX, "LONG_TOPIC_MAX": names.LONG_TOPIC_MAX}


def _name_tables() -> str:
    """Which bytes a topic may have, and which properties no client may set, as C."""
    flags = ["01"[chr(byte) in names.STORED_TOPIC_CHARACTERS] for byte in range(256)]
    unkept = sorted(names.UNKEPT_PROPERTIES)
    begins = [f"{ord(name[0]) << 8 | ord(name[1]):#x}" for name in unkept]
    return "\n".join(
        [
            "cdef extern from *:  # rules of protocol/names.py",
            '    """',
            "    static const unsigned char topic_byte[256] = {",
            *(f"        {', '.join(flags[at : at + 32])}," for at in range(0, 256, 32)),
            "    };",
            "    static const char *const unkept_name[] = {",
            *(f'        "{name}",' for name in unkept),
            "    };",
            f"    static const int unkept_bytes[] = {{{', '.join(str(len(n)) for n in unkept)}}};",
            f"    static const unsigned short unkept_begin[] = {{{', '.join(begins)}}};",
            '    """',
            "    const unsigned char topic_byte[256]",
            f"    const char *const unkept_name[{len(unkept)}]",
            f"    const int unkept_bytes[{len(unkept)}]",
            f"    const unsigned short unkept_begin[{len(unkept)}]  # the first two bytes",
            "",
            "cdef enum:",
            f"    UNKEPT_COUNT = {len(unkept)}",
        ]
    )


def as_pxi() -> str:
    """All layouts and numbers for the kernel."""
    head = "# Printed by `python -m cometmq.shm.kernel.layout`; change layout.py, not this file."
    numbers = "\n".join(
        ["cdef enum:  # numbers"] + [f"    {name} = {value:#x}" for name, value in _NUMBERS.items()]
    )
    layouts = [layout.as_pxi() for layout in LAYOUTS]
    return "\n\n".join([head, *layouts, numbers, _name_tables()]) + "\n"


if __name__ == "__main__":
    print(as_pxi(), end="")
