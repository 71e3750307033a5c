"""Default time limit of a client's requests."""

from __future__ import annotations

import math
import os
from typing import Final

from cometmq.protocol.errors import ConfigError

TIMEOUT_S: Final = 3.0
#: Environment variable: seconds that replace the defaults of Producer, Admin and single requests.
TIMEOUT_VARIABLE: Final = "COMETMQ_CLIENT_TIMEOUT"


def configured_timeout_s() -> float | None:
    """Return the seconds that the environment variable sets, or None if it is not set.

    Raises:
        ConfigError: its value is not a finite number above 0.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r}: must be seconds above 0, such as 10")
    return seconds


def default_timeout_s() -> float:
    """Return the seconds for one answer: those of the environment variable, or 3."""
    seconds = configured_timeout_s()
    return TIMEOUT_S if seconds is None else seconds
