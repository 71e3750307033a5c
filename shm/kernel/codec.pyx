# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=False, auto_pickle=False
"""Records and messages: what every process reads and writes them with."""

cimport cython
from cometmq.shm.kernel.codec cimport *
from cometmq.shm.kernel.keys cimport *
from cometmq.shm.kernel.timed cimport *

import os as _os
import time as _time

cdef int64_t SYSTEM_PAGE = sysconf(_SC_PAGESIZE)

include "errors.pxi"
include "text.pxi"
include "records.pxi"
include "mapping.pxi"
include "filter.pxi"
include "units.pxi"
include "gather.pxi"
include "messages.pxi"
include "mapped.pxi"
include "tail.pxi"
include "timed.pxi"
include "timing.pxi"
include "batches.pxi"
include "json.pxi"
