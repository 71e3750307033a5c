"""Frames of the other replicas that have come and are not handed to the core yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cometmq.actors.replication.core.frames import AnyFrame
from cometmq.actors.runtime.event_log import EventLog
from cometmq.shm.kernel.codec import crc32

# More than a master sends without hearing of what was held.
BYTES_MAX: Final = 64 << 20
FRAMES_MAX: Final = 10_000


class Come(NamedTuple):
    """A frame, and what came behind it."""

    sender: str
    frame: AnyFrame
    content: memoryview | None
    length: int  # of the content, in bytes

    @property
    def crc(self) -> int:
        return 0 if self.content is None else crc32(self.content)


class WaitingFrames:
    """In the order in which they came. Bytes wait until they could be laid down, and all behind
    them wait as well; what there is no room for is lost, as frames may be.

    Args:
        may_append: whether bytes could be laid down now, or would not be.
    """

    def __init__(self, may_append: Callable[[], bool], said: EventLog) -> None:
        self._may_append = may_append
        self._said = said
        self._frames: deque[Come] = deque()
        self._bytes = 0

    def put(self, sender: str, frame: AnyFrame, content: memoryview | None) -> None:
        length = 0 if content is None else len(content)
        if self._bytes + length > BYTES_MAX or len(self._frames) >= FRAMES_MAX:
            self._said.warn("full", "frames of %s are dropped: too many wait", sender)
            return
        self._frames.append(Come(sender, frame, content, length))
        self._bytes += length

    def next(self) -> Come | None:
        """Taken out; None: there is none that could be handed over."""
        if not self._frames:
            return None
        if self._frames[0].content is not None and not self._may_append():
            return None
        come = self._frames.popleft()
        self._bytes -= come.length
        return come
