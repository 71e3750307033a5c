"""The receiver: what a consumer and its asyncio twin have in common, behind their public methods.

It puts the parts together: the member of the group gains and loses queues, the puller reads them,
the stream hands out what came, and `owned` knows how far the user is.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cometmq.client.forked import Forked
from cometmq.client.questions import Position
from cometmq.client.receiving.buffer import Queue
from cometmq.client.receiving.kept import Kept, KeptByBroker, KeptByUser, KeptInFile
from cometmq.client.receiving.member import Member
from cometmq.client.receiving.owned import OwnedQueues
from cometmq.client.receiving.pulling import Puller
from cometmq.client.receiving.replying import Replier
from cometmq.client.receiving.stream import Stream
from cometmq.client.receiving.unshared import Unshared
from cometmq.client.routes import Routes
from cometmq.protocol.errors import (
    ArgumentIllegal,
    ClientClosed,
)

_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


class Receiver:
    """Threads may share it, of which one polls; a fork may not use it. See Consumer."""

    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str | None,
        *,
        member: str | None,
        broadcast: bool | str | Path,
        start: Position,
        auto_commit_s: float,
        pull_bytes: int,
        prefetch_bytes: int,
        prefetch_count: int,
        transport: str,
        spin_us: float,
        max_reconsume_times: int | None = None,
    ) -> None:
        kept = None  # looked at before anything is opened that would have to be closed
        if broadcast:
            if group is None:
                raise ArgumentIllegal("broadcast needs a group: its progress is kept by that name")
            kept = KeptInFile(group, member, None if broadcast is True else Path(broadcast))
        lock: Any = threading.Lock()
        self._swap = threading.Lock()
        self.routes = Routes(name_server)
        self.replier = Replier(self.routes, has_lines=transport != "zmq")
        self.puller = Puller(
            lock,
            pull_bytes=pull_bytes,
            prefetch_bytes=prefetch_bytes,
            prefetch_count=prefetch_count,
            on_trouble=lambda: self.member.reader_in_trouble(),
            on_doubt=lambda broker: self.member.doubt(broker),
            transport=transport,
            spin_us=spin_us,
            on_refused=lambda error: self.stream.refuse(error),
            is_steady=lambda broker: self.member.is_steady(broker),
        )
        self.stream = Stream(self.puller)
        self.owned = OwnedQueues(lock, self._changed)
        self.max_reconsume_times = max_reconsume_times
        self._start = start
        self._auto_commit_s = auto_commit_s
        self._transport = transport
        self.member: Member | Unshared
        if kept is not None:
            self.member = self._unshared(kept, kept.member, group)
        elif group is None:
            self.member = self._unshared(KeptByUser(), member or "", None)
        else:
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
        self._closed = False
        _receivers.add(self)

    def _unshared(self, kept: Kept, name: str, group: str | None) -> Unshared:
        return Unshared(
            kept,
            name,
            group,
            self.routes,
            self.owned,
            start=self._start,
            auto_commit_s=self._auto_commit_s,
            transport=self._transport,
        )

    def without_sharing(self) -> Unshared:
        """Its queues are those that it is told. Raises ArgumentIllegal once it has subscribed."""
        with self._swap:
            if isinstance(self.member, Member):
                if self.owned.topics:
                    raise ArgumentIllegal(
                        f"it subscribes to {self.owned.topics[0]} as a member of its group: "
                        "a consumer either subscribes or is assigned"
                    )
                kept = KeptByBroker(self.routes, self.member.group)
                self.member = self._unshared(kept, self.member.name, self.member.group)
            return self.member

    def _changed(self, queues: Sequence[Queue]) -> None:
        """These were taken on, moved or dropped."""
        for queue in queues:
            if queue.source is None:
                queue.source = self.replier.source(queue.endpoints)
        self.puller.note(queues)

    def check_open(self) -> None:
        self._check_fork()
        if self._closed:
            raise ClientClosed("the consumer is closed: open another one")

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
