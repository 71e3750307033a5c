# --- what the kernel raises, and the sizes it was compiled with ---------------------------------------


class BatchFull(Exception):
    """The message does not fit into this batch any more."""


class BatchIllegal(ValueError):
    """A batch body that is not what it says; nothing of it was taken."""


class RecordTooLarge(ValueError):
    """A message over the limits; args: (what, its size, the limit)."""

    def __str__(self):
        what, size, limit = self.args
        return f"{what} of {size} bytes, at most {limit}"


class RecordDamaged(Exception):
    """A record whose bytes contradict themselves; args: (reason, position in the buffer)."""


def layout_sizes():
    """Sizes as the kernel was compiled with them; a test compares them with shm/kernel/layout.py."""
    return {
        "RECORD_HEAD": RECORD_HEAD_BYTES,
        "RECORD_MIDDLE": RECORD_MIDDLE_BYTES,
        "BATCH_ELEMENT": BATCH_ELEMENT_BYTES,
        "INNER_RECORD": INNER_RECORD_BYTES,
        "CONSUME_QUEUE_UNIT": CONSUME_QUEUE_UNIT_BYTES,
        "INDEX_HEADER": INDEX_HEADER_BYTES,
        "INDEX_ENTRY": INDEX_ENTRY_BYTES,
    }
