"""The receiver: what a consumer and its asyncio twin have in common, behind their public methods.

It puts the parts together: the member of the group gains and loses queues, the puller reads them,
the stream hands out what came, and `owned` knows how far the user is.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from cometmq.client.forked import Forked
from cometmq.client.questions import Position
from cometmq.client.receiving.member import Member
from cometmq.client.receiving.owned import OwnedQueues
from cometmq.client.receiving.pulling import Puller
from cometmq.client.receiving.stream import Stream
from cometmq.client.routes import Routes

_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


class Receiver:
    """Threads may share it, of which one polls; a fork may not use it. See Consumer."""

    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str,
        *,
        member: str | None,
        start: Position,
        auto_commit_s: float,
        pull_bytes: int,
        prefetch_bytes: int,
        prefetch_count: int,
        transport: str,
        spin_us: float,
        max_reconsume_times: int | None = None,
    ) -> None:
        lock: Any = threading.Lock()
        self.routes = Routes(name_server)
        self.puller = Puller(
            lock,
            pull_bytes=pull_bytes,
            prefetch_bytes=prefetch_bytes,
            prefetch_count=prefetch_count,
            on_trouble=lambda: self.member.reader_in_trouble(),
            transport=transport,
            spin_us=spin_us,
            on_refused=lambda error: self.stream.refuse(error),
            is_steady=lambda broker: self.member.is_steady(broker),
        )
        self.stream = Stream(self.puller)
        self.owned = OwnedQueues(lock, self.puller.note)
        self.member = Member(
            group,
            member or "",
            self.routes,
            self.owned,
            self.stream,
            start=start,
            auto_commit_s=auto_commit_s,
            transport=transport,
        )
        self.max_reconsume_times = max_reconsume_times
        self._closed = False
        _receivers.add(self)

    def check_open(self) -> None:
        self._check_fork()
        if self._closed:
            raise RuntimeError("the consumer is closed")

    def close(self) -> None:
        """See `Consumer.close`."""
        self._check_fork()
        with self.owned.lock:
            if self._closed:
                return
            self._closed = True
        self.owned.close()
        self.stream.end()
        self.member.close()
        self.routes.close()
        self.stream.close()

    def _check_fork(self) -> None:
        if isinstance(self.owned.lock, Forked):
            self.owned.lock.acquire()

    def _forked(self) -> None:
        self.owned.lock = Forked("Consumer")


def _forked_all() -> None:
    for receiver in list(_receivers):
        receiver._forked()


os.register_at_fork(after_in_child=_forked_all)
