"""Limits of waits in tests, for machines that have other work to do.

`COMETMQ_TEST_PATIENCE=5 python -m pytest` multiplies every limit of the suite by five. A limit is
written as `patient(60)` where it is decided, and passed on unchanged: helpers do not multiply it. A
time that is the subject of a test (the length of a lease, a second in which no message arrives) is
not a limit, and stays a plain number; if it looks like a limit, write `exactly(30)`.
tests/test_source.py finds limits that are neither.
"""

from __future__ import annotations

import math
import os
from typing import Final, TypeVar

VARIABLE: Final = "COMETMQ_TEST_PATIENCE"
Number = TypeVar("Number", int, float)


def factor_of(text: str) -> float:
    """Return the factor that the variable contains. Raise ValueError unless it is above 0."""
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ValueError(f"{VARIABLE}={text!r}: a factor above 0 is expected, such as 5 or 1.5")
    return factor


FACTOR: Final = factor_of(os.environ.get(VARIABLE, "1"))


def patient(limit: Number) -> Number:
    """Return a limit in any unit of time, multiplied by the factor; an int stays an int."""
    return limit * FACTOR if isinstance(limit, float) else math.ceil(limit * FACTOR)


def exactly(time: Number) -> Number:
    """Return a time unchanged, however busy the machine is."""
    return time
