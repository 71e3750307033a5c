"""Queue-less groups (POP): who may have which messages, until when, and what is done with.

Consumers read the messages themselves; here only stretches of queues are given out. Each is a
change of the ledger before it is told. What is not acknowledged in time is stored once more in the
group's retry topic, with one attempt more, or in the end among its dead letters: then the original
counts as done with, and so nothing stands in the way of what follows it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from secrets import randbits
from typing import Final

from cometmq.actors.books.popped import Key
from cometmq.actors.coordination.beginnings import HELD_MAX, Arrivals, Beginnings
from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.popped_out import PoppedOut
from cometmq.actors.coordination.retries import Retries
from cometmq.actors.coordination.topics import Stored
from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import (
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    POP_ACKS_MAX,
    POP_WAIT_MS_MAX,
    AckPopped,
    ChangeInvisible,
    Command,
    Done,
    PopAck,
    PopMessages,
    Popped,
    PoppedMessages,
    PopsSettled,
    StopPopping,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    HandleUnknown,
    OffsetIllegal,
    SystemBusy,
)
from cometmq.protocol.ledger import (
    Change,
    MessagesPopped,
    OffsetSet,
    PopExtended,
    PopsAcked,
)
from cometmq.protocol.names import POP_RETRY_SIGNS, RETRY_PREFIX
from cometmq.shm.live.queue_table import QueueRange

SPAN_MAX: Final = 65_536  # of a queue: from the first that is not acknowledged to the last popped
HANDLES_MAX: Final = 200_000  # of all groups
LOOK_MAX: Final = 64  # groups and topics that are looked at at once
RETRY_TURNS: Final = 5  # RocketMQ: in one of so many the retry topic comes first


class _Held:
    """A command that waits for messages, until a time.monotonic()."""

    __slots__ = ("command", "key", "request", "until")

    def __init__(self, request: Request, command: PopMessages, until: float) -> None:
        self.request = request
        self.command = command
        self.until = until
        self.key = (command.group, command.topic)

    def __lt__(self, other: _Held) -> bool:
        return self.until < other.until


class Pops:
    """See the module.

    Args:
        stored: see Family.stored.
    """

    def __init__(
        self, actor: ServiceActor, books: Books, members: Members, retries: Retries, stored: Stored
    ) -> None:
        self._actor = actor
        self._books = books
        self._book = books.popped
        self._members = members
        self._out = PoppedOut(actor, books, retries)
        self._stored = stored
        self.may_grant: Callable[[], bool] = lambda: True  # now; whoever waits goes on waiting
        self._arrivals: Arrivals | None = None
        self._seen = -1  # of the arrivals, when was last looked
        self._turns: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], dict[_Held, None]] = {}  # in the order in which they came
        self._held_count = 0
        self._until: list[_Held] = []  # a heap, with some that are held no longer
        self._alarm: Timer | None = None
        self._beginnings = Beginnings(actor, books, members, stored, self._look_on)
        self._to_look: deque[tuple[str, str]] = deque()  # whose messages may have come
        self._answers: list[tuple[Request, Command]] = []  # of this round

    def begin(self, arrivals: Arrivals | None) -> None:
        """The books are as they were."""
        self._arrivals = self._beginnings.arrivals = arrivals
        self._out.find()

    def end(self, error: CometError) -> None:
        """Whoever waits for messages hears that there will be none."""
        for held in self._held.values():
            for each in held:
                each.request.fail(error)
        self._beginnings.end(error)
        self._held.clear()
        self._until.clear()
        self._held_count = 0

    # --- commands ---

    def on_pop_messages(self, command: PopMessages, request: Request) -> None:
        _check_invisible(command.invisible_ms)
        self._beginnings.check(command)
        if not self._beginnings.waits(command, request):
            self._serve(command, request)

    def _serve(self, command: PopMessages, request: Request) -> None:
        self._beginnings.begin(command)
        popped = self._pop(command)
        if popped or command.wait_ms <= 0:
            self._answers.append((request, PoppedMessages(popped)))
        else:
            self._hold(command, request)

    def on_ack_popped(self, command: AckPopped, request: Request) -> None:
        if len(command.acks) > POP_ACKS_MAX:
            raise ArgumentIllegal(f"{len(command.acks)} acks in one command: {POP_ACKS_MAX}")
        self._books.check_room()
        codes = [self._ack(command.group, each) for each in command.acks]
        self._answers.append((request, PopsSettled(codes)))

    def on_change_invisible(self, command: ChangeInvisible, request: Request) -> None:
        if len(command.extensions) > POP_ACKS_MAX:
            raise ArgumentIllegal(f"{len(command.extensions)} in one command: {POP_ACKS_MAX}")
        for each in command.extensions:
            _check_invisible(each.invisible_ms)
        self._books.check_room()
        codes = []
        now = self._out.now_ms()
        for each in command.extensions:
            key = (command.group, each.topic, each.queue_id)
            queue = self._book.get(*key)
            if queue is None or each.handle not in queue.out or self._out.is_over(each.handle):
                codes.append(HandleUnknown.code)
                continue
            until_ms = now + each.invisible_ms
            self._books.change(PopExtended(*key, each.handle, until_ms))
            self._out.push(until_ms, key, each.handle)
            codes.append(0)
        self._answers.append((request, PopsSettled(codes)))

    # --- popping ---

    def _pop(self, command: PopMessages) -> list[Popped]:
        """Give out what there is, of all queues in turn."""
        group, topic = command.group, command.topic
        turn = self._turns.get((group, topic), 0)
        self._turns[group, topic] = turn + 1
        topics = [topic]
        for retry in self._retry_topics(group, topic):
            topics.insert(0 if turn % RETRY_TURNS == 0 else len(topics), retry)
        found: list[Popped] = []
        left = command.max_count
        for name in topics:
            queues = sorted(self._stored(name).items())
            for step in range(len(queues)):
                queue_id, there = queues[(turn + step) % len(queues)]
                popped = self._pop_queue((group, name, queue_id), there, left, command.invisible_ms)
                if popped is not None:
                    found.append(popped)
                    left -= popped.count
                    if not left:
                        return found
        return found

    def _retry_topics(self, group: str, topic: str) -> list[str]:
        """Ours, and those where a RocketMQ broker has what its consumers had popped in vain: their
        name may be that of another group's, too."""
        retry = RETRY_PREFIX + group
        names = [retry, *(retry + sign + topic for sign in POP_RETRY_SIGNS)]
        known, groups = self._books.topics, self._books.groups.configs
        return [
            name for name in names
            if name in known and (name == retry or name.removeprefix(RETRY_PREFIX) not in groups)
        ]  # fmt: skip

    def _pop_queue(
        self, key: Key, there: QueueRange, most: int, invisible_ms: int
    ) -> Popped | None:
        queue = self._book.get(*key)
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
        if count <= 0 or self._book.count >= HANDLES_MAX:
            return None
        handle, until_ms = randbits(62) + 1, self._out.now_ms() + invisible_ms
        self._change(MessagesPopped(*key, first, first + count, handle, until_ms))
        if queue is None and offset != first:
            self._change(OffsetSet(*key, first))
        self._out.push(until_ms, key, handle)
        return Popped(key[1], key[2], first, count, handle, until_ms)

    def _change(self, *changes: Change) -> None:
        for change in changes:
            self._books.change(change)

    # --- acknowledging ---

    def _ack(self, group: str, ack: PopAck) -> int:
        """The code."""
        key = (group, ack.topic, ack.queue_id)
        queue = self._book.get(*key)
        first, end = ack.queue_offset, ack.queue_offset + ack.count
        if queue is None or ack.handle <= 0:
            return HandleUnknown.code
        if self._out.goes_back(ack.handle, first, end):
            return HandleUnknown.code
        out = queue.out.get(ack.handle)
        if out is None:
            done = ack.count > 0 and end <= queue.top and not queue.left_of(first, end)
            return 0 if done else HandleUnknown.code
        if not out.first <= first < end <= out.end:
            return OffsetIllegal.code
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

    def _hold(self, command: PopMessages, request: Request) -> None:
        if self._held_count >= HELD_MAX:
            raise SystemBusy(f"{HELD_MAX} consumers wait for messages already")
        wait_s = min(command.wait_ms, POP_WAIT_MS_MAX) / 1000
        held = _Held(request, command, time.monotonic() + wait_s)
        self._held.setdefault(held.key, {})[held] = None
        self._held_count += 1
        heapq.heappush(self._until, held)
        if self._until[0] is held:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._until:
            wait_s = max(0.0, self._until[0].until - time.monotonic())
            self._alarm = self._actor.after(wait_s, self._end_waits)

    def _take_held(self, held: _Held) -> Request:
        """It waits no longer."""
        of_key = self._held[held.key]
        del of_key[held]
        if not of_key:
            del self._held[held.key]
        self._held_count -= 1
        if not self._held_count:
            self._until.clear()
        return held.request

    def look(self) -> None:
        """Those that came first have what has come since; some groups at a time, so that others
        are heard meanwhile."""
        if not (self._held or self._beginnings) or self._arrivals is None:
            return
        if not self.may_grant():
            return
        self._arrivals.arm()
        value = self._arrivals.value
        self._beginnings.serve_due(value, self._serve)
        if value != self._seen:
            self._seen = value
            self._to_look = deque(self._held)
        for _ in range(min(LOOK_MAX, len(self._to_look))):
            self._give_to(self._to_look.popleft())
        if self._to_look:
            self._actor.call_soon(self._look_on)

    def _look_on(self) -> None:
        self.finish_round()
        self._books.send()

    def _give_to(self, key: tuple[str, str]) -> None:
        for held in list(self._held.get(key, ())):
            try:
                popped = self._pop(held.command)
            except CometError as error:
                self._take_held(held).fail(error)
                continue
            if not popped:
                return
            self._answers.append((self._take_held(held), PoppedMessages(popped)))

    def _end_waits(self) -> None:
        now = time.monotonic()
        while self._until and self._until[0].until <= now:
            self._end_held(heapq.heappop(self._until))
        self._set_alarm()

    def _end_held(self, held: _Held) -> None:
        if held in self._held.get(held.key, ()):
            self._take_held(held).reply(PoppedMessages([]))

    def on_stop_popping(self, command: StopPopping, _request: Request) -> Command:
        for key in [key for key in self._held if key[0] == command.group]:
            for held in list(self._held.get(key, ())):
                if held.command.consumer == command.consumer:
                    self._end_held(held)
        self._beginnings.stop(command)
        return Done()

    def statistics(self) -> dict[str, int | float | str]:
        return {"popped": self._book.count, "held_pops": self._held_count + len(self._beginnings)}


def _check_invisible(invisible_ms: int) -> None:
    if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        raise ArgumentIllegal(
            f"invisible for {invisible_ms} ms: {INVISIBLE_MS_MIN} to {INVISIBLE_MS_MAX}"
        )
