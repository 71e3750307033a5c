# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=False, auto_pickle=False
"""What the processes of a run share: counters, sleeping on them, ends of queues."""

cimport cython
from cometmq.shm.kernel.live cimport *

import os as _os

include "counters.pxi"
include "futex.pxi"
include "ends.pxi"
