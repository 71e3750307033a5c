# --- filter maps: what a filter surely does not want, looked up instead of evaluated ----------------
#
# shm/derived/filter_maps.py has the files. A bit is 0 only if the queue's record of that offset was
# found whole at its place and the filter is not TRUE of it. All else is 1: evaluate.

cdef enum:
    BLOCK_BITS_AT = FILTER_BLOCK_BYTES
    BLOCK_CRC_FROM = FILTER_BLOCK_CRC + 4


cdef inline uint32_t crc_of_block(const uint8_t *block) noexcept nogil:
    return crc_of(0, block + BLOCK_CRC_FROM, FILTER_BLOCK_SIZE - BLOCK_CRC_FROM)


cdef int take_identity(bytes identity, uint64_t *high, uint64_t *low) except -1:
    if len(identity) != 16:
        raise ValueError(f"an identity of {len(identity)} bytes")
    high[0] = load_be64(<const uint8_t *>PyBytes_AS_STRING(identity))
    low[0] = load_be64(<const uint8_t *>PyBytes_AS_STRING(identity) + 8)
    return 0


cdef struct Told:  # the block that is looked at, by whoever goes through a queue
    const uint8_t *bits
    uint64_t first, end  # queue offsets that it tells of
    uint64_t next  # from here on it is another block


@cython.final
cdef class FilterMap:
    """Blocks of the map of one queue and filter, as who reads the queue has taken them.

    Args:
        identity: 16 bytes; blocks that name another are not believed.
    """

    cdef uint64_t _high, _low
    cdef dict _blocks  # number -> bytes, which have been checked

    def __cinit__(self, bytes identity not None):
        take_identity(identity, &self._high, &self._low)
        self._blocks = {}

    def take(self, int64_t number, bytes block not None):
        """A block as it was read, in place of what was taken before. Of so many messages it tells;
        0, and it tells of none, unless it is whole and this map's."""
        cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(block)
        cdef int32_t count
        self._blocks.pop(number, None)
        if (len(block) != FILTER_BLOCK_SIZE
                or load_be32(at + FILTER_BLOCK_MAGIC) != <uint32_t>MAGIC_FILTER_BLOCK
                or load_be32(at + FILTER_BLOCK_CRC) != crc_of_block(at)
                or load_be64(at + FILTER_BLOCK_IDENTITY_HIGH) != self._high
                or load_be64(at + FILTER_BLOCK_IDENTITY_LOW) != self._low
                or <int64_t>load_be64(at + FILTER_BLOCK_NUMBER) != number):
            return 0
        count = <int32_t>load_be32(at + FILTER_BLOCK_COUNT)
        if not 0 <= count <= FILTER_BLOCK_ENTRIES:
            return 0
        self._blocks[number] = block
        return count

    def told(self, int64_t number):
        """Of so many messages of a block it tells."""
        block = self._blocks.get(number)
        if block is None:
            return 0
        return <int32_t>load_be32(
            <const uint8_t *>PyBytes_AS_STRING(<bytes>block) + FILTER_BLOCK_COUNT)

    def __len__(self):
        return len(self._blocks)

    cdef int look_up(self, Told *told, int64_t index) except -1:
        """The block of a queue offset."""
        cdef int64_t number = index // FILTER_BLOCK_ENTRIES
        cdef const uint8_t *at
        told.first = number * FILTER_BLOCK_ENTRIES
        told.next, told.end = told.first + <uint64_t>FILTER_BLOCK_ENTRIES, 0
        block = self._blocks.get(number)
        if block is not None:
            at = <const uint8_t *>PyBytes_AS_STRING(<bytes>block)
            told.end = told.first + <int32_t>load_be32(at + FILTER_BLOCK_COUNT)
            told.bits = at + BLOCK_BITS_AT
        return 0


cdef inline bint tells(Told *told, uint64_t index) noexcept nogil:
    """Whether the block tells that the message of an offset at or behind the last one is not
    wanted."""
    if index >= told.end:
        return False
    index -= told.first
    return not told.bits[index >> 3] >> (index & 7) & 1


cdef inline bint tells_ahead(Told *told, int64_t index) noexcept nogil:
    """The same of the message that `fetch_ahead` would fetch."""
    return tells(told, <uint64_t>index + FETCHED_AHEAD)


cdef inline bint is_surely_unwanted(FilterMap map, Told *told, int64_t index) except -1:
    """To be asked of ascending queue offsets. None tells of nothing."""
    if map is None:
        return False
    if <uint64_t>index >= told.next:
        map.look_up(told, index)
    return tells(told, index)
