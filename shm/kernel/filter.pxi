# --- filters: an SQL92 program on a record's properties -----------------------------------------------
#
# protocol/filters compiles it. The semantics are those of RocketMQ 5.3.3, whose evaluator
# tests/interop asks.

cdef extern from "decimal.h" nogil:
    void decimal_prepare()
    double decimal_of(const uint8_t *text, size_t count, int *bad)

cdef enum:
    F_NULL = 0
    F_FALSE = 1
    F_TRUE = 2
    F_LONG = 3
    F_DOUBLE = 4
    F_TEXT = 5
    F_PROPERTY = 6
    F_BOOLEAN = 7
    F_NOT = 8
    F_NEGATE = 9
    F_IN = 10
    F_CONTAINS = 11
    F_STARTS = 12
    F_ENDS = 13
    F_SKIP_FALSE = 14
    F_SKIP_TRUE = 15
    F_EQUAL = 16
    F_GREATER = 17
    F_GREATER_EQUAL = 18
    F_LESS = 19
    F_LESS_EQUAL = 20
    F_AND = 21
    F_OR = 22
    F_OPS = 23

    FILTER_DEPTH = 64
    FILTER_WORDS = 16384
    FILTER_WORD_BYTES = 8

    V_NULL = 0
    V_LONG = 2
    V_DOUBLE = 3
    V_TEXT = 4


decimal_prepare()


cdef class Filter:
    """A program of protocol/filters. Raises ValueError unless it can only do what is meant."""

    def __cinit__(self, bytes code not None, tuple names not None, tuple texts not None,
                  tuple longs not None, tuple doubles not None):
        cdef Py_ssize_t number
        cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(code)
        self._kept = [names, texts]
        self.code.count = len(code) // FILTER_WORD_BYTES
        self.code.names_count = len(names)
        if (len(code) % FILTER_WORD_BYTES or not 1 <= self.code.count <= FILTER_WORDS
                or len(names) > FILTER_NAMES):
            raise ValueError(f"a program of {len(code)} bytes and {len(names)} names")
        self.code.words = <Word *>PyMem_Malloc(self.code.count * sizeof(Word))
        self.code.values = <Value *>PyMem_Malloc(
            max(1, len(longs) + len(doubles) + len(texts)) * sizeof(Value))
        if self.code.words == NULL or self.code.values == NULL:
            raise MemoryError
        self._keep(names, texts, longs, doubles)
        for number in range(self.code.count):
            self._load(number, at + number * FILTER_WORD_BYTES, len(names), len(texts),
                       len(longs), len(doubles))
        self._verify()

    def __dealloc__(self):
        PyMem_Free(self.code.words)
        PyMem_Free(self.code.values)

    cdef int _keep(self, tuple names, tuple texts, tuple longs, tuple doubles) except -1:
        cdef Value *value = self.code.values
        cdef Py_ssize_t number
        cdef bytes text
        for number, text in enumerate(names):
            self.code.names[number].text = <const uint8_t *>PyBytes_AS_STRING(text)
            self.code.names[number].count = len(text)
        memset(value, 0, (len(longs) + len(doubles) + len(texts)) * sizeof(Value))
        for whole in longs:
            value.type, value.whole = V_LONG, whole
            value += 1
        for real in doubles:
            value.type, value.number = V_DOUBLE, real
            value += 1
        for text in texts:
            value.type, value.count = V_TEXT, len(text)
            value.text = <const uint8_t *>PyBytes_AS_STRING(text)
            value += 1
        return 0

    cdef int _load(self, Py_ssize_t number, const uint8_t *at, Py_ssize_t names, Py_ssize_t texts,
                   Py_ssize_t longs, Py_ssize_t doubles) except -1:
        """A word, whose argument becomes the place in all constants."""
        cdef Word *word = &self.code.words[number]
        cdef int64_t argument = at[4] | at[5] << 8 | at[6] << 16 | <int64_t>at[7] << 24
        cdef int64_t count = at[2] | at[3] << 8, limit
        word.op, word.negated = at[0], at[1]
        if word.op == F_LONG:
            limit, count = longs, 1
        elif word.op == F_DOUBLE:
            limit, count = doubles, 1
        elif word.op == F_PROPERTY:
            limit, count = names, 1
        elif F_IN <= word.op <= F_ENDS or word.op == F_TEXT:
            limit, count = texts, count if word.op == F_IN else 1
        elif word.op == F_SKIP_FALSE or word.op == F_SKIP_TRUE:
            limit, count = self.code.count - number, 1
        elif word.op < F_OPS:
            limit, argument, count = 0, 0, 0
        else:
            raise ValueError(f"word {number}: there is no operation {word.op}")
        if argument + count > limit:
            raise ValueError(f"word {number}: argument {argument}, {limit} are there")
        if word.op == F_DOUBLE:
            argument += longs
        elif F_IN <= word.op <= F_ENDS or word.op == F_TEXT:
            argument += longs + doubles
        word.argument, word.count = <uint32_t>argument, <uint16_t>count
        return 0

    cdef int _verify(self) except -1:
        """Each way through it keeps the stack within bounds, and leaves one value."""
        cdef list expected = [0] * (self.code.count + 1)  # depth where a skip ends; 0: none does
        cdef int depth = 0, takes
        cdef Py_ssize_t number, target
        cdef Word *word
        for number in range(self.code.count):
            word = &self.code.words[number]
            takes = 0 if word.op < F_BOOLEAN else 2 if word.op >= F_EQUAL else 1
            if expected[number] not in (0, depth) or depth < takes:
                raise ValueError(f"word {number}: {depth} values on the stack")
            depth += 1 - takes
            self.depth = max(self.depth, depth)
            if word.op == F_SKIP_FALSE or word.op == F_SKIP_TRUE:
                target = number + 1 + word.argument
                if expected[target] not in (0, depth):
                    raise ValueError(f"word {number}: its end has {depth} values on the stack")
                expected[target] = depth
        if depth != 1 or expected[self.code.count] not in (0, 1) or self.depth > FILTER_DEPTH:
            raise ValueError(f"a program that leaves {depth} values, {self.depth} at once")
        return 0

    def matches(self, const uint8_t[::1] properties not None):
        """Whether it is TRUE of these properties, as they lie in a record."""
        cdef const uint8_t *at = &properties[0] if properties.shape[0] else NULL
        return is_true_of(&self.code, at, properties.shape[0])

    def outcome(self, const uint8_t[::1] properties not None):
        """True, False, None for unknown, or "failed": a comparison of what cannot be compared."""
        cdef const uint8_t *at = &properties[0] if properties.shape[0] else NULL
        cdef Value value
        if evaluate(&self.code, at, properties.shape[0], &value) == F_FAILED:
            return "failed"
        return None if value.type == V_NULL else value.type == V_BOOL and value.whole == 1


cdef void look_up(Code *code, const uint8_t *at, Py_ssize_t count, Value *found) noexcept nogil:
    """The properties that the program names; the last of a name counts, an empty one does not."""
    cdef const uint8_t *stop = at + count
    cdef const uint8_t *end
    cdef Py_ssize_t number, name_bytes
    for number in range(code.names_count):
        found[number].type = V_NULL
    while at < stop:
        end = find_byte(at, stop, 2)
        for number in range(code.names_count):
            name_bytes = code.names[number].count
            # A name holds no separator: so this is the first one.
            if (end - at > name_bytes + 1 and at[name_bytes] == 1
                    and same_bytes(code.names[number].text, at, name_bytes)):
                found[number].type = V_TEXT
                found[number].text = at + name_bytes + 1
                found[number].count = end - at - name_bytes - 1
                break
        at = end + 1


cdef int evaluate(
    Code *code, const uint8_t *properties, Py_ssize_t properties_bytes, Value *result
) noexcept nogil:
    """0, or F_FAILED. The code has been verified."""
    cdef Value found[FILTER_NAMES]
    cdef Value stack[FILTER_DEPTH]
    cdef Value *top = &stack[0] - 1
    cdef Py_ssize_t at = 0
    cdef Word *word
    look_up(code, properties, properties_bytes, &found[0])
    while at < code.count:
        word = &code.words[at]
        at += 1
        if word.op < F_BOOLEAN:
            top += 1
            push(code, word, &found[0], top)
        elif word.op >= F_EQUAL:
            top -= 1
            if combine(word.op, top, top + 1) == F_FAILED:
                return F_FAILED
        elif word.op == F_SKIP_FALSE or word.op == F_SKIP_TRUE:
            if top.type == V_BOOL and top.whole == (word.op == F_SKIP_TRUE):
                at += word.argument
        else:
            change(code, word, top)
    result[0] = top[0]
    return 0


cdef inline void push(Code *code, Word *word, Value *found, Value *top) noexcept nogil:
    if word.op == F_PROPERTY:
        top[0] = found[word.argument]
    elif word.op >= F_LONG:
        top[0] = code.values[word.argument]
    elif word.op == F_NULL:
        top.type = V_NULL
    else:
        set_truth(top, word.op == F_TRUE)


cdef inline void set_truth(Value *value, bint truth) noexcept nogil:
    value.type, value.whole = V_BOOL, truth


cdef void change(Code *code, Word *word, Value *top) noexcept nogil:
    """What takes one value."""
    if word.op == F_BOOLEAN:
        if top.type != V_NULL and top.type != V_BOOL:
            set_truth(top, False)
    elif word.op == F_NOT:
        if top.type == V_BOOL:
            top.whole = not top.whole
        else:
            top.type = V_NULL
    elif word.op == F_NEGATE:
        if top.type == V_LONG:
            top.whole = <int64_t>(0 - <uint64_t>top.whole)
        elif top.type == V_DOUBLE:
            top.number = -top.number
        else:
            top.type = V_NULL
    elif word.op != F_IN:
        set_truth(top, holds_text(word, top, &code.values[word.argument]))
    elif top.type != V_TEXT:
        top.type = V_NULL
    else:
        set_truth(top, is_among(top, &code.values[word.argument], word.count) != word.negated)


cdef inline bint same_text(Value *left, Value *right) noexcept nogil:
    return left.count == right.count and same_bytes(left.text, right.text, left.count)


cdef bint is_among(Value *value, Value *texts, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t number
    for number in range(count):
        if same_text(value, &texts[number]):
            return True
    return False


cdef bint holds_text(Word *word, Value *value, Value *needle) noexcept nogil:
    """FALSE of what is no text, and of an empty needle, negated or not."""
    cdef bint held = False
    if value.type != V_TEXT or needle.count == 0:
        return False
    if needle.count <= value.count:
        if word.op == F_CONTAINS:
            held = memmem(value.text, value.count, needle.text, needle.count) != NULL
        elif word.op == F_STARTS:
            held = memcmp(value.text, needle.text, needle.count) == 0
        else:
            held = memcmp(value.text + value.count - needle.count, needle.text, needle.count) == 0
    return held != word.negated


cdef int combine(int op, Value *left, Value *right) noexcept nogil:
    """What takes two values; the result stands in the left one. 0, or F_FAILED."""
    cdef int order = 0
    if op == F_AND or op == F_OR:
        # The left one does not decide it alone, else this would have been skipped.
        if right.type == V_BOOL and right.whole == (op == F_OR):
            set_truth(left, op == F_OR)
        elif left.type == V_NULL or right.type == V_NULL:
            left.type = V_NULL
        return 0
    if left.type == V_NULL or right.type == V_NULL:
        if op == F_EQUAL and left.type == right.type:
            set_truth(left, True)
        elif op == F_EQUAL and left.type != V_NULL:
            set_truth(left, False)  # only NULL on the left is unknown
        else:
            left.type = V_NULL
        return 0
    if op == F_EQUAL and left.type == V_TEXT and right.type == V_TEXT:
        set_truth(left, same_text(left, right))
        return 0
    if compare(left, right, &order) == F_FAILED:
        return F_FAILED
    set_truth(left, order == 0 if op == F_EQUAL else order > 0 if op == F_GREATER
              else order >= 0 if op == F_GREATER_EQUAL else order < 0 if op == F_LESS
              else order <= 0)
    return 0


cdef int compare(Value *left, Value *right, int *order) noexcept nogil:
    """-1, 0 or 1, after a text became what the other one is. Neither is NULL."""
    cdef int type = left.type if left.type != V_TEXT else right.type
    if type == V_TEXT:
        type = V_DOUBLE
    if left.type == V_BOOL and right.type == V_TEXT:
        return F_FAILED  # RocketMQ has it the other way round only
    if convert(left, type) == F_FAILED or convert(right, type) == F_FAILED:
        return F_FAILED
    if left.type == V_BOOL and right.type == V_BOOL or left.type == V_LONG and right.type == V_LONG:
        order[0] = (left.whole > right.whole) - (left.whole < right.whole)
    elif left.type == V_BOOL or right.type == V_BOOL:
        order[0] = -1  # a truth and a number
    else:
        order[0] = compare_doubles(
            left.number if left.type == V_DOUBLE else <double>left.whole,
            right.number if right.type == V_DOUBLE else <double>right.whole)
    return 0


cdef int convert(Value *value, int type) noexcept nogil:
    """A text to a type; anything else stays what it is."""
    cdef int bad = 0
    if value.type != V_TEXT:
        return 0
    if type == V_BOOL:
        set_truth(value, is_word_true(value.text, value.count))
    elif type == V_LONG:
        if not whole_of(value.text, value.count, &value.whole):
            return F_FAILED
        value.type = V_LONG
    else:
        value.number = decimal_of(value.text, value.count, &bad)
        if bad:
            return F_FAILED
        value.type = V_DOUBLE
    return 0


cdef bint is_word_true(const uint8_t *text, Py_ssize_t count) noexcept nogil:
    return (count == 4 and (text[0] | 32) == b"t" and (text[1] | 32) == b"r"
            and (text[2] | 32) == b"u" and (text[3] | 32) == b"e")


cdef bint whole_of(const uint8_t *text, Py_ssize_t count, int64_t *value) noexcept nogil:
    """Java's Long.valueOf: a sign, and digits within 64 bits."""
    cdef bint minus = count > 0 and text[0] == b"-"
    cdef Py_ssize_t at = 1 if minus or (count > 0 and text[0] == b"+") else 0
    cdef uint64_t total = 0, limit = <uint64_t>0x7FFFFFFFFFFFFFFF + minus
    cdef unsigned int digit
    if at == count:
        return False
    while at < count:
        digit = <unsigned int>text[at] - 48
        if digit > 9 or total > (limit - digit) // 10:
            return False
        total = 10 * total + digit
        at += 1
    value[0] = <int64_t>(0 - total) if minus else <int64_t>total
    return True


cdef inline uint64_t bits_of(double number) noexcept nogil:
    cdef uint64_t bits
    memcpy(&bits, &number, 8)
    return bits


cdef int compare_doubles(double left, double right) noexcept nogil:
    """Java's: NaN is above all and equals itself, and -0.0 is below 0.0."""
    cdef bint left_nan = left != left, right_nan = right != right
    if left_nan or right_nan:
        return left_nan - right_nan
    if left == right:
        return <int>(bits_of(right) >> 63) - <int>(bits_of(left) >> 63)
    return 1 if left > right else -1
