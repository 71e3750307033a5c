"""How much of what is due together is stored at once, and for how long others come first."""

from __future__ import annotations

from typing import Final

ALONE_MAX: Final = 2_048  # messages of one write,
COUNT_MIN: Final = 128  # if anybody else has had something stored: at least
COUNT_MAX: Final = 512  # and at most
OF_LATE_S: Final = 0.1
REST_SHARE: Final = 0.5  # of the time that a write takes, for others behind it: at least
PER_S: Final = 135_000  # messages that are stored beside others; more is left to them


class Beside:
    """A `send` waits for the write that is under way, so writes are small as long as they are quick
    enough for the pace. Where each takes long, since others have much stored, they are larger."""

    def __init__(self) -> None:
        self._until = 0.0  # by the monotonic clock
        self._count = COUNT_MIN

    def count(self, *, now: float, others_stored: bool) -> int:
        """Of messages, for the next write.

        Args:
            others_stored: something, since the last write.
        """
        if others_stored:
            self._until = now + OF_LATE_S
        return ALONE_MAX if self.is_alone(now) else self._count

    def is_alone(self, now: float) -> bool:
        return now >= self._until

    def rest_s(self, took_s: float, count: int) -> float:
        """After a write beside others, of so many messages, that took so long."""
        self._count = min(max(round(PER_S * took_s * (1 + REST_SHARE)), COUNT_MIN), COUNT_MAX)
        return max(REST_SHARE * took_s, count / PER_S - took_s)
