"""How fast the log goes to one slave, where that is limited (`haFlowControlEnable`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

BURST_S: Final = 0.01  # what gathers in that time may go at once
REST_S: Final = BURST_S / 2  # so long nothing goes, once all of it has gone
LEAST_S: Final = 0.001  # that anybody rests


class Pace:
    """So many bytes a second, a little at a time: whoever sends a message meanwhile waits for one
    burst at most. RocketMQ sends what a second may have at the beginning of it.

    Args:
        bytes_per_s: in any time, no more than for that time and one burst.
        clock: seconds.
    """

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst = max(1, math.ceil(bytes_per_s * BURST_S))
        self._clock = clock
        self._left = self._burst
        self._looked_at = clock()
        self._rests_until = -math.inf

    def left(self) -> int:
        """Bytes that may go now; none while it rests, however often somebody asks."""
        now = self._clock()
        if now < self._rests_until:
            return 0
        gathered = int((now - self._looked_at) * self._bytes_per_s)
        if gathered > 0:  # parts of a byte gather until the next look
            self._left = min(self._burst, self._left + gathered)
            self._looked_at = now
        return max(0, self._left)

    def took(self, count: int) -> None:
        """So many have gone."""
        self._left -= count
        if self._left <= 0:
            self._rests_until = self._clock() + REST_S - self._left / self._bytes_per_s

    def rest_s(self) -> float:
        """For who got nothing of `left`: until he may ask again. Never 0, also if that is now."""
        return max(self._rests_until - self._clock(), 1 / self._bytes_per_s, LEAST_S)
