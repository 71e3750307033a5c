"""How long tests wait for what has to come, on a machine that has other work to do.

`COMETMQ_TEST_PATIENCE=5 python -m pytest` multiplies every limit of the suite by five. A limit is
written where it is decided, as `patient(60)`, and passed on as it is: helpers multiply nothing. A
time that is the subject of a test (how long a lease lasts, that nothing comes within a second) is
none, and stays a plain number; where it looks like a limit it is written `exactly(30)`.
tests/test_source.py finds limits that are neither.
"""

from __future__ import annotations

import math
import os
from typing import Final, TypeVar

VARIABLE: Final = "COMETMQ_TEST_PATIENCE"
Number = TypeVar("Number", int, float)


def factor_of(text: str) -> float:
    """What the variable says: above 0, and finite."""
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ValueError(f"{VARIABLE}={text!r}: a factor above 0 is expected, such as 5 or 1.5")
    return factor


FACTOR: Final = factor_of(os.environ.get(VARIABLE, "1"))


def patient(limit: Number) -> Number:
    """A limit in any unit of time, multiplied by the factor; an int stays one."""
    return limit * FACTOR if isinstance(limit, float) else math.ceil(limit * FACTOR)


def exactly(time: Number) -> Number:
    """A time that is meant as it stands, however busy the machine is."""
    return time
