"""Which brokers a producer had better not choose for a while: those that answered late, or not.

RocketMQ's table (LatencyFaultToleranceImpl, MQFaultStrategy), which there has to be switched on by
`sendLatencyFaultEnable`. It concerns messages that any queue will do for: what names a queue or a
key goes where it belongs. Where all brokers have such a bad standing, it does not count.
"""

from __future__ import annotations

from collections.abc import Set
from time import monotonic
from typing import Final

from cometmq.protocol.errors import CometError

# An answer that took so long: its broker is avoided for so long. Seconds; the slowest first.
AVOIDED: Final = (
    (15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0), (0.0, 0.0),
)  # fmt: skip
FAILED_S: Final = 10.0  # what did not answer, or is not able to, counts as having taken so long


class Standing:
    """Guarded by the producer's lock."""

    def __init__(self) -> None:
        self._avoided: dict[str, float] = {}  # broker -> until when, time.monotonic()

    def heard(self, broker: str, waited_s: float, error: CometError | None) -> None:
        """What came of a request, and how long it took."""
        if error is not None:
            if not error.retriable:
                return  # any broker would have said so
            waited_s = FAILED_S
        avoid_s = next(avoid for took, avoid in AVOIDED if waited_s >= took)
        if avoid_s:
            self._avoided[broker] = monotonic() + avoid_s
        elif self._avoided:
            self._avoided.pop(broker, None)

    def avoided(self) -> Set[str]:
        """These brokers, now."""
        if self._avoided:
            now = monotonic()
            self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        return self._avoided.keys()
