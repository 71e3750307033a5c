"""Popping in order (RocketMQ: FIFO groups): one take of a queue at a time, and nothing behind it.

What nobody acknowledges in time, or gives back, comes again in its place, to whoever asks next, and
not by way of the retry topic. The first message of a queue that fails too often goes to the dead
letters, and the queue goes on. Each take is a change of the ledger before it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from secrets import randbits
from typing import Final

import msgspec

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.popped_out import PoppedOut
from cometmq.actors.coordination.retries import Retries
from cometmq.actors.runtime.service import ServiceActor
from cometmq.actors.tables.popped import Key
from cometmq.protocol.commands import (
    INVISIBLE_MS_MAX,
    UNKNOWN_PLACE,
    GiveBackMessages,
    GivenBack,
    PopAck,
    PopExtension,
    PopMessages,
    Popped,
)
from cometmq.protocol.errors import CometError, HandleUnknown, OffsetIllegal
from cometmq.protocol.ledger import OffsetSet, PopsForgotten, QueueTaken
from cometmq.protocol.takes import TAKE_MAX, Take
from cometmq.shm.live.queue_table import QueueRange

log = logging.getLogger(__name__)

AGAIN_MS: Final = 1_000  # that a message waits which is given back without a time
TAKES_MAX: Final = 200_000  # of all groups

Freed = Callable[[str, str], None]  # group and topic: one of its queues has something for somebody


class OrderedPops:
    """See the module.

    Args:
        out: whose times these takes share: it calls `is_due` and `move`.
    """

    def __init__(
        self, actor: ServiceActor, books: Books, out: PoppedOut, retries: Retries, freed: Freed
    ) -> None:
        self._actor = actor
        self._books = books
        self._takes = books.takes
        self._out = out
        self._retries = retries
        self._freed = freed
        self._leaving: dict[Key, set[int]] = {}  # queue offsets on their way to the dead letters
        out.ordered = self
        retries.ordered = self

    def _take_of(self, key: Key) -> Take | None:
        """Unless somebody else has set the group's offset elsewhere meanwhile."""
        take = self._takes.get(key)
        if take is None or take.next_offset == (offset := self._books.offsets.get(*key)):
            return take
        if not take.next_offset < offset < take.end:
            return None
        return take.without(take.next_offset, offset)

    # --- popping ---

    def pop(self, command: PopMessages, queues: Iterable[tuple[Key, QueueRange]]) -> list[Popped]:
        """Give out what there is of these queues, in turn."""
        found: list[Popped] = []
        left = command.max_count
        in_turn = list(queues)
        if command.attempt:  # what was in an answer that is lost comes first
            in_turn.sort(key=lambda queue: not self._is_repeated(queue[0], command.attempt))
        for key, there in in_turn:
            popped = self._pop_queue(command, key, there, min(left, TAKE_MAX))
            found += popped
            left -= sum(each.count for each in popped)
            if not left:
                break
        return found

    def _is_repeated(self, key: Key, attempt: str) -> bool:
        take = self._takes.get(key)
        return take is not None and take.attempt == attempt

    def _pop_queue(
        self, command: PopMessages, key: Key, there: QueueRange, most: int
    ) -> list[Popped]:
        if key in self._leaving or not self._is_ours(key):
            return []
        now = self._out.now_ms()  # first: it may move the times of takes
        take = self._take_of(key)
        if take is not None:  # what has expired is not left
            take = take.without(take.next_offset, there.min_queue_offset)
        until_ms = now + command.invisible_ms
        handle = randbits(62) + 1
        if take is None or not take.left:
            begin = max(self._books.offsets.get(*key), 0) if take is None else take.end
            first = max(begin, there.min_queue_offset)
            end = min(first + most, there.max_queue_offset)
            if end <= first or len(self._takes) >= TAKES_MAX:
                return []
            left = tuple((offset, 0) for offset in range(first, end))
            taken = Take(handle, command.attempt, now, until_ms, left, end, end)
        elif command.attempt and take.attempt == command.attempt and take.out():
            taken = take.repeated(most, until_ms)
        elif take.free_ms > now or self._bury_if_hopeless(key, take, now):
            return []
        else:
            taken = take.taken_again(most, handle, command.attempt, now, until_ms)
        self._set(key, taken)
        return _popped(key, taken)

    def _is_ours(self, key: Key) -> bool:
        """Nothing of the queue is out in no order, as in a store of before there was any."""
        queue = self._books.popped.get(*key)
        if queue is not None and not queue.out:
            self._books.change(PopsForgotten(*key))
        return queue is None or not queue.out

    def _set(self, key: Key, take: Take) -> None:
        """Change it, with the group's offset: that first, so that between the two it is seen which
        is behind."""
        before = self._takes.get(key)
        if self._books.offsets.get(*key) != take.next_offset:
            self._books.change(OffsetSet(*key, take.next_offset))
        self._books.change(QueueTaken(*key, take))
        if not take.left or take.free_ms <= self._out.now_ms():
            self._freed(key[0], key[1])
        elif before is None or before.free_ms != take.free_ms:
            self._out.push(take.free_ms, key, take.handle)

    # --- what becomes of them ---

    def ack(self, key: Key, ack: PopAck) -> int:
        """The code."""
        take = self._take_of(key)
        first, end = ack.queue_offset, ack.queue_offset + ack.count
        top = self._books.offsets.get(*key) if take is None else take.end
        wanted = [each for each, _ in take.left if first <= each < end] if take else []
        if take is None or take.handle != ack.handle or ack.handle <= 0:
            is_done = ack.handle > 0 and 0 <= first < end <= top and not wanted
            return 0 if is_done else HandleUnknown.code
        if not 0 <= first < end <= top:
            return OffsetIllegal.code
        if not all(self._has(key, take, offset) for offset in wanted):
            return HandleUnknown.code
        if wanted:
            self._set(key, take.without(first, end))
        return 0

    def _has(self, key: Key, take: Take, offset: int) -> bool:
        """Whether it is its owner's, who has not given it back."""
        is_leaving = offset in self._leaving.get(key, ())
        return not is_leaving and take.count_of(offset) is not None

    def extend(self, key: Key, extension: PopExtension, until_ms: int) -> int:
        """The code."""
        take, handle = self._take_of(key), extension.handle
        if take is None or take.handle != handle or handle <= 0:
            return HandleUnknown.code
        if not any(self._has(key, take, offset) for offset, _ in take.out()):
            return HandleUnknown.code
        if extension.invisible_ms:
            self._set(key, msgspec.structs.replace(take, until_ms=until_ms))
        else:
            self._set(key, take.released(take.left[0][0]))
        return 0

    def release(self, key: Key, release: PopAck) -> int:
        """Release a message, and the ones that are out behind it, which the consumer had not
        started to process. Return the code."""
        take, handle, offset = self._take_of(key), release.handle, release.queue_offset
        if take is None or take.handle != handle or handle <= 0:
            return HandleUnknown.code
        if not 0 <= offset < take.end or release.count <= 0:
            return OffsetIllegal.code
        is_left = any(offset == each for each, _ in take.left)
        if not is_left or offset in self._leaving.get(key, ()):
            return HandleUnknown.code
        if (released := take.released(offset)) is not take:
            self._set(key, released)
        return 0

    def release_attempt(self, group: str, attempt: str) -> None:
        """Release the messages of an answer that never reached its consumer."""
        for key, take in list(self._takes.of_group(group)):
            if take.attempt == attempt and take.left:
                first = take.left[0][0]
                self.release(key, PopAck(key[1], key[2], take.handle, first, 1))

    def keeps_order(self, group: str) -> bool:
        """Whether its messages are taken here."""
        config = self._books.groups.configs.get(group)
        return config is not None and config.consume_message_orderly

    def give_back(self, group: str, given: GivenBack, times_max: int) -> int | None:
        """What comes behind it is not out any more. The code; None: it goes to the dead letters,
        and `settle` is called when it has."""
        key = (group, given.topic, given.queue_id)
        now = self._out.now_ms()  # first: it may move the times of takes
        take, offset = self._take_of(key), given.queue_offset
        if take is None or take.handle != given.handle or not self._has(key, take, offset):
            return HandleUnknown.code
        count = take.count_of(offset)
        if given.delay_level < 0 or (count is not None and count >= times_max):
            self._leaving.setdefault(key, set()).add(offset)
            self._set(key, take.cut(offset))
            return None
        wait_ms = min(given.after_ms, INVISIBLE_MS_MAX) if given.after_ms >= 0 else AGAIN_MS
        self._set(key, take.given_back(offset, now + max(wait_ms, 1)))
        return 0

    def handed_out(self, group: str, given: GivenBack) -> int:
        """How often before, as a dead letter's record has it."""
        take = self._takes.get((group, given.topic, given.queue_id))
        return 0 if take is None else take.count_of(given.queue_offset) or 0

    def settle(self, group: str, given: GivenBack, *, is_stored: bool) -> None:
        """A dead letter is kept; or not, and its message stays out."""
        key, offset = (group, given.topic, given.queue_id), given.queue_offset
        self._has_left(key, offset)
        take = self._take_of(key)
        if take is None:
            return
        if is_stored:
            self._set(key, take.without(offset, offset + 1))
        else:
            self._out.push(take.free_ms, key, take.handle)  # its time may have come meanwhile

    def _has_left(self, key: Key, offset: int) -> None:
        leaving = self._leaving[key]
        leaving.discard(offset)
        if not leaving:
            del self._leaving[key]

    # --- time ---

    def due(self) -> list[tuple[int, Key, int]]:
        """When each queue is free again, unless it is sooner."""
        return [(take.free_ms, key, take.handle) for key, take in self._takes.items()]

    def move(self, step_ms: int) -> int:
        """The clock was stepped: what is out is invisible for as long as before. How many there
        are."""
        takes = list(self._takes.items())
        for key, take in takes:
            self._books.change(QueueTaken(*key, take.moved(step_ms)))
        return len(takes)

    def is_due(self, free_ms: int, key: Key, handle: int, now_ms: int) -> None:
        there, take = self._takes.get(key), self._take_of(key)
        if there is None or (there.handle, there.free_ms) != (handle, free_ms):
            return  # done with, or has another time, with an entry of its own
        if take is None or key in self._leaving:
            return
        if not self._bury_if_hopeless(key, take, now_ms):
            self._freed(key[0], key[1])

    # --- dead letters of those who never say a word ---

    def _bury_if_hopeless(self, key: Key, take: Take, now_ms: int) -> bool:
        """If the first message was handed out too often, and its last owner's time is over. Those
        behind it may never have been begun: they have a time of their own."""
        offset, count = take.left[0]
        config = self._books.groups.configs.get(key[0])
        most = 0 if config is None else config.retry_max_times
        if offset >= take.held_end or count < most or take.until_ms > now_ms:
            return False
        self._leaving[key] = {offset}
        self._bury(key, offset, count)
        return True

    def _bury(self, key: Key, offset: int, count: int) -> None:
        group, topic, queue_id = key
        letter = GivenBack(topic, queue_id, offset, UNKNOWN_PLACE, delay_level=-1)
        settled = partial(self._buried, key, offset, count)
        try:
            self._retries.give_back(GiveBackMessages(group, [letter]), settled, handed_out=[count])
        except CometError as error:
            log.warning("group %s: %s/%d offset %d is no dead letter yet: %s",
                        group, topic, queue_id, offset, error)  # fmt: skip
            settled([])

    def _buried(self, key: Key, offset: int, count: int, codes: Sequence[int]) -> None:
        take = self._take_of(key)
        if take is None:  # the group goes on elsewhere
            self._has_left(key, offset)
        elif codes and self._out.is_done(key, offset, codes[0]):
            self._has_left(key, offset)
            self._set(key, take.cut(offset).without(offset, offset + 1))
            self._books.send()
        else:
            self._actor.after(self._out.pause_s(codes), partial(self._bury, key, offset, count))


def _popped(key: Key, take: Take) -> list[Popped]:
    """What is out, as neighbours."""
    found: list[Popped] = []
    for offset, count in take.out():
        last = found[-1] if found else None
        if last is None or last.queue_offset + last.count != offset:
            found.append(Popped(key[1], key[2], offset, 1, take.handle, take.until_ms, [count]))
        else:
            counts = [*last.counts, count]
            found[-1] = msgspec.structs.replace(last, count=last.count + 1, counts=counts)
    return [
        each if any(each.counts) else msgspec.structs.replace(each, counts=[]) for each in found
    ]
