"""Queue-less groups (POP): who may have which messages, until when, and what is done with.

Consumers read the messages themselves; here only stretches of queues are given out. Each is a
change of the ledger before it is told. What is not acknowledged in time is stored once more in the
group's retry topic, with one attempt more, or in the end among its dead letters: then the original
counts as done with, and so nothing stands in the way of what follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from secrets import randbits
from typing import Final

from cometmq.actors.coordination.beginnings import (
    Arrivals,
    Beginnings,
    FarOffsets,
    check_attempt,
)
from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.held_pops import HeldPops
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.ordered_pops import OrderedPops
from cometmq.actors.coordination.popped_out import PoppedOut
from cometmq.actors.coordination.poppers import Poppers
from cometmq.actors.coordination.retries import Retries
from cometmq.actors.coordination.topics import Stored
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.group_settings import check_order
from cometmq.actors.tables.popped import Key
from cometmq.protocol.commands import (
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    POP_ACKS_MAX,
    AckPopped,
    ChangeInvisible,
    Command,
    Done,
    PopAck,
    PopMessages,
    Popped,
    PoppedMessages,
    PopsSettled,
    ReleasePopped,
    StopPopping,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    HandleUnknown,
    OffsetIllegal,
)
from cometmq.protocol.ledger import (
    Change,
    MessagesPopped,
    OffsetSet,
    PopExtended,
    PopsAcked,
)
from cometmq.protocol.names import RETRY_PREFIX, check_group
from cometmq.shm.live.queue_table import QueueRange

SPAN_MAX: Final = 65_536  # of a queue: from the first that is not acknowledged to the last popped
HANDLES_MAX: Final = 200_000  # of all groups
LOOK_MAX: Final = 64  # groups and topics that are looked at at once
RETRY_TURNS: Final = 5  # RocketMQ: in one of so many the retry topic comes first


class Pops:
    """See the module.

    Args:
        stored: see Family.stored.
    """

    def __init__(
        self,
        actor: ServiceActor,
        books: Books,
        members: Members,
        poppers: Poppers,
        retries: Retries,
        stored: Stored,
    ) -> None:
        self._gate = members.gate
        self._actor = actor
        self._books = books
        self._book = books.popped
        self._poppers = poppers
        self._out = PoppedOut(actor, books, retries)
        self._ordered = OrderedPops(actor, books, self._out, retries, self._freed)
        self._stored = stored
        self._arrivals: Arrivals | None = None
        self._seen = -1  # of the arrivals, when was last looked
        self._turns: dict[tuple[str, str], int] = {}
        self._retry_topics = books.retry_topics
        self._far = FarOffsets(books)
        self._held = HeldPops(actor)
        self._beginnings = Beginnings(actor, books, members, stored)
        self._to_look: deque[tuple[str, str]] = deque()  # whose messages may have come
        self._answers: list[tuple[Request, Command]] = []  # of this round

    def begin(self, arrivals: Arrivals | None) -> None:
        """The books are as they were."""
        self._arrivals = self._beginnings.arrivals = arrivals
        self._out.find()

    def end(self, error: CometError) -> None:
        """Whoever waits for messages hears that there will be none."""
        self._held.fail_all(error)
        self._beginnings.fail_all(error)

    # --- commands ---

    def on_pop_messages(self, command: PopMessages, request: Request) -> None:
        _check_invisible(command.invisible_ms)
        self._beginnings.check(command)
        self._poppers.note(command, request)
        if not self._beginnings.waits(command, request):
            self._serve(command, request)

    def _serve(self, command: PopMessages, request: Request) -> None:
        self._beginnings.begin(command)
        is_over = not command.max_count or self._held.is_stopped(command)
        popped = [] if is_over else self._pop(command)
        if popped or command.wait_ms <= 0 or is_over:
            self._answers.append((request, PoppedMessages(popped)))
        else:
            self._held.hold(command, request)

    def on_ack_popped(self, command: AckPopped, request: Request) -> None:
        if len(command.acks) > POP_ACKS_MAX:
            raise ArgumentIllegal(f"{len(command.acks)} acks in one command: {POP_ACKS_MAX}")
        self._books.check_room()
        codes = [self._ack(command.group, each) for each in command.acks]
        self._answers.append((request, PopsSettled(codes)))

    def on_change_invisible(self, command: ChangeInvisible, request: Request) -> None:
        if len(command.extensions) > POP_ACKS_MAX:
            raise ArgumentIllegal(f"{len(command.extensions)} in one command: {POP_ACKS_MAX}")
        is_ordered = self._ordered.keeps_order(command.group)
        for each in command.extensions:
            if each.invisible_ms or not is_ordered:
                _check_invisible(each.invisible_ms)
        self._books.check_room()
        codes = []
        now = self._out.now_ms()
        for each in command.extensions:
            key = (command.group, each.topic, each.queue_id)
            until_ms = now + each.invisible_ms
            queue = self._book.get(*key)
            if queue is None:
                codes.append(self._ordered.extend(key, each, until_ms))
                continue
            if each.handle not in queue.out or self._out.is_over(each.handle):
                codes.append(HandleUnknown.code)
                continue
            self._books.change(PopExtended(*key, each.handle, until_ms))
            self._out.push(until_ms, key, each.handle)
            codes.append(0)
        self._answers.append((request, PopsSettled(codes)))

    def on_release_popped(self, command: ReleasePopped, request: Request) -> None:
        if len(command.releases) > POP_ACKS_MAX:
            raise ArgumentIllegal(f"{len(command.releases)} in one command: {POP_ACKS_MAX}")
        self._books.check_room()
        codes = [self._release(command.group, each) for each in command.releases]
        self._answers.append((request, PopsSettled(codes)))

    def _release(self, group: str, part: PopAck) -> int:
        """Release messages and return the code."""
        key = (group, part.topic, part.queue_id)
        queue = self._book.get(*key)
        if queue is None:
            return self._ordered.release(key, part)
        first, end = part.queue_offset, part.queue_offset + part.count
        code = self._out.release(key, queue, part.handle, first, end)
        if not code:
            self._freed(group, part.topic)
        return code

    # --- popping ---

    def _pop(self, command: PopMessages) -> list[Popped]:
        """Give out what there is, of all queues in turn."""
        config = self._books.groups.configs.get(command.group)
        if config is not None:  # it may have changed while this waited
            check_order(config, orderly=command.orderly)
        if command.orderly:
            return self._ordered.pop(command, self._in_turn(command))
        found: list[Popped] = []
        left = command.max_count
        for key, there in self._in_turn(command):
            while left and (popped := self._pop_queue(key, there, left, command)) is not None:
                found.append(popped)
                left -= popped.count
            if not left:
                break
        return found

    def _in_turn(self, command: PopMessages) -> Iterator[tuple[Key, QueueRange]]:
        """The queues, each time from another one on."""
        group, topic = command.group, command.topic
        turn = self._turns.get((group, topic), 0)
        self._turns[group, topic] = turn + 1
        topics = [topic]
        for retry in self._retry_topics.read_by(group, topic):
            topics.insert(0 if turn % RETRY_TURNS == 0 else len(topics), retry)
        for name in topics:
            dispatched = 0 if self._arrivals is None else self._arrivals.value  # before the ends
            queues = sorted(self._stored(name).items())
            for step in range(len(queues)):
                queue_id, there = queues[(turn + step) % len(queues)]
                key = (group, name, queue_id)
                if self._arrivals is not None and self._book.get(*key) is None:
                    self._far.look(key, there.max_queue_offset, dispatched, self._arrivals)
                yield key, there

    def _pop_queue(
        self, key: Key, there: QueueRange, most: int, command: PopMessages
    ) -> Popped | None:
        queue = self._book.get(*key)
        while queue is not None and queue.free:
            first, end = queue.free[0]
            if first >= there.min_queue_offset:
                return self._give_out(key, first, min(end, first + most), command)
            expired = min(end, there.min_queue_offset)
            self._out.done(key, queue, 0, first, expired)
        offset = self._books.offsets.get(*key)
        floor = max(offset, 0) if queue is None else queue.floor
        begin = floor if queue is None else queue.top
        first = max(begin, there.min_queue_offset)
        if queue is None:
            floor = first
        elif begin < first:  # they have expired
            self._change(MessagesPopped(*key, begin, first, 0, 0), PopsAcked(*key, 0, begin, first))
            self._out.keep_floor(key, queue)
            floor = queue.floor
        count = min(most, there.max_queue_offset - first, floor + SPAN_MAX - first)
        if count <= 0:
            return None
        popped = self._give_out(key, first, first + count, command)
        if popped is not None and queue is None and offset != first:
            self._change(OffsetSet(*key, first))
        return popped

    def _give_out(self, key: Key, first: int, end: int, command: PopMessages) -> Popped | None:
        if self._book.count >= HANDLES_MAX:
            return None
        handle, until_ms = randbits(62) + 1, self._out.now_ms() + command.invisible_ms
        self._change(MessagesPopped(*key, first, end, handle, until_ms, command.attempt))
        self._out.push(until_ms, key, handle)
        return Popped(key[1], key[2], first, end - first, handle, until_ms)

    def _change(self, *changes: Change) -> None:
        for change in changes:
            self._books.change(change)

    # --- acknowledging ---

    def _ack(self, group: str, ack: PopAck) -> int:
        """The code."""
        key = (group, ack.topic, ack.queue_id)
        queue = self._book.get(*key)
        first, end = ack.queue_offset, ack.queue_offset + ack.count
        if queue is None:
            return self._ordered.ack(key, ack)
        if ack.handle <= 0:
            return HandleUnknown.code
        if self._out.goes_back(ack.handle, first, end):
            return HandleUnknown.code
        out = queue.out.get(ack.handle)
        if out is None:
            done = ack.count > 0 and end <= queue.top and not queue.left_of(first, end)
            return 0 if done else HandleUnknown.code
        if not out.first <= first < end <= out.end:
            return OffsetIllegal.code
        if any(first < gone[1] and gone[0] < end for gone in out.released):
            return HandleUnknown.code
        self._out.done(key, queue, ack.handle, first, end)
        return 0

    # --- the end of a round ---

    def finish_round(self) -> None:
        """What was changed is kept, and then told."""
        self.look()
        if self._answers:
            answers, self._answers = self._answers, []
            self._books.then(partial(self._answer, answers))

    def _answer(self, answers: Sequence[tuple[Request, Command]], error: CometError | None) -> None:
        for request, answer in answers:
            if error is None:
                request.reply(answer)
            else:
                request.fail(error)
        if error is not None:
            self._out.find()  # what was taken back may be out again

    # --- waiting for messages ---

    def look(self) -> None:
        """Those that came first have what has come since; some groups at a time, so that others
        are heard meanwhile."""
        if not (self._held or self._beginnings) or self._arrivals is None:
            return
        if self._gate is not None and not self._gate.grants:
            return  # who waits goes on waiting
        self._arrivals.arm()
        value = self._arrivals.value
        self._beginnings.serve_due(value, self._serve)
        if value != self._seen:
            self._seen = value
            self._to_look = deque(self._held.keys)
        for _ in range(min(LOOK_MAX, len(self._to_look))):
            self._give_to(self._to_look.popleft())
        if self._to_look:
            self._actor.call_soon(self._look_on)

    def _freed(self, group: str, topic: str) -> None:
        """There is something for whoever waits for that queue."""
        keys = [(group, topic)]
        if topic.startswith(RETRY_PREFIX):  # what was given back before the group kept an order
            keys = [key for key in self._held.keys if key[0] == group]
        waiting = [key for key in keys if self._held.of(key)]
        if waiting:
            self._to_look += waiting
            self._actor.call_soon(self._look_on)

    def _look_on(self) -> None:
        self.finish_round()
        self._books.send()

    def _give_to(self, key: tuple[str, str]) -> None:
        for held in self._held.of(key):
            try:
                popped = self._pop(held.command)
            except CometError as error:
                self._held.release(held).fail(error)
                continue
            if not popped:
                return
            self._answers.append((self._held.release(held), PoppedMessages(popped)))

    def on_stop_popping(self, command: StopPopping, request: Request) -> None:
        check_group(command.group)
        check_attempt(command.attempt)
        if not command.attempt:
            self._poppers.stop(command)
        self._held.stop(command)
        self._beginnings.stop(command)
        if command.attempt:  # the consumer never received the answer
            self._ordered.release_attempt(command.group, command.attempt)
            for part in self._book.out_of(command.group, command.attempt):
                self._release(command.group, part)
        self._answers.append((request, Done()))

    def statistics(self) -> meters.Figures:
        popped = self._book.count + len(self._books.takes)
        held = len(self._held) + len(self._beginnings)
        return {
            meters.POPPED: popped,
            meters.HELD_POPS: held,
            meters.NEVER_POPPED_AGAIN: self._out.aside,
        }


def _check_invisible(invisible_ms: int) -> None:
    if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        raise ArgumentIllegal(
            f"invisible for {invisible_ms} ms: {INVISIBLE_MS_MIN} to {INVISIBLE_MS_MAX}"
        )
