"""How long a client waits for an answer where its caller names no time."""

from __future__ import annotations

import math
import os
from typing import Final

from cometmq.protocol.errors import ConfigError

TIMEOUT_S: Final = 3.0
#: In the environment: seconds that replace the defaults of Producer, Admin and single requests.
TIMEOUT_VARIABLE: Final = "COMETMQ_CLIENT_TIMEOUT"


def configured_timeout_s() -> float | None:
    """Seconds that the environment names; None: it names none.

    Raises:
        ConfigError: it is not a number above 0.
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
    """Seconds for one answer: of the environment, or 3."""
    seconds = configured_timeout_s()
    return TIMEOUT_S if seconds is None else seconds
