# --- commits of consumer offsets, made as they came, without an object for each ----------------------

from cpython cimport array
from cpython.dict cimport PyDict_GetItem
from cpython.float cimport PyFloat_FromDouble
from cpython.object cimport Py_SIZE

cdef enum:
    COMMAND = 9  # in a head, behind protocol version and request id
    LONE_FRAME = 5  # before the head in a packet of one frame: their number, its size
    QUEUE_ID_MAX = 0x7FFFFFFF  # an int32
    CHANGE_BYTES = 32  # that a change takes at most, beside its names

cdef int64_t NOT_SET = INT64_MIN  # in an array of offsets: nothing was committed there
QUEUE_OFFSET_ABSENT = NOT_SET


cpdef bint is_late(int64_t before, int64_t queue_offset, bint by_member, bint seeks) noexcept:
    """Whether a commit comes too late to change anything."""
    return queue_offset == before or (by_member and not seeks and queue_offset < before)


cpdef bint is_queue_of(config, int64_t queue_id) except -1:
    """Whether a topic of this configuration has that queue, for those who read or those who write."""
    return 0 <= queue_id < config.read_queue_nums or 0 <= queue_id < config.write_queue_nums


@cython.final
cdef class QueueOwners:
    cdef readonly dict owners
    cdef readonly dict epochs
    cdef readonly dict seen

    def __cinit__(self):
        self.owners, self.epochs, self.seen = {}, {}, {}

    cpdef bint owns(self, str member, queue, int64_t epoch) except -1:
        cdef PyObject *owner = PyDict_GetItem(self.owners, queue)
        if owner == NULL or <object>owner != member:
            return False
        return epoch == 0 or epoch == <int64_t>self.epochs[queue]


# --- MessagePack, as far as a commit is made of it ---

cdef struct Cursor:
    const uint8_t *at
    const uint8_t *end


cdef int take_array(Cursor *c) noexcept nogil:
    """How many elements follow; -1 where there is no array of at most 65,535."""
    cdef int count
    if c.at >= c.end:
        return -1
    if 0x90 <= c.at[0] <= 0x9F:
        count = c.at[0] & 0x0F
        c.at += 1
        return count
    if c.at[0] == 0xDC and c.end - c.at >= 3:
        count = load_be16(c.at + 1)
        c.at += 3
        return count
    return -1


cdef bint take_text(Cursor *c, const uint8_t **text, Py_ssize_t *count) noexcept nogil:
    """Of at most 255 bytes, as all names are."""
    cdef Py_ssize_t lead = 1, size
    if c.at >= c.end:
        return False
    if 0xA0 <= c.at[0] <= 0xBF:
        size = c.at[0] & 0x1F
    elif c.at[0] == 0xD9 and c.end - c.at >= 2:
        size = c.at[1]
        lead = 2
    else:
        return False
    if c.end - c.at < lead + size:
        return False
    text[0] = c.at + lead
    count[0] = size
    c.at += lead + size
    return True


cdef bint take_integer(Cursor *c, int64_t *value) noexcept nogil:
    """Not negative, below 2^63."""
    cdef uint8_t kind
    cdef int size
    cdef uint64_t found
    if c.at >= c.end:
        return False
    kind = c.at[0]
    if kind < 0x80:
        value[0] = kind
        c.at += 1
        return True
    if not 0xCC <= kind <= 0xCF:
        return False
    size = 1 << (kind - 0xCC)
    if c.end - c.at < 1 + size:
        return False
    if size == 1:
        found = c.at[1]
    elif size == 2:
        found = load_be16(c.at + 1)
    elif size == 4:
        found = load_be32(c.at + 1)
    else:
        found = load_be64(c.at + 1)
    if found >> 63:
        return False
    value[0] = <int64_t>found
    c.at += 1 + size
    return True


cdef uint8_t *lay_text(uint8_t *at, const uint8_t *text, Py_ssize_t count) noexcept nogil:
    if count < 32:
        at[0] = <uint8_t>(0xA0 | count)
        at += 1
    else:
        at[0] = 0xD9
        at[1] = <uint8_t>count
        at += 2
    memcpy(at, text, count)
    return at + count


cdef uint8_t *lay_integer(uint8_t *at, uint64_t value) noexcept nogil:
    if value < 0x80:
        at[0] = <uint8_t>value
        return at + 1
    if value <= 0xFF:
        at[0] = 0xCC
        at[1] = <uint8_t>value
        return at + 2
    if value <= 0xFFFF:
        at[0] = 0xCD
        store_be16(at + 1, <uint16_t>value)
        return at + 3
    if value <= 0xFFFFFFFFu:
        at[0] = 0xCE
        store_be32(at + 1, <uint32_t>value)
        return at + 5
    at[0] = 0xCF
    store_be64(at + 1, value)
    return at + 9


# --- which of the requests are commits ---


cdef bint is_tagged(bytes packet, Py_ssize_t skip, int tag) noexcept:
    """Whether the command in this packet has that tag, of those below 128."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(packet)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(packet)
    if size < skip + COMMAND + 2:
        return False
    if skip == LONE_FRAME and (p[0] != 1 or load_be32(p + 1) != <uint64_t>(size - LONE_FRAME)):
        return False
    return 0x90 <= p[skip + COMMAND] <= 0x9F and p[skip + COMMAND + 1] == tag


def run_length(list packets not None, Py_ssize_t start, Py_ssize_t skip, int tag,
               Py_ssize_t bytes_max):
    cdef Py_ssize_t at = start, size = 0
    if skip not in (0, LONE_FRAME):
        raise ValueError(f"a head behind {skip} bytes")
    while at < len(packets) and size < bytes_max and is_tagged(<bytes?>packets[at], skip, tag):
        size += PyBytes_GET_SIZE(packets[at])
        at += 1
    return at - start


# --- making them ---

cdef struct Move:
    PyObject *offsets  # the array of the group in that topic; the row has it
    PyObject *key  # of the row, which has it as well
    const uint8_t *topic
    Py_ssize_t topic_bytes
    int64_t queue_id
    int64_t queue_offset


@cython.final
cdef class Commits:
    cdef dict _rows, _topics, _groups, _members, _popped
    cdef object _queue_key, _is_barred
    cdef int _tag, _change_tag, _version
    cdef Grow _changes
    cdef Move *_moves
    cdef Py_ssize_t _moves_max
    cdef list _keys  # of the commit at hand

    def __init__(self, *, dict rows not None, dict topics not None, dict groups not None,
                 dict members not None, dict popped not None, queue_key, int tag, int change_tag,
                 int version, is_barred=None):
        self._rows, self._topics, self._groups = rows, topics, groups
        self._members, self._popped = members, popped
        self._queue_key, self._is_barred = queue_key, is_barred
        self._tag, self._change_tag, self._version = tag, change_tag, version
        if not (0 < tag < 0x80 and 0 < change_tag < 0x80):
            raise ValueError(f"tags {tag} and {change_tag}, of more than a byte")
        self._keys = []

    def __dealloc__(self):
        free(self._changes.data)
        free(self._moves)

    def take(self, list packets not None, Py_ssize_t start, Py_ssize_t skip, Py_ssize_t room,
             double now):
        cdef Py_ssize_t at = start
        cdef list undo = []
        if start < 0 or skip not in (0, LONE_FRAME):
            raise ValueError(f"packet {start}, its head behind {skip} bytes")
        self._changes.size = 0
        try:
            while at < len(packets) and self._take(<bytes?>packets[at], skip, room, now, undo):
                at += 1
        except Exception:
            if at == start and not undo:
                raise
            # What is made is told; whoever goes on hears of the rest.
        return at - start, self._changes.data[:self._changes.size], undo

    cdef bint _take(self, bytes packet, Py_ssize_t skip, Py_ssize_t room, double now,
                    list undo) except -1:
        """Make this one; False if it is not plain, or there is no room for it any more. Then
        nothing is changed."""
        cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(packet)
        cdef Cursor c, rest
        cdef const uint8_t *name = NULL
        cdef const uint8_t *group = NULL
        cdef Py_ssize_t name_bytes = 0, group_bytes = 0
        cdef int fields, count
        if not is_tagged(packet, skip, self._tag) or p[skip] != self._version:
            return False
        c.at, c.end = p + skip + COMMAND, p + PyBytes_GET_SIZE(packet)
        fields = take_array(&c)
        c.at += 1  # the tag
        if not 3 <= fields <= 6 or not take_text(&c, &group, &group_bytes):
            return False
        count = take_array(&c)
        if count < 0:
            return False
        rest = c
        if not pass_over_offsets(&rest, count):
            return False
        if fields > 3 and not take_text(&rest, &name, &name_bytes):
            return False
        if not ends_without_flags(&rest, fields - 4):
            return False
        return self._make(&c, count, group, group_bytes, name, name_bytes, room, now, undo)

    cdef bint _make(self, Cursor *c, int count, const uint8_t *group, Py_ssize_t group_bytes,
                    const uint8_t *name, Py_ssize_t name_bytes, Py_ssize_t room, double now,
                    list undo) except -1:
        cdef str group_name = name_of(group, group_bytes), member = name_of(name, name_bytes)
        cdef QueueOwners owners = None
        cdef PyObject *found
        if group_name is None or member is None:
            return False
        if PyDict_GetItem(self._groups, group_name) == NULL:
            return False
        found = PyDict_GetItem(self._members, group_name)
        if found != NULL:
            owners = (<object>found).queue_owners
        if member:
            if owners is None or PyDict_GetItem(owners.seen, member) == NULL:
                return False
        elif self._is_barred is not None and self._is_barred(group_name):
            return False
        self._keys.clear()
        if not self._judge(c, count, group_name, member, owners):
            return False
        if self._changes.size + self._bytes_at_most(count, group_bytes) > room:
            return False
        if member:
            owners.seen[member] = PyFloat_FromDouble(now)
        self._apply(count, group, group_bytes, name_bytes > 0, undo)
        return True

    cdef bint _judge(self, Cursor *c, int count, str group, str member,
                     QueueOwners owners) except -1:
        """Read the offsets into `_moves`; whether all of them may be moved, and this is all there
        is to do for that."""
        cdef int i
        cdef Move *move
        cdef Move *last = NULL
        cdef str topic = None
        cdef int64_t epoch, before
        cdef object config = None, queue
        if count > self._moves_max:
            self._grow(count)
        for i in range(count):
            move = &self._moves[i]
            take_offset(c, move, &epoch)
            if (last != NULL and last.topic_bytes == move.topic_bytes
                    and memcmp(last.topic, move.topic, move.topic_bytes) == 0):
                move.key, move.offsets = last.key, last.offsets
            else:
                topic = name_of(move.topic, move.topic_bytes)
                if topic is None or not self._find(move, topic, group):
                    return False
                config = <object>PyDict_GetItem(self._topics, topic)
            last = move
            if not is_queue_of(config, move.queue_id):
                return False
            before = offset_at(move)
            if before == NOT_SET or (not member and move.queue_offset < before):
                return False  # there is more to do, or to tell of
            if owners is not None:
                queue = self._queue_key(topic, move.queue_id)
                if member:
                    if not owners.owns(member, queue, epoch):
                        return False
                elif PyDict_GetItem(owners.owners, queue) != NULL:
                    return False
            if self._popped and (group, topic, move.queue_id) in self._popped:
                return False
        return True

    cdef bint _find(self, Move *move, str topic, str group) except -1:
        """Where the group's offsets in the topic are; False if the topic is not known, or the group
        has none there."""
        cdef str key
        cdef PyObject *row
        if PyDict_GetItem(self._topics, topic) == NULL:
            return False
        key = f"{topic}@{group}"
        row = PyDict_GetItem(self._rows, key)
        if row == NULL:
            return False
        near = (<object>row).near
        if not isinstance(near, array.array) or (<array.array>near).ob_descr.typecode != b'q':
            raise TypeError(f"offsets of {key} are no array of 64-bit integers")
        self._keys.append(key)
        move.key, move.offsets = <PyObject *>key, <PyObject *>near
        return True

    cdef Py_ssize_t _bytes_at_most(self, int count, Py_ssize_t group_bytes) noexcept nogil:
        cdef Py_ssize_t size = count * (group_bytes + CHANGE_BYTES)
        cdef int i
        for i in range(count):
            size += self._moves[i].topic_bytes
        return size

    cdef int _apply(self, int count, const uint8_t *group, Py_ssize_t group_bytes, bint by_member,
                    list undo) except -1:
        cdef int i
        cdef Move *move
        cdef int64_t before
        cdef uint8_t *at
        reserve_in(&self._changes, self._bytes_at_most(count, group_bytes))
        for i in range(count):
            move = &self._moves[i]
            before = offset_at(move)
            if is_late(before, move.queue_offset, by_member, False):
                continue
            undo.append((<object>move.key, move.queue_id, before))
            (<array.array><object>move.offsets).data.as_longlongs[move.queue_id] = move.queue_offset
            at = self._changes.data + self._changes.size
            at[0], at[1] = 0x95, <uint8_t>self._change_tag
            at = lay_text(at + 2, group, group_bytes)
            at = lay_text(at, move.topic, move.topic_bytes)
            at = lay_integer(at, <uint64_t>move.queue_id)
            at = lay_integer(at, <uint64_t>move.queue_offset)
            self._changes.size = at - self._changes.data
        return 0

    cdef int _grow(self, Py_ssize_t count) except -1:
        cdef Move *grown = <Move *>realloc(self._moves, count * sizeof(Move))
        if grown == NULL:
            raise MemoryError(f"{count} offsets of a commit")
        self._moves, self._moves_max = grown, count
        return 0


cdef bint take_offset(Cursor *c, Move *move, int64_t *epoch) noexcept nogil:
    """One entry of a commit: topic, queue id, queue offset, and maybe the epoch."""
    cdef int fields = take_array(c)
    epoch[0] = 0
    if not 3 <= fields <= 4:
        return False
    if not take_text(c, &move.topic, &move.topic_bytes) or not take_integer(c, &move.queue_id):
        return False
    if move.queue_id > QUEUE_ID_MAX or not take_integer(c, &move.queue_offset):
        return False
    return fields == 3 or take_integer(c, epoch)


cdef bint pass_over_offsets(Cursor *c, int count) noexcept nogil:
    cdef Move move
    cdef int64_t epoch
    cdef int i
    for i in range(count):
        if not take_offset(c, &move, &epoch):
            return False
    return True


cdef bint ends_without_flags(Cursor *c, int flags) noexcept nogil:
    """Whether so many flags follow, all false, and nothing else."""
    cdef int i
    for i in range(flags):
        if c.at >= c.end or c.at[0] != 0xC2:
            return False
        c.at += 1
    return c.at == c.end


cdef inline int64_t offset_at(Move *move) noexcept:
    """What was committed in that queue."""
    cdef array.array near = <array.array><object>move.offsets
    return near.data.as_longlongs[move.queue_id] if move.queue_id < Py_SIZE(near) else NOT_SET


cdef str name_of(const uint8_t *text, Py_ssize_t count):
    """None for what is no UTF-8."""
    try:
        return PyUnicode_DecodeUTF8(<const char *>text, count, NULL) if count else ""
    except UnicodeDecodeError:
        return None
