"""What a group that takes messages in order (RocketMQ: FIFO group) has out of one queue.

Of a queue one take is out at a time, and until all of it is acknowledged, or visible again, nobody
gets anything behind it. RocketMQ: ConsumerOrderInfoManager.OrderInfo, of which it differs in two
points: what is acknowledged never comes again, whatever stands before it; and what comes behind a
message that is given back is not out any more, so that nobody goes on with it.
"""

from __future__ import annotations

from typing import Final

import msgspec

TAKE_MAX: Final = 32  # messages of a queue; RocketMQ: of an answer


class Take(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Neighbours in a queue, those that are not acknowledged. Of these the ones below `out_end` are
    somebody's, and the others come behind them. Times in ms since 1970."""

    handle: int
    attempt: str  # the asker's name for its question; empty: it has none
    popped_ms: int
    until_ms: int  # what is out is invisible until then
    left: tuple[tuple[int, int], ...]  # (queue offset, how often it was handed out before)
    end: int  # behind the last neighbour, acknowledged or not
    out_end: int
    back_ms: int = 0  # not 0: the last one that is out was given back, and comes again then

    @property
    def next_offset(self) -> int:
        """How far the group has come in the queue."""
        return self.left[0][0] if self.left else self.end

    @property
    def held_end(self) -> int:
        """What is out below this is its owner's, who has not given it back."""
        return self.out_end - bool(self.back_ms)

    @property
    def free_ms(self) -> int:
        """From then on the queue is free again."""
        is_held = bool(self.left) and self.left[0][0] < self.held_end
        return max(self.until_ms if is_held else 0, self.back_ms)

    def count_of(self, offset: int) -> int | None:
        """How often it was handed out before this time; None: it is not its owner's any more."""
        if offset < self.held_end:
            for each, count in self.left:
                if each == offset:
                    return count
        return None

    def without(self, first: int, end: int) -> Take:
        """[first, end) are done with."""
        left = tuple(each for each in self.left if not first <= each[0] < end)
        return msgspec.structs.replace(self, left=left)

    def cut(self, offset: int) -> Take:
        """Nothing behind that one is out."""
        return msgspec.structs.replace(self, out_end=offset + 1, back_ms=0)

    def released(self, offset: int) -> Take:
        """Release the message at `offset` and those behind it, without counting an attempt. A queue
        with a message that was given back still waits for that one."""
        if offset >= self.held_end:
            return self
        return msgspec.structs.replace(self, out_end=offset + bool(self.back_ms))

    def given_back(self, offset: int, back_ms: int) -> Take:
        """That one comes again then, and what follows behind it."""
        left = tuple((each, count + (each == offset)) for each, count in self.left)
        return msgspec.structs.replace(self.cut(offset), left=left, back_ms=back_ms)

    def taken_again(
        self, count: int, handle: int, attempt: str, popped_ms: int, until_ms: int
    ) -> Take:
        """The first ones that are left, once more; of these, whoever had them before counts.

        Args:
            count: of messages, at most.
        """
        left = tuple((each, before + (each < self.held_end)) for each, before in self.left)
        out_end = left[:count][-1][0] + 1
        return Take(handle, attempt, popped_ms, until_ms, left, self.end, out_end)

    def repeated(self, count: int, until_ms: int) -> Take:
        """The same for the same question, of which the answer was lost."""
        held = [each for each, _ in self.left if each < self.held_end][:count]
        return msgspec.structs.replace(self.cut(held[-1]), until_ms=until_ms)

    def moved(self, step_ms: int) -> Take:
        """The same by a clock that was stepped."""
        return msgspec.structs.replace(
            self,
            popped_ms=max(self.popped_ms + step_ms, 0),
            until_ms=max(self.until_ms + step_ms, 0),
            back_ms=max(self.back_ms + step_ms, 1) if self.back_ms else 0,
        )

    def out(self) -> list[tuple[int, int]]:
        """What is its owner's."""
        return [each for each in self.left if each[0] < self.held_end]
