# --- Arrow columns as batch bodies -------------------------------------------------------------------
#
# The way back of columns.pxi, for the sink: rows of Arrow columns become RocketMQ batch bodies, one
# for each queue, without a Python object a row.


class RowIllegal(ValueError):
    """A row that cannot become a message; args: (row in the batch, column, what is wrong)."""


NO_QUEUE = -2147483648  # no queue has this id
cdef int32_t _NO_QUEUE = -2147483648


cdef class ArrowText:
    """A column of text or bytes with 32-bit offsets; what its buffers say is checked before use.

    Args:
        validity: bits, or None where nothing is null.
        offsets: `start + rows + 1` of them.
        data: or None where all is empty.
        start: the first row's place in these buffers.
        size: of what the offsets point into, where that is no data.
    """

    cdef list _kept
    cdef const uint8_t *_valid
    cdef const int32_t *_offsets
    cdef const uint8_t *_data
    cdef Py_ssize_t _start
    cdef readonly Py_ssize_t rows

    def __init__(self, validity, offsets not None, data, Py_ssize_t start, Py_ssize_t rows,
                 Py_ssize_t size=0):
        cdef Holder places = Holder(offsets), bits, content
        cdef Py_ssize_t row
        if start < 0 or rows < 0 or places.view.len // 4 < start + rows + 1:
            raise ValueError(f"{places.view.len} bytes of offsets for {start} + {rows} rows")
        self._kept = [places]
        self._offsets = <const int32_t *>places.view.buf
        if validity is not None:
            bits = Holder(validity)
            if 8 * bits.view.len < start + rows:
                raise ValueError(f"{bits.view.len} bytes of validity for {start} + {rows} rows")
            self._kept.append(bits)
            self._valid = <const uint8_t *>bits.view.buf
        if data is not None:
            content = Holder(data)
            self._kept.append(content)
            size = content.view.len
            self._data = <const uint8_t *>content.view.buf
        for row in range(start, start + rows):
            if not 0 <= self._offsets[row] <= self._offsets[row + 1]:
                raise ValueError(f"the offsets of row {row - start} do not ascend")
        if rows and self._offsets[start + rows] > size:
            raise ValueError(f"offsets up to {self._offsets[start + rows]} in {size} bytes")
        self._start = start
        self.rows = rows

    cdef inline bint has(self, Py_ssize_t row) noexcept nogil:
        row += self._start
        return self._valid == NULL or (self._valid[row >> 3] >> (row & 7)) & 1

    cdef inline const uint8_t *text(self, Py_ssize_t row, Py_ssize_t *count) noexcept nogil:
        row += self._start
        count[0] = self._offsets[row + 1] - self._offsets[row]
        return self._data + self._offsets[row]


cdef class RowEncoder:
    """Turns rows into batch bodies, one open body for each slot: a queue, or "any" of a topic.

    Rows of one slot keep their order. A body leaves when the next message would take it over
    `batch_bytes`; one message always fits.
    """

    cdef list _encoders
    cdef Py_ssize_t _batch_bytes, _body_max
    cdef bint _multi_tags
    cdef Grow _scratch
    cdef readonly Py_ssize_t size  # bytes in open bodies

    def __cinit__(self, *, Py_ssize_t batch_bytes=262144, Py_ssize_t body_max=4194304,
                  bint multi_tags=False):
        if batch_bytes < 1 or body_max < 1:
            raise ValueError(f"limits of {batch_bytes} and {body_max} bytes")
        self._batch_bytes = batch_bytes
        self._body_max = body_max
        self._multi_tags = multi_tags
        self._encoders = []

    def __dealloc__(self):
        free(self._scratch.data)

    def encode(
        self, Py_ssize_t rows, const int32_t[::1] topics, list routes not None,
        const int32_t[::1] queue_ids, ArrowText ordering, ArrowText body not None, ArrowText keys,
        ArrowText tags, properties=None, const int32_t[::1] flags=None,
    ):
        """Add rows; the bodies that became full: [(slot, body, count)].

        Args:
            topics: each row's index in `routes`; None: all have the first.
            routes: (first slot, queues, slot of each queue id or -1 as int32): a row with a queue
                id goes to its slot, one with an ordering key to that of RocketMQ's hash, any other
                to the slot behind the last queue.
            queue_ids: NO_QUEUE where there is none.
            properties: (ArrowText with the offsets into the next two, names, values).
            flags: None: 0 for all.

        Raises RowIllegal. Rows before that one may have been added.
        """
        cdef Py_ssize_t row, count = 0, slot, topic
        cdef const uint8_t *text
        cdef list full = []
        _check_rows(rows, topics, queue_ids, flags, (ordering, body, keys, tags))
        for row in range(rows):
            topic = 0 if topics is None else topics[row]
            if not 0 <= topic < len(routes):
                raise ValueError(f"row {row}: topic {topic} of {len(routes)} topics")
            slot = self._slot(routes[topic], row, queue_ids, ordering)
            if not body.has(row):
                raise RowIllegal(row, "body", "it is null")
            text = body.text(row, &count)
            if count == 0:
                raise RowIllegal(row, "body", "a message needs a body of at least one byte")
            if count > self._body_max:
                raise RowIllegal(row, "body", f"{count} bytes, at most {self._body_max}")
            self._scratch.size = 0
            if tags is not None and not self._multi_tags:
                self._check_tag(row, tags)
            self._put(row, "tags", b"TAGS", 4, tags)
            self._put(row, "keys", b"KEYS", 4, keys)
            if properties is not None:
                self._put_properties(row, properties)
            if self._scratch.size + ID_BYTES + 10 > PROPERTIES_MAX_BYTES:
                raise RowIllegal(
                    row, "properties", f"{self._scratch.size + ID_BYTES + 10} bytes with keys, "
                    f"tags and id, at most {PROPERTIES_MAX_BYTES}")
            self._add_row(row, slot, text, count, 0 if flags is None else flags[row], full)
        return full

    cdef int _add_row(self, Py_ssize_t row, Py_ssize_t slot, const uint8_t *text,
                      Py_ssize_t count, int32_t flag, list full) except -1:
        """Put a body, with the properties in the scratch, into its slot's batch."""
        cdef BatchEncoder encoder
        cdef Py_ssize_t size_before
        while slot >= len(self._encoders):
            self._encoders.append(None)
        encoder = self._encoders[slot]
        if encoder is None:
            encoder = self._encoders[slot] = BatchEncoder(size_max=self._batch_bytes)
        size_before = encoder.size
        try:
            encoder._add(text, count, self._scratch.data, self._scratch.size, flag)
        except BatchFull:
            full.append((slot, *self._take(encoder)))
            size_before = 0
            encoder._add(text, count, self._scratch.data, self._scratch.size, flag)
        self.size += encoder.size - size_before
        return 0

    def drain(self):
        """All bodies that are open, by slot: [(slot, body, count)]. Then there are no slots."""
        cdef BatchEncoder encoder
        cdef list open_bodies = []
        for slot, encoder in enumerate(self._encoders):
            if encoder is not None and encoder.count:
                open_bodies.append((slot, *self._take(encoder)))
        self._encoders.clear()
        return open_bodies

    cdef tuple _take(self, BatchEncoder encoder):
        cdef Py_ssize_t count = encoder.count
        self.size -= encoder.size
        return encoder.take(), count

    cdef Py_ssize_t _slot(self, tuple route, Py_ssize_t row, const int32_t[::1] queue_ids,
                          ArrowText ordering) except -1:
        cdef Py_ssize_t first = route[0], queues = route[1], count
        cdef const int32_t[::1] by_id
        cdef const uint8_t *text
        cdef int32_t queue_id, found
        if first < 0 or queues < 1:
            raise ValueError(f"a route to {queues} queues from slot {first} on")
        if queue_ids is not None and queue_ids[row] != _NO_QUEUE:
            queue_id, by_id = queue_ids[row], route[2]
            found = by_id[queue_id] if 0 <= queue_id < by_id.shape[0] else -1
            if found < 0:
                raise RowIllegal(row, "queue_id", f"there is no queue {queue_id} that may be "
                                 f"written: they are 0 to {by_id.shape[0] - 1}")
            return first + found
        if ordering is not None and ordering.has(row):
            text = ordering.text(row, &count)
            found = hash_utf8(text, count)
            return first + (found if found >= 0 else -<int64_t>found) % queues
        return first + queues

    cdef int _check_tag(self, Py_ssize_t row, ArrowText tags) except -1:
        cdef Py_ssize_t count
        cdef const uint8_t *text
        if not tags.has(row):
            return 0
        text = tags.text(row, &count)
        if has_two_bars(text, count):
            raise RowIllegal(row, "tags", f"{decode_text(text, min(count, 200))!r}: a message has "
                             "one tag; it is subscriptions that name several, joined by \"||\"")
        return 0

    cdef int _put(self, Py_ssize_t row, str column, const char *name, Py_ssize_t name_bytes,
                  ArrowText values) except -1:
        cdef Py_ssize_t count
        cdef const uint8_t *text
        if values is None or not values.has(row):
            return 0
        text = values.text(row, &count)
        return self._put_pair(row, column, <const uint8_t *>name, name_bytes, text, count)

    cdef int _put_pair(self, Py_ssize_t row, str column, const uint8_t *name,
                       Py_ssize_t name_bytes, const uint8_t *value, Py_ssize_t count) except -1:
        """Empty values are left out: nobody could read them."""
        if count == 0:
            return 0
        if (memchr(name, 1, name_bytes) or memchr(name, 2, name_bytes) or memchr(value, 1, count)
                or memchr(value, 2, count)):
            raise RowIllegal(row, column, f"{decode_text(name, name_bytes)} = "
                             f"{decode_text(value, min(count, 200))!r} holds 0x01 or 0x02, which "
                             "separate properties")
        put_bytes(&self._scratch, name, name_bytes)
        put_bytes(&self._scratch, b"\x01", 1)
        put_bytes(&self._scratch, value, count)
        put_bytes(&self._scratch, b"\x02", 1)
        return 0

    cdef int _put_properties(self, Py_ssize_t row, tuple properties) except -1:
        cdef ArrowText places = properties[0], names = properties[1], values = properties[2]
        cdef Py_ssize_t at, end, name_bytes = 0, count = 0
        cdef const uint8_t *name
        cdef const uint8_t *value
        if row >= places.rows:
            raise ValueError(f"{places.rows} rows of properties, row {row} wanted")
        if not places.has(row):
            return 0
        at = places._offsets[places._start + row]
        end = places._offsets[places._start + row + 1]
        if end > names.rows or end > values.rows:
            raise ValueError(f"row {row}: properties up to {end} of {names.rows}, {values.rows}")
        while at < end:
            name = names.text(at, &name_bytes)
            if name_bytes == 0:
                raise RowIllegal(row, "properties", "a property without a name")
            if is_reserved(name, name_bytes):
                text = decode_text(name, name_bytes)
                if values.has(at):
                    value = values.text(at, &count)
                    shown = repr(decode_text(value, min(count, 200)))
                else:
                    shown = "null"
                raise RowIllegal(row, "properties", f"{text} = {shown}: that name is reserved; "
                                 "keys and tags have columns of their own")
            if is_unkept(name, name_bytes):
                raise RowIllegal(
                    row, "properties", f"{decode_text(name, name_bytes)}: rows are sent for "
                    "now, without timers and transactions, and it would be delivered at once; leave "
                    "that property out")
            if values.has(at):
                value = values.text(at, &count)
                self._put_pair(row, "properties", name, name_bytes, value, count)
            at += 1
        return 0


cdef bint is_reserved(const uint8_t *name, Py_ssize_t count) noexcept:
    """As the producer has it: what has an argument of its own."""
    return ((count == 4 and (memcmp(name, b"TAGS", 4) == 0 or memcmp(name, b"KEYS", 4) == 0
                             or memcmp(name, b"WAIT", 4) == 0))
            or (count == 8 and memcmp(name, b"UNIQ_KEY", 8) == 0))


cdef bint has_two_bars(const uint8_t *text, Py_ssize_t count) noexcept:
    """As names.check_tag has it: an expression, and no tag."""
    cdef Py_ssize_t at
    for at in range(count - 1):
        if text[at] == b"|" and text[at + 1] == b"|":
            return True
    return False


cdef bint is_unkept(const uint8_t *name, Py_ssize_t count) noexcept:
    """As the producer has it: what would be delivered at once, and should not be."""
    return ((count == 5 and memcmp(name, b"DELAY", 5) == 0)
            or (count == 8 and memcmp(name, b"TRAN_MSG", 8) == 0)
            or (count == 14 and memcmp(name, b"TIMER_DELAY_MS", 14) == 0)
            or (count == 15 and memcmp(name, b"TIMER_DELAY_SEC", 15) == 0)
            or (count == 16 and memcmp(name, b"TIMER_DELIVER_MS", 16) == 0)
            or (count == 17 and memcmp(name, b"TIMER_DEL_UNIQKEY", 17) == 0))


cdef int _check_rows(Py_ssize_t rows, const int32_t[::1] topics, const int32_t[::1] queue_ids,
                     const int32_t[::1] flags, tuple columns) except -1:
    cdef ArrowText column
    if topics is not None and topics.shape[0] < rows:
        raise ValueError(f"{topics.shape[0]} topics for {rows} rows")
    if queue_ids is not None and queue_ids.shape[0] < rows:
        raise ValueError(f"{queue_ids.shape[0]} queue ids for {rows} rows")
    if flags is not None and flags.shape[0] < rows:
        raise ValueError(f"{flags.shape[0]} flags for {rows} rows")
    for column in columns:
        if column is not None and column.rows < rows:
            raise ValueError(f"a column of {column.rows} rows, {rows} wanted")
    return 0
