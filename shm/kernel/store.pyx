# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=False, auto_pickle=False
"""The writer and what follows the log: appending, dispatch, index, timers, copying."""

cimport cython
from cometmq.shm.kernel.codec cimport *
from cometmq.shm.kernel.keys cimport *
from cometmq.shm.kernel.live cimport *
from cometmq.shm.kernel.timed cimport *

import os as _os

from cometmq.protocol import names as _names
from cometmq.shm.kernel.codec import (
    REASONS, BatchFull, BatchIllegal, RecordDamaged, RecordTooLarge, encode_properties,
)

cdef int64_t SYSTEM_PAGE = sysconf(_SC_PAGESIZE)

include "log_append.pxi"
include "dispatch.pxi"
include "index.pxi"
include "copying.pxi"
include "append.pxi"
include "inner.pxi"
include "delays.pxi"
include "waiting.pxi"
include "halves.pxi"
include "timers.pxi"
include "keyed.pxi"
