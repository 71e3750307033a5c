# --- filter maps: a block in the making -------------------------------------------------------------

cdef enum:
    CLOCK_EVERY = 32  # records between two looks at the clock

cdef int64_t TIME_NS_MAX = 1_000_000_000_000


@cython.final
cdef class FilterBlock:
    """A block of a filter's map, filled from its first message on.

    Args:
        identity: of the map, 16 bytes.
        number: of the block in it.
    """

    cdef uint8_t _block[FILTER_BLOCK_SIZE]
    cdef readonly int64_t number
    cdef readonly int64_t next_offset  # queue offset: what comes next

    def __cinit__(self, bytes identity not None, int64_t number):
        cdef uint64_t high, low
        take_identity(identity, &high, &low)
        if not 0 <= number <= _QUEUE_OFFSET_MAX // FILTER_BLOCK_ENTRIES:
            raise ValueError(f"block {number}")
        self.number = number
        self.next_offset = number * FILTER_BLOCK_ENTRIES
        memset(self._block, 0, BLOCK_BITS_AT)
        memset(&self._block[BLOCK_BITS_AT], 0xFF, FILTER_BLOCK_SIZE - BLOCK_BITS_AT)
        store_be32(self._block, MAGIC_FILTER_BLOCK)
        store_be64(&self._block[FILTER_BLOCK_IDENTITY_HIGH], high)
        store_be64(&self._block[FILTER_BLOCK_IDENTITY_LOW], low)
        store_be64(&self._block[FILTER_BLOCK_NUMBER], number)

    @property
    def end(self):
        """The queue offset behind its last message."""
        return (self.number + 1) * FILTER_BLOCK_ENTRIES

    def pass_over(self, int64_t end):
        """Whatever lies below that queue offset is to be evaluated."""
        self.next_offset = max(self.next_offset, min(end, self.end))

    def sealed(self):
        """Its bytes, as they stand in the file."""
        store_be32(&self._block[FILTER_BLOCK_COUNT],
                   <uint32_t>(self.next_offset - self.number * FILTER_BLOCK_ENTRIES))
        store_be32(&self._block[FILTER_BLOCK_CRC], crc_of_block(self._block))
        return PyBytes_FromStringAndSize(<char *>self._block, FILTER_BLOCK_SIZE)

    def fill(
        self, LogView log not None, const uint8_t[::1] units not None, int64_t first_index,
        int64_t end, int64_t log_min, int64_t log_max, bytes topic not None, int32_t queue_id,
        Filter filter not None, int64_t time_ns,
    ):
        """Judge the records of the ConsumeQueue entries from `next_offset` on, until the end, the
        block's end, or the time is over, at least one.

        Args: see `gather`.

        Returns the start of a segment that has to be mapped first, -1 without.
        """
        cdef Reach reach = Reach(log_min, log_max, log.segment_bytes)
        cdef Queue queue = queue_of(topic, queue_id)
        cdef int64_t gone_by = monotonic_ns() + max(0, min(time_ns, TIME_NS_MAX))
        cdef int64_t begin = self.next_offset, phys
        cdef int32_t size
        cdef const uint8_t *unit
        cdef const uint8_t *at
        cdef Record record
        end = min(end, self.end)
        check_units(units.shape[0], first_index, begin, end)
        while self.next_offset < end:
            unit = &units[(self.next_offset - first_index) * CONSUME_QUEUE_UNIT_BYTES]
            phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
            size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
            if place_of(phys, size, &reach) == PLACE_READ:
                at = log.at(phys)
                if at == NULL:
                    return phys - phys % reach.segment_bytes
                fetch_ahead(at, phys, unit, end - self.next_offset)
                if follow_wanted(at, phys, size, &queue, self.next_offset, False, filter,
                                 &record) == REC_UNWANTED:
                    self._clear(self.next_offset)
            self.next_offset += 1
            if ((self.next_offset - begin) % CLOCK_EVERY == 0
                    and monotonic_ns() >= gone_by):
                break
        return -1

    cdef inline void _clear(self, int64_t queue_offset) noexcept nogil:
        cdef int64_t bit = queue_offset - self.number * FILTER_BLOCK_ENTRIES
        self._block[BLOCK_BITS_AT + (bit >> 3)] &= <uint8_t>~(1 << (bit & 7))
