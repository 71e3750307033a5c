"""What is derived from the log follows its beginning: ConsumeQueue and index files that expired."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from cometmq.actors.runtime.guard import explained
from cometmq.protocol.errors import StoreError
from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.derived.index_file import delete_expired
from cometmq.shm.derived.other_queues import list_served_queues

log = logging.getLogger(__name__)


class Following:
    """Of the cleaner. Queues and index begin where the log begins, or before.

    What cannot be deleted holds up nothing else: it is logged, and all are looked at again when the
    cleaner next says where the log begins.

    Args:
        pause_s: between two queues of which something was deleted.
        after: has a call made after so many seconds.
    """

    def __init__(
        self,
        store: Path,
        *,
        queue_segment_bytes: int,
        pause_s: float,
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._store = store
        self._queue_segment_bytes = queue_segment_bytes
        self._pause_s = pause_s
        self._after = after
        self._log_min = 0  # the log begins there
        self._followed = 0  # queues and index are cut to that, or are being cut
        self._queues: Iterator[tuple[str, int]] | None = None  # still to be looked at
        self._failed = False  # something has, since the first of them

    def follow(self, log_min: int) -> None:
        """The log begins there now."""
        self._log_min = log_min
        if self._queues is None and self._followed < log_min:
            self._followed = log_min
            self._failed = False
            self._queues = list_served_queues(self._store)
            self._next_queue()

    def _next_queue(self) -> None:
        assert self._queues is not None
        try:
            for topic, queue_id in self._queues:
                if self._try_to_delete(topic, queue_id):
                    self._after(self._pause_s, self._next_queue)
                    return
            delete_expired(self._store, self._followed)
        except Exception as caught:
            error = caught if isinstance(caught, OSError) else explained(caught, "a cleaning round")
            self._note("of the queues or the index", error)
        self._queues = None
        if self._failed:
            self._followed = 0
        else:
            self.follow(self._log_min)  # it may have moved on

    def _try_to_delete(self, topic: str, queue_id: int) -> int:
        """How many segments went; 0 where some should have, and could not."""
        try:
            return self._delete_segments(topic, queue_id)
        except (OSError, StoreError) as error:
            self._note(f"of queue {queue_id} of topic {topic}", error)
            return 0

    def _note(self, what: str, error: Exception) -> None:
        self._failed = True
        log.error(
            "what expired %s could not be deleted, the next round tries again: %s", what, error
        )

    def _delete_segments(self, topic: str, queue_id: int) -> int:
        """Segments whose last entry lies below the log go; never a queue's last. How many went."""
        files = QueueFiles(self._store, topic, queue_id, self._queue_segment_bytes)
        gone = 0
        for start in files.starts()[:-1]:
            if files.last_physical_offset(start) >= self._followed:
                break
            files.path(start).unlink()
            gone += 1
        return gone
