# --- files in memory -------------------------------------------------------------------------------

cdef enum:
    CALL_ADVISE = 0
    CALL_SYNC = 1
    CALL_LOCK = 2
    CALL_UNLOCK = 3

cdef Py_ssize_t file_map_count = 0  # of this process; the interpreter's lock guards it


def file_maps():
    """How many FileMaps this process has open. The system allows vm.max_map_count of all kinds."""
    return file_map_count


@cython.final
cdef class FileMap:
    """A file in memory, from its first byte on. A buffer; any thread may use it.

    It keeps no descriptor. Positions are bytes of the file, and ranges may begin and end anywhere:
    what the system does by pages it does for all pages of the range, counted from the file's
    beginning.

    Args:
        descriptor: of a file of at least so many bytes; it may be closed afterwards.
        count: bytes.
        writable: else read-only.

    Raises OSError: ENOMEM where the process has vm.max_map_count mappings.
    """

    cdef uint8_t *_base
    cdef int64_t _size
    cdef bint _writable, _left
    cdef Py_ssize_t _views

    def __cinit__(self, int descriptor, int64_t count, bint writable=False):
        global file_map_count
        cdef void *base
        cdef int code = 0
        if count <= 0:
            raise ValueError(f"a mapping of {count} bytes")
        self._size = count
        self._writable = writable
        with nogil:
            base = mmap(NULL, count, PROT_READ | PROT_WRITE if writable else PROT_READ,
                        MAP_SHARED, descriptor, 0)
            if base == MAP_FAILED:
                code = errno
        if code:
            raise OSError(code, _os.strerror(code))
        self._base = <uint8_t *>base
        file_map_count += 1

    def __dealloc__(self):
        self._unmap()

    cdef void _unmap(self) noexcept:
        global file_map_count
        cdef void *base = self._base
        cdef size_t count = self._size
        if base == NULL:
            return
        self._base = NULL
        file_map_count -= 1
        with nogil:
            # The pages first: that keeps nobody from mapping something else. 1 GiB takes 24 ms.
            madvise(base, count, MADV_DONTNEED)
            munmap(base, count)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        self._check_open()
        PyBuffer_FillInfo(buffer, self, self._base, self._size, not self._writable, flags)
        self._views += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self._views -= 1
        if self._left and not self._views:
            self._unmap()

    def __len__(self):
        return self._size

    def __getitem__(self, key):
        """A byte as a number, or a slice as bytes."""
        found = memoryview(self)[key]
        return bytes(found) if isinstance(key, slice) else found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    cdef int _check_open(self) except -1:
        if self._base == NULL or self._left:
            raise ValueError("this mapping is closed")
        return 0

    def close(self):
        """Unmap. Raises BufferError while somebody looks at it; see `let_go`."""
        if self._views:
            raise BufferError(f"{self._views} still look at this mapping")
        self._unmap()

    def let_go(self):
        """Unmap, with the last view of it at the latest: whoever is at work in it comes to the end.
        """
        self._left = True
        if not self._views:
            self._unmap()

    # --- the system's part, by pages ---

    cdef int _call(self, int what, int64_t begin, int64_t count, int advice) except? -1:
        """0, or the number of the error."""
        cdef int64_t first = begin // SYSTEM_PAGE * SYSTEM_PAGE
        cdef uint8_t *base
        cdef int failed = 0, code = 0
        self._check_open()
        if begin < 0 or count < 0 or begin > self._size - count:
            raise ValueError(f"{count} bytes at {begin} of a mapping of {self._size}")
        if not count:
            return 0
        base = self._base + first
        count += begin - first
        self._views += 1  # it stays mapped meanwhile
        with nogil:
            if what == CALL_ADVISE:
                failed = madvise(base, count, advice)
            elif what == CALL_SYNC:
                failed = msync(base, count, MS_SYNC)
            elif what == CALL_LOCK:
                failed = mlock(base, count)
            else:
                failed = munlock(base, count)
            if failed:
                code = errno
        self._views -= 1
        if self._left and not self._views:
            self._unmap()
        return code

    def advise(self, int advice, int64_t begin=0, count=None):
        """madvise, to the end unless told otherwise. Raises OSError."""
        raise_if(self._call(
            CALL_ADVISE, begin, self._size - begin if count is None else count, advice))

    def sync(self, int64_t begin, int64_t count):
        """Make a range durable. Raises OSError; then nobody knows what is on the disk."""
        raise_if(self._call(CALL_SYNC, begin, count, 0))

    def lock(self, int64_t begin, int64_t count):
        """Keep a range in memory. Raises OSError where that is not allowed."""
        raise_if(self._call(CALL_LOCK, begin, count, 0))

    def unlock(self, int64_t begin, int64_t count):
        raise_if(self._call(CALL_UNLOCK, begin, count, 0))


cdef int raise_if(int code) except -1:
    if code:
        raise OSError(code, _os.strerror(code))
    return 0
