"""Settlement: what becomes of messages that workers handle.

Workers (threads or tasks) know nothing of progress, leases or brokers. They call a `Settlement`:
`Dispatcher` acknowledges queues below their first unfinished message, `PopSettlement`
acknowledges, releases and gives back popped messages one by one.
"""

from __future__ import annotations

from typing import Protocol

from cometmq.client.handling.work import Track, Unit, Work


class Settlement(Protocol):
    """Called by workers, in any thread. Handled units go to `Track.finished` instead."""

    def keep_back(self, work: Work, track: Track, unit: Unit) -> bool:
        """Take back a unit that no handler has begun, since its lease is over or its queue lost.

        Returns:
            True if the work is no longer the worker's, see `failed`.
        """

    def failed(self, work: Work, track: Track, unit: Unit, error: BaseException) -> bool:
        """Settle a unit whose handler raised `error`.

        Returns:
            True if the work rests: it is put again later, perhaps to another worker, and this one
            does not touch it any more.
        """

    def not_begun(self, unit: Unit) -> None:
        """Take back a unit that a worker took when the run ended, and did not begin."""

    def cancelled(self, unit: Unit) -> None:
        """Settle a unit whose handler was cancelled at the end of the run."""

    def leave(self, work: Work) -> None:
        """The worker finds nothing more in this work."""
