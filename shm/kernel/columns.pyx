# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=False, auto_pickle=False
"""Many records at once, without a Python object for each: Arrow columns, walks, verification."""

cimport cython
from cometmq.shm.kernel.codec cimport *
from cometmq.shm.kernel.grow cimport *
from cometmq.shm.kernel.keys cimport *

from cometmq.shm.kernel.codec import REASONS, BatchFull, RecordDamaged, decompress

include "spans.pxi"
include "columns.pxi"
include "rows.pxi"
include "walk.pxi"
include "verify.pxi"
