# --- the client's side: batches out, messages in ---------------------------------------------------

from cometmq.protocol.compression import unfold as _unfold
from cometmq.protocol.errors import BodyIllegal as _BodyIllegal

cdef uint32_t id_counter = 0
cdef int64_t month_start_ms():
    now = _time.localtime()
    return <int64_t>(_time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1)) * 1000)


cdef bytes process_token = _os.urandom(8)


cdef enum:
    ALIKE_BYTES = 1024  # of tags and keys, for messages that come the quick way


cdef class BatchEncoder:
    """Builds one batch body: messages for one queue, in RocketMQ's batch layout.

    Every message gets a UNIQ_KEY property, RocketMQ's client-made id, unless `unique_keys` is off.
    """

    def __cinit__(self, *, Py_ssize_t size_max=262144, Py_ssize_t count_max=65536,
                  bint unique_keys=True):
        cdef Py_ssize_t i
        cdef const uint8_t *token = <const uint8_t *>PyBytes_AS_STRING(process_token)
        if size_max < 1 or count_max < 1:
            raise ValueError(f"limits of {size_max} bytes and {count_max} messages")
        self._size_max = size_max
        self._count_max = count_max
        self._unique_keys = unique_keys
        self._capacity = min(size_max, 65536) + 256
        self._buffer = <uint8_t *>PyMem_Malloc(self._capacity)
        if self._buffer == NULL:
            raise MemoryError
        # Where RocketMQ has the address and the class loader's hash stand random bytes of this
        # process: ids stay unique behind NAT and in containers, where addresses repeat.
        for i in range(4):
            write_hex(self._prefix + 2 * i, token[i], 2)
            write_hex(self._prefix + 12 + 2 * i, token[4 + i], 2)
        write_hex(self._prefix + 8, <uint64_t>getpid() & 0xFFFF, 4)
        self._month_start = month_start_ms()
        self._last_text = b""

    def __dealloc__(self):
        PyMem_Free(self._buffer)

    cdef int _reserve(self, Py_ssize_t extra) except -1:
        cdef Py_ssize_t wanted = self.size + extra
        cdef uint8_t *grown
        if wanted > self._capacity:
            wanted = max(wanted, 2 * self._capacity)
            grown = <uint8_t *>PyMem_Realloc(self._buffer, wanted)
            if grown == NULL:
                raise MemoryError
            self._buffer = grown
            self._capacity = wanted
        return 0

    cdef Py_ssize_t _add(self, const uint8_t *body, Py_ssize_t body_bytes,
                         const uint8_t *properties, Py_ssize_t given, int32_t flag) except -1:
        cdef Py_ssize_t id_bytes = (ID_BYTES + 10) if self._unique_keys else 0
        cdef Py_ssize_t properties_bytes = id_bytes + given
        cdef Py_ssize_t total = BATCH_ELEMENT_BYTES + body_bytes + 2 + properties_bytes
        cdef uint8_t *at
        global id_counter
        if properties_bytes > PROPERTIES_MAX_BYTES:
            raise ValueError(
                f"properties of {properties_bytes} bytes, at most {PROPERTIES_MAX_BYTES}")
        if total > ELEMENT_MAX:
            raise ValueError(f"message of {total} bytes, at most {ELEMENT_MAX}")
        if self.count and (self.size + total > self._size_max or self.count >= self._count_max):
            raise BatchFull(self.count)
        self._reserve(total)
        at = self._buffer + self.size
        store_be32(at + BATCH_ELEMENT_TOTAL_SIZE, <uint32_t>total)
        store_be32(at + BATCH_ELEMENT_MAGIC, 0)
        store_be32(at + BATCH_ELEMENT_BODY_CRC, 0)
        store_be32(at + BATCH_ELEMENT_FLAG, <uint32_t>flag)
        store_be32(at + BATCH_ELEMENT_BODY_LENGTH, <uint32_t>body_bytes)
        at += BATCH_ELEMENT_BYTES
        memcpy(at, body, body_bytes)
        at += body_bytes
        store_be16(at, <uint16_t>properties_bytes)
        at += 2
        if id_bytes:
            if self.count % 64 == 0:
                self._stamp = <uint32_t>max(0, now_ms() - self._month_start)
            memcpy(at, b"UNIQ_KEY\x01", 9)
            memcpy(at + 9, self._prefix, 20)
            write_hex(at + 29, self._stamp, 8)
            write_hex(at + 37, id_counter & 0xFFFF, 4)
            id_counter += 1
            at[41] = 2
            at += id_bytes
        memcpy(at, properties, given)
        self.size += total
        self.count += 1
        return self.count - 1

    cdef Py_ssize_t _add_alike(self, bytes body, const uint8_t *more, Py_ssize_t count) except -2:
        """A message with the tags and keys of the one before, and a property of its own. -1: that
        is too long for this way."""
        cdef uint8_t text[ALIKE_BYTES + TIMING_BYTES]
        cdef Py_ssize_t alike = len(self._last_text)
        if alike > ALIKE_BYTES:
            return -1
        memcpy(text, PyBytes_AS_STRING(self._last_text), alike)
        memcpy(text + alike, more, count)
        return self._add(<const uint8_t *>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), text,
                         alike + count, 0)

    def add(self, const uint8_t[::1] body not None, str tags=None, str keys=None,
            dict properties=None, int32_t flag=0):
        """The message's index in the batch; BatchFull when it does not fit any more."""
        cdef bytes text
        if properties is not None:
            text = encode_properties(tags, keys, properties)
        elif tags is self._last_tags and keys is self._last_keys:
            text = self._last_text
        else:
            text = encode_properties(tags, keys, None)
            self._last_tags, self._last_keys, self._last_text = tags, keys, text
        return self._add(&body[0] if body.shape[0] else NULL, body.shape[0],
                         <const uint8_t *>PyBytes_AS_STRING(text), len(text), flag)

    def add_many(self, bodies not None, Py_ssize_t start=0, str tags=None, str keys=None,
                 dict properties=None, int32_t flag=0):
        """Add bodies[start:] until the batch is full; the index of the first not added."""
        cdef bytes text = encode_properties(tags, keys, properties)
        cdef Py_ssize_t index = start, count = len(bodies)
        cdef Py_buffer view
        while index < count:
            PyObject_GetBuffer(bodies[index], &view, PyBUF_SIMPLE)
            try:
                self._add(<const uint8_t *>view.buf, view.len,
                          <const uint8_t *>PyBytes_AS_STRING(text), len(text), flag)
            except BatchFull:
                break
            finally:
                PyBuffer_Release(&view)
            index += 1
        return index

    def take(self):
        """The batch body; the encoder is empty again."""
        cdef bytes body = PyBytes_FromStringAndSize(<const char *>self._buffer, self.size)
        self.size = 0
        self.count = 0
        return body


cdef class QuickSend:
    """A producer's `send` as long as there is an open batch that takes the message.

    Between looking the batch up and adding to it nothing happens that could let another thread in,
    so no lock is taken: who closes a batch takes it out of `open` before he counts its messages.

    Args:
        open: (batch, its encoder, its delay level; below 0: each has a time of its own) by topic.
        later: the same, of what waits before it comes into its queue.
        receipt: made of batch and index.
        slow: `send` for everything else.
    """

    cdef dict _open, _later
    cdef object _receipt, _slow

    def __init__(self, dict open not None, dict later not None, receipt, slow):
        self._open, self._later, self._receipt, self._slow = open, later, receipt, slow

    def send(self, topic, body, *, tags=None, keys=None, properties=None, ordering_key=None,
             queue_id=None, flag=0, wait=True, delay_level=0, deliver_at=None,
             deliver_after=None):
        """See Producer.send."""
        cdef tuple entry
        cdef BatchEncoder encoder
        cdef uint8_t timing[TIMING_BYTES]
        cdef Py_ssize_t index = -1, timing_bytes = 0
        if deliver_at is not None or deliver_after is not None:
            # Before a batch is looked up: a time zone may be Python, and let other threads in.
            timing_bytes = put_timing(timing, deliver_at, deliver_after)
        if (PyBytes_CheckExact(body) and PyBytes_GET_SIZE(body) and type(topic) is str
                and wait is True and flag == 0 and type(delay_level) is int and properties is None
                and ordering_key is None and queue_id is None
                and (tags is None or type(tags) is str) and (keys is None or type(keys) is str)):
            found = (self._later if timing_bytes or delay_level != 0 else self._open).get(topic)
            if found is not None:
                entry = found
                encoder = entry[1]
                if (tags is encoder._last_tags and keys is encoder._last_keys
                        and (delay_level == 0 and entry[2] < 0 if timing_bytes
                             else delay_level == entry[2])):
                    try:
                        index = encoder._add_alike(body, timing, timing_bytes)
                    except (BatchFull, ValueError):
                        pass  # the other way knows what to do
                    if index >= 0:
                        return self._receipt(entry[0], index)
        return self._slow(
            topic, body, tags=tags, keys=keys, properties=properties, ordering_key=ordering_key,
            queue_id=queue_id, flag=flag, wait=wait, delay_level=delay_level,
            deliver_at=deliver_at, deliver_after=deliver_after)


cdef bytes property_text(str name, str value):
    cdef bytes raw_name = name.encode(), raw_value = value.encode()
    for raw in (raw_name, raw_value):
        if b"\x01" in raw or b"\x02" in raw:
            raise ValueError(f"property {name!r} holds 0x01 or 0x02, which separate properties")
    return raw_name + b"\x01" + raw_value + b"\x02"


def encode_properties(str tags=None, str keys=None, dict properties=None):
    """RocketMQ's property text of a message. Empty values are left out: nobody could read them."""
    cdef list parts = []
    if tags:
        parts.append(property_text("TAGS", tags))
    if keys:
        parts.append(property_text("KEYS", keys))
    if properties:
        for name, value in properties.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"property {name!r}: names and values are text")
            if not name:
                raise ValueError("a property without a name")
            if value:
                parts.append(property_text(name, value))
    return b"".join(parts)


cdef struct Element:
    Py_ssize_t start
    Py_ssize_t properties
    Py_ssize_t properties_bytes


cdef Element element_at(const uint8_t[::1] batch, Py_ssize_t index):
    """The message of that index in a batch body. Raises IndexError."""
    cdef Element found
    cdef Py_ssize_t at = 0, count = batch.shape[0], body_bytes
    while at + BATCH_ELEMENT_BYTES + 2 <= count:
        found.start = at
        body_bytes = <int32_t>load_be32(&batch[at + BATCH_ELEMENT_BODY_LENGTH])
        if body_bytes < 0 or at + BATCH_ELEMENT_BYTES + body_bytes + 2 > count:
            break
        at += BATCH_ELEMENT_BYTES + body_bytes
        found.properties_bytes = <int16_t>load_be16(&batch[at])
        found.properties = at = at + 2
        if found.properties_bytes < 0 or at + found.properties_bytes > count:
            break
        if index == 0:
            return found
        index -= 1
        at += found.properties_bytes
    raise IndexError("no such message in the batch")


def unique_id(const uint8_t[::1] batch not None, Py_ssize_t index):
    """The UNIQ_KEY of the message of that index in a batch body, or "" if it has none."""
    cdef Element element = element_at(batch, index)
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0
    if element.properties_bytes and find_property(
            &batch[element.properties], element.properties_bytes, b"UNIQ_KEY", 8, &value,
            &value_bytes):
        return decode_text(value, value_bytes)
    return ""


def element_start(const uint8_t[::1] batch not None, Py_ssize_t index):
    """Where the message of that index begins in a batch body. Raises IndexError."""
    return element_at(batch, index).start


@cython.no_gc  # or every message would be the collector's, and that cannot clear a buffer in use
cdef class Holder:
    """Keeps a buffer alive for the messages that look into it. What `source` has must not lead back
    to messages."""

    def __cinit__(self, buffer):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef str host_text(const uint8_t *host, int count):
    cdef int i
    port = <int32_t>load_be32(host + count - 4)
    if count == 8:
        return f"{host[0]}.{host[1]}.{host[2]}.{host[3]}:{port}"
    groups = ":".join([f"{load_be16(host + 2 * i):x}" for i in range(8)])
    return f"[{groups}]:{port}"


def offset_message_id(bytes store_host not None, int64_t physical_offset):
    """RocketMQ's offset message id: upper-case hex of the store host and the physical offset."""
    return (store_host.hex() + f"{physical_offset:016x}").upper()


@cython.no_gc
@cython.freelist(4096)
cdef class Message:
    """A message as a consumer sees it: a view on a record. Decoded when asked for.

    It keeps the whole buffer that it arrived in alive. It can be copied and pickled; a pickle holds
    only the record. In the process of the consumer that received the message, a copy can be
    acknowledged and replied to like the message itself; in another process it is a value.
    """

    @property
    def topic(self):
        topic = self._property(b"RETRY_TOPIC", 11) if self._is_restored else None
        return self.stored_topic if topic is None else topic

    @property
    def stored_topic(self):
        return decode_text(self._r.topic, self._r.topic_length)

    @property
    def queue_id(self):
        return self._r.queue_id

    @property
    def queue_offset(self):
        return self._r.queue_offset

    @property
    def physical_offset(self):
        return self._r.physical_offset

    @property
    def stored_body(self):
        return PyBytes_FromStringAndSize(<const char *>self._r.body, self._r.body_length)

    @property
    def body(self):
        """Decompressed, once, where sys_flag says it is compressed. Raises BodyIllegal."""
        if self._r.sys_flag & SYS_COMPRESSED:
            if self._plain is None:
                self._plain = self._unfolded()
            return self._plain
        return PyBytes_FromStringAndSize(<const char *>self._r.body, self._r.body_length)

    cdef bytes _unfolded(self):
        try:
            return decompress(self.stored_body, self._r.sys_flag)
        except _BodyIllegal as error:
            raise type(error)(f"the body of {self.topic}/{self.queue_id} @{self.queue_offset} "
                              f"({self.msg_id}): {error}") from None

    cdef str _property(self, const char *name, Py_ssize_t name_bytes):
        cdef const uint8_t *value = NULL
        cdef Py_ssize_t count = 0
        if find_property(self._r.properties, self._r.properties_length, name, name_bytes, &value,
                         &count):
            return decode_text(value, count)
        return None

    @property
    def tags(self):
        return self._property(b"TAGS", 4)

    @property
    def keys(self):
        return self._property(b"KEYS", 4)

    @property
    def raw_properties(self):
        return PyBytes_FromStringAndSize(
            <const char *>self._r.properties, self._r.properties_length)

    @property
    def properties(self):
        cdef dict found = {}
        for entry in self.raw_properties.split(b"\x02"):
            name, separator, value = entry.partition(b"\x01")
            if name and value:
                found[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        return found

    @property
    def msg_id(self):
        unique = self._property(b"UNIQ_KEY", 8)
        return unique if unique is not None else self.offset_msg_id

    @property
    def offset_msg_id(self):
        return offset_message_id(
            PyBytes_FromStringAndSize(<const char *>self._r.store_host, self._r.store_host_length),
            self._r.physical_offset)

    @property
    def flag(self):
        return self._r.flag

    @property
    def sys_flag(self):
        return self._r.sys_flag

    @property
    def born_timestamp_ms(self):
        return self._r.born_timestamp

    @property
    def store_timestamp_ms(self):
        return self._r.store_timestamp

    @property
    def born_host(self):
        return host_text(self._r.born_host, self._r.born_host_length)

    @property
    def store_host(self):
        return host_text(self._r.store_host, self._r.store_host_length)

    @property
    def reconsume_times(self):
        return self._r.reconsume_times

    @property
    def prepared_transaction_offset(self):
        return self._r.prepared_offset

    @property
    def body_crc(self):
        return self._r.body_crc

    @property
    def is_queued(self):
        return is_queued(&self._r)

    @property
    def tags_code(self):
        return tags_code_of(self._r.properties, self._r.properties_length)

    @property
    def size(self):
        return self._r.total_size

    @property
    def magic(self):
        return self._r.magic

    @property
    def record(self):
        return PyBytes_FromStringAndSize(<const char *>self._begin, self._r.total_size)

    def reply(self, body, *, properties=None, timeout_s=10.0):
        source = self._holder.source
        if source is None:
            raise TypeError("a message that a consumer was given can be replied to; this one was "
                            "read otherwise")
        return source.reply(self, body, properties=properties, timeout_s=timeout_s)

    def __reduce__(self):
        return message_from, (self.record, self._is_restored, self._r.reconsume_times,
                              self._holder.source)

    def __copy__(self):
        cdef Message copied = Message.__new__(Message)
        copied._holder, copied._r, copied._begin = self._holder, self._r, self._begin
        copied._is_restored, copied._plain = self._is_restored, self._plain
        return copied

    def __deepcopy__(self, memo):
        return self.__copy__()  # the shared buffer is immutable

    def __repr__(self):
        return (f"<Message {self.topic}/{self.queue_id} @{self.queue_offset} "
                f"{self._r.body_length} bytes>")


def decompress(bytes body not None, int32_t sys_flag):
    """The plain body of a compressed one. Raises BodyIllegal, CodecMissing."""
    return _unfold(body, (sys_flag & SYS_COMPRESSION_MASK) >> SYS_COMPRESSION_SHIFT)


cdef bint has_tag(Record *record, list tags):
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t count = 0
    cdef bytes tag
    if not find_property(record.properties, record.properties_length, b"TAGS", 4, &value, &count):
        return False
    for tag in tags:
        if len(tag) == count and memcmp(PyBytes_AS_STRING(tag), value, count) == 0:
            return True
    return False


def decode(buffer, tags=None, bint check_crc=True, Filter filter=None):
    """The messages in records that stand one after the other, as a pull answers them.

    With tags only messages whose tag is exactly one of them, and with a filter those that it is TRUE
    of. Raises RecordDamaged.
    """
    cdef Holder holder = Holder(buffer)
    cdef const uint8_t *base = <const uint8_t *>holder.view.buf
    cdef Py_ssize_t at = 0, count = holder.view.len
    cdef list wanted = None if tags is None else [tag.encode() for tag in tags]
    cdef list found = []
    cdef Message message
    cdef Record record
    cdef int reason
    while at < count:
        reason = parse_record(base + at, count - at, check_crc, &record)
        if reason != REC_OK:
            raise RecordDamaged(REASONS[reason], at)
        if (wanted is None or has_tag(&record, wanted)) and passes(filter, &record):
            message = Message.__new__(Message)
            message._holder = holder
            message._r = record
            message._begin = base + at
            found.append(message)
        at += record.total_size
    return found


def message_from(bytes record not None, bint is_restored=False, reconsume_times=None, source=None):
    """Restore a pickled message. Raises ValueError unless `record` is exactly one whole record.

    Args:
        record: as Message.record.
        is_restored: see `restore_topics`.
        reconsume_times: replaces that of the record; None: keeps it.
        source: see `set_source`.
    """
    cdef Message message = Message.__new__(Message)
    cdef int64_t count = PyBytes_GET_SIZE(record)
    cdef int reason
    message._holder = Holder(record)
    message._begin = <const uint8_t *>PyBytes_AS_STRING(record)
    reason = parse_record(message._begin, count, True, &message._r)
    if reason == REC_OK and message._r.total_size != count:
        reason = REC_BAD_SIZE
    if reason != REC_OK:
        raise ValueError(f"{count} bytes are not a message: {REASONS[reason]}")
    if reconsume_times is not None:
        message._r.reconsume_times = reconsume_times
    message._is_restored = is_restored
    message._holder.source = source
    return message


def runs(list messages not None):
    """Messages as runs of one queue: (topic, queue_id, first offset, last offset, count) each.

    A run goes on as long as queue offsets of one queue grow. Raises TypeError for what is none.
    """
    cdef list found = []
    cdef Message first = None, last = None, message
    cdef Py_ssize_t count = 0
    for item in messages:
        message = <Message?>item  # None, too, is a TypeError
        if (first is not None and message._r.queue_id == last._r.queue_id
                and message._r.queue_offset > last._r.queue_offset
                and message._r.topic_length == last._r.topic_length
                and memcmp(message._r.topic, last._r.topic, last._r.topic_length) == 0):
            last = message
            count += 1
            continue
        if first is not None:
            found.append((first.stored_topic, first._r.queue_id, first._r.queue_offset,
                          last._r.queue_offset, count))
        first = last = message
        count = 1
    if first is not None:
        found.append((first.stored_topic, first._r.queue_id, first._r.queue_offset,
                      last._r.queue_offset, count))
    return found


def set_source(list messages not None, source):
    """What the `reply` of these messages asks."""
    cdef Message message
    cdef Holder last = None
    for item in messages:
        message = item
        if message._holder is not last:  # what was read together has one
            last = message._holder
            last.source = source


def source_of(Message message not None):
    """What `set_source` has said; None: nothing."""
    return message._holder.source


def restore_topics(list messages not None):
    """Have each of these, which lie in a retry topic, name the topic that it was sent to."""
    cdef Message message
    for item in messages:
        message = item
        message._is_restored = True


def count_attempts(list messages not None, int32_t count=1):
    """These are handed out again: so many more of `reconsume_times`."""
    cdef Message message
    for item in messages:
        message = item
        message._r.reconsume_times += count


def stretches(list messages not None):
    """Messages of one queue, in any order, as stretches without a gap: (first offset, count)."""
    cdef list found = []
    cdef list offsets = [(<Message?>message)._r.queue_offset for message in messages]
    cdef int64_t first = 0, following = -1, offset
    offsets.sort()
    for item in offsets:
        offset = item
        if offset != following:
            if following >= 0:
                found.append((first, following - first))
            first = offset
        following = offset + 1
    if following >= 0:
        found.append((first, following - first))
    return found
