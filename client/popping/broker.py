"""One broker of a pop consumer: pops, reads what it was given, acknowledges."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple

from cometmq.client.arguments import check
from cometmq.client.handling.work import describe
from cometmq.client.origins import Elsewhere, find, register
from cometmq.client.popping.call import PopCall
from cometmq.client.receiving.replying import Replier
from cometmq.client.routes import Routes
from cometmq.protocol.commands import (
    GIVEN_BACK_MAX,
    POP_ACKS_MAX,
    AckPopped,
    BrokerEndpoints,
    ChangeInvisible,
    Command,
    GetLine,
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    PopAck,
    PopExtension,
    PopMessages,
    Popped,
    PoppedMessages,
    PopsSettled,
    PullMessages,
    PullResult,
    PullStatus,
    ReleasePopped,
    StopPopping,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    BadRequest,
    CometError,
    HandleUnknown,
    NotConfirmed,
    NotReachable,
    from_code,
)
from cometmq.protocol.frames import Frame
from cometmq.protocol.names import RETRY_PREFIX
from cometmq.protocol.retry import pause_s
from cometmq.protocol.tags import ALL_TAGS
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import (
    Message,
    count_attempts,
    decode,
    restore_topics,
    set_source,
    source_of,
)
from cometmq.shm.os.processes import boot_id, own_process
from cometmq.shm.reading.selection import selection_of

log = logging.getLogger(__name__)

PULL_BYTES: Final = 4_194_304
SUSPEND_MS: Final = 1_000  # what was popped may not be shown yet (SYNC_FLUSH)
ASK_S: Final = 3.0
ANSWER_S: Final = 0.5  # that an answer takes, if it need not wait
LOOK_UP_S: Final = 0.5
CONNECT_S: Final = 1.0  # who is not there by then is looked for anew
BEGIN_S: Final = 6.0  # the broker may have to dispatch the end of the topic first
STOP_S: Final = 1.0  # time limit of StopPopping to a broker that may be unreachable
LOST_MAX: Final = 64  # commands to repeat; beyond, messages come back after `invisible_s`


class Wanted(NamedTuple):
    """What a consumer asks for."""

    group: str
    topic: str
    tags: str
    sql: str
    invisible_ms: int
    from_latest: bool
    consumer: str
    is_async: bool
    orderly: bool


class Taken:
    """Consecutive messages of a queue that this consumer has popped; the origin of each."""

    __slots__ = ("broker", "late", "popped", "reply", "until")

    def __init__(self, broker: PopBroker, popped: Popped, until: float, invisible_s: float) -> None:
        self.broker = broker
        self.popped = popped
        self.reply = broker.replies.reply  # Message.reply asks it
        # By time.monotonic(); not by `until_ms`: that is the broker's clock, which this machine's
        # need not agree with.
        self.until = until
        self.late = (
            until - invisible_s / 2
        )  # a message that still waits here at that time is released

    def __reduce__(self) -> tuple[Any, ...]:
        invisible_s = 2 * (self.until - self.late)
        return _taken, (self.broker.origin, self.popped, self.until, invisible_s)


def _taken(origin: str, popped: Popped, until: float, invisible_s: float) -> Taken | Elsewhere:
    """Rebuild the origin of a pickled message. Raises ArgumentIllegal for other arguments."""
    times = until, invisible_s
    if not isinstance(popped, Popped) or not all(isinstance(each, float) for each in times):
        raise ArgumentIllegal(f"{popped!r}, {times!r} is no answer of a broker")
    broker = find(origin, PopBroker)
    if broker is None:
        return Elsewhere(_taken, origin, popped, *times)
    return Taken(broker, popped, *times)


def taken_of(message: Message) -> Taken:
    check("message", message, Message)
    taken = source_of(message)
    if not isinstance(taken, Taken):
        raise ArgumentIllegal(f"{describe(message)} was not popped by a consumer of this process")
    return taken


class PopBroker:
    """See the module. Threads may share it."""

    def __init__(
        self,
        routes: Routes,
        wanted: Wanted,
        endpoints: Callable[[], BrokerEndpoints],
        timeout_s: float,
    ) -> None:
        self._routes = routes
        self._wanted = wanted
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self.origin = register(self)
        replier = Replier(routes, has_lines=True)
        replier.is_async = wanted.is_async
        self.replies = replier.source(endpoints)
        self._process = own_process()
        # Release messages that no caller received; unconfirmed, and so repeated.
        self._lost: deque[StopPopping | ReleasePopped] = deque(maxlen=LOST_MAX)
        # Until the group has begun here: a topic that is created again begins at its front.
        self._from_latest = wanted.from_latest
        self._is_older = False  # the broker does not know ReleasePopped
        self.failures = 0
        self.again_at = 0.0  # time.monotonic(): before it is not asked

    @property
    def name(self) -> str:
        return self._endpoints().broker

    def _coordinator(self) -> Channel:
        endpoints = self._endpoints()
        name = f"the coordinator of {endpoints.broker}"
        return self._routes.channel(endpoints.coordinator, name, GetLine(boot_id(), is_stream=True))

    def _ask_once(
        self, channel: Channel, command: Command, timeout_s: float
    ) -> tuple[Command, Sequence[Frame]]:
        """Where that fails the name server is asked who is the master now, for the next time."""
        try:
            return channel.ask(command, timeout_s=timeout_s, connect_s=CONNECT_S)
        except CometError as error:
            if may_help(error):
                look_up(self._routes, self._wanted.topic)
            raise

    def begin(self) -> None:
        """Set the initial offsets of a new group, at the end of the topic's queues. If the broker
        does not answer, or is older, the group begins with the first `pop`."""
        wanted = self._wanted
        command = PopMessages(
            wanted.group, wanted.topic, 0, wanted.invisible_ms, 0, self._from_latest,
            wanted.consumer, wanted.orderly, "", wanted.tags, wanted.sql, self._process,
        )  # fmt: skip
        try:
            self._ask_once(self._coordinator(), command, BEGIN_S)
        except CometError as error:
            log.debug("broker %s: %s", self.name, error)
        else:
            self._from_latest = False

    def pop(self, count: int, wait_s: float, call: PopCall) -> list[Message]:
        """Return messages, each with its Taken as origin. Raises the coordinator's errors.

        Args:
            call: the `poll`; its `cancel` ends a wait of this method.
        """
        wanted = self._wanted
        if not self.release_lost():
            wait_s = min(wait_s, STOP_S)  # their time may be long: try again soon
        # Never one of before: a StopPopping for that, however late, would release these messages.
        attempt = token_hex(8)
        command = PopMessages(
            wanted.group, wanted.topic, count, wanted.invisible_ms, round(wait_s * 1000),
            self._from_latest, wanted.consumer, wanted.orderly, attempt, wanted.tags,
            wanted.sql, self._process,
        )  # fmt: skip
        asked = time.monotonic()
        try:
            with call.waits(partial(self.stop, attempt)) as is_wanted:
                if not is_wanted:
                    return []
                answer, _ = self._ask_once(self._coordinator(), command, wait_s + self._timeout_s)
            assert isinstance(answer, PoppedMessages)
            self.failures = 0
            self._from_latest = False
            # This process may have been stopped since the broker answered.
            answered = min(time.monotonic(), asked + wait_s + ANSWER_S)
            found = self._read_all(answer.popped, answered + wanted.invisible_ms / 1000)
        except BaseException as error:
            if isinstance(error, NotConfirmed) or not isinstance(error, CometError):
                self._lost.append(self._stop_command(attempt))
            raise
        return found

    def release_lost(self) -> bool:
        """Release messages that no caller received; return False if some may be left."""
        for command in list(self._lost):
            if not self._send_stop(command):
                return False
            with suppress(ValueError):  # another thread has sent it as well
                self._lost.remove(command)
        return True

    def _read_all(self, given: Sequence[Popped], until: float) -> list[Message]:
        found: list[Message] = []
        unread: set[int] = set()  # handles: in order, nothing behind them is handed out either
        for popped in given:
            if popped.handle in unread:
                continue
            taken = Taken(self, popped, until, self._wanted.invisible_ms / 1000)
            try:
                found += self._read(taken)
            except CometError as error:
                unread.add(popped.handle)
                log.warning(
                    "%s/%d from %d on was popped, and cannot be read: %s",
                    popped.topic, popped.queue_id, popped.queue_offset, error,
                )  # fmt: skip
                self._release_unread(taken)
        if self._wanted.orderly and time.monotonic() >= until:
            for taken in by_take(found):  # another consumer may have them by now
                self._release_unread(taken)
            return []
        return found

    def put_off(self, error: CometError) -> None:
        """Do not ask for a moment."""
        self.failures += 1
        self.again_at = time.monotonic() + pause_s(self.failures)
        level = logging.WARNING if self.failures == 1 else logging.DEBUG
        log.log(level, "broker %s: %s", self.name, error)

    def _read(self, taken: Taken) -> list[Message]:
        popped = taken.popped
        at, end = popped.queue_offset, popped.queue_offset + popped.count
        found: list[Message] = []
        wanted = self._wanted
        again = popped.topic.startswith(RETRY_PREFIX)
        tags, sql = (ALL_TAGS, "") if again else (wanted.tags, wanted.sql)  # it was chosen before
        chosen = selection_of(tags, sql)
        deadline = min(taken.until, time.monotonic() + self._timeout_s)
        suspend_ms = 0  # a reader would wait for one that is chosen, which may never come
        while at < end:
            answer, payload = self._pull(popped, at, tags, sql, suspend_ms, deadline)
            if answer.status == PullStatus.FOUND and payload:
                messages = decode(payload[0].buffer, chosen.tags, filter=chosen.filter)
                found += [each for each in messages if each.queue_offset < end]
            if answer.next_queue_offset > at:
                at, suspend_ms = answer.next_queue_offset, 0
            elif time.monotonic() > deadline:
                raise NotConfirmed(f"its reader does not show offset {at}")
            else:
                suspend_ms = SUSPEND_MS
        if again:
            restore_topics(found)
        if again and popped.topic != RETRY_PREFIX + wanted.group:
            # The topic's name may be the one of another group and topic, too.
            mine = wanted.topic, popped.topic  # RocketMQ's do not say where they were sent
            found = [message for message in found if message.topic in mine]
        set_source(found, taken)
        for message in found if popped.counts else ():
            count_attempts([message], popped.counts[message.queue_offset - popped.queue_offset])
        self._pass_over(taken, found)
        return found

    def _pull(
        self, popped: Popped, at: int, tags: str, sql: str, suspend_ms: int, deadline: float
    ) -> tuple[PullResult, Sequence[Frame]]:
        """From a reader; again, while that may help."""
        command = PullMessages(
            popped.topic, popped.queue_id, at, popped.queue_offset + popped.count - at, PULL_BYTES,
            suspend_ms, tags, sql=sql,
        )  # fmt: skip
        failures = 0
        while True:
            readers = self._endpoints().readers
            endpoint = readers[popped.queue_id % len(readers)]
            try:
                channel = self._routes.channel(endpoint, f"the reader at {endpoint}")
                answer, payload = self._ask_once(channel, command, ASK_S + suspend_ms / 1000)
            except CometError as error:
                failures += 1
                _pause(error, failures, deadline)
            else:
                assert isinstance(answer, PullResult)
                return answer, payload

    def _pass_over(self, taken: Taken, found: Sequence[Message]) -> None:
        """What the consumer did not want of it is done with."""
        popped = taken.popped
        if len(found) == popped.count:
            return
        wanted = {message.queue_offset for message in found}
        at = range(popped.queue_offset, popped.queue_offset + popped.count)
        self.ack([(taken, [offset for offset in at if offset not in wanted])])

    # --- what becomes of them ---

    def ack(self, done: Iterable[tuple[Taken, Sequence[int]]]) -> list[int]:
        """Have these offsets acknowledged; the errors' codes that came back, each once."""
        acks = [each for taken, offsets in done for each in parts_of(taken, offsets)]
        codes: set[int] = set()
        for at in range(0, len(acks), POP_ACKS_MAX):
            codes.update(self._settle(AckPopped(self._wanted.group, acks[at : at + POP_ACKS_MAX])))
        return sorted(codes - {0})

    def extend(self, taken: Taken, invisible_ms: int) -> list[int]:
        popped = taken.popped
        extension = PopExtension(popped.topic, popped.queue_id, popped.handle, invisible_ms)
        codes = self._settle(ChangeInvisible(self._wanted.group, [extension]))
        taken.until = time.monotonic() + invisible_ms / 1000
        return [code for code in codes if code]

    def release(self, messages: Sequence[Message]) -> list[int]:
        """Release messages; return the distinct error codes of the answers."""
        if not self._is_older:
            takes = by_take(messages).items()
            parts = [each for taken, offsets in takes for each in parts_of(taken, offsets)]
            try:
                return self._release_parts(parts)
            except BadRequest as error:
                self._is_older = True
                log.warning(
                    "broker %s is older than this client and cannot release messages (%s): those "
                    "that no handler has begun with are given back instead, which counts as an "
                    "attempt", self.name, error,
                )  # fmt: skip
        return self._release_by_older(messages)

    def _release_parts(self, parts: Sequence[PopAck]) -> list[int]:
        codes: set[int] = set()
        for at in range(0, len(parts), POP_ACKS_MAX):
            command = ReleasePopped(self._wanted.group, list(parts[at : at + POP_ACKS_MAX]))
            codes.update(self._settle(command))
        return sorted(codes - {0})

    def _release_by_older(self, messages: Sequence[Message]) -> list[int]:
        """Release messages at a broker without ReleasePopped: whole takes of an orderly group, else
        by giving messages back."""
        codes: set[int] = set()
        if self._wanted.orderly:
            for taken in by_take(messages):
                codes.update(self.extend(taken, 0))
            return sorted(codes)
        given = [
            GivenBack(
                message.stored_topic, message.queue_id, message.queue_offset,
                message.physical_offset, after_ms=0, handle=taken_of(message).popped.handle,
            )
            for message in messages
        ]  # fmt: skip
        for at in range(0, len(given), GIVEN_BACK_MAX):
            codes.update(self.give_back(given[at : at + GIVEN_BACK_MAX], -1))
        return sorted(codes - {0})

    def _release_unread(self, taken: Taken) -> None:
        """Release a take, now or by a later `release_lost`."""
        popped = taken.popped
        offsets = range(popped.queue_offset, popped.queue_offset + popped.count)
        command = ReleasePopped(self._wanted.group, parts_of(taken, offsets))
        if not self._send_stop(command):
            self._lost.append(command)

    def give_back(self, given: list[GivenBack], times_max: int) -> list[int]:
        command = GiveBackMessages(self._wanted.group, given, times_max)
        answer = self._ask(command)
        assert isinstance(answer, MessagesGivenBack)
        return answer.codes

    def _settle(self, command: AckPopped | ChangeInvisible | ReleasePopped) -> list[int]:
        answer = self._ask(command)
        assert isinstance(answer, PopsSettled)
        return answer.codes

    def _ask(self, command: Command) -> Command:
        """Again and again for as long as that may help: each may come twice."""
        deadline = time.monotonic() + self._timeout_s
        failures = 0
        while True:
            try:
                left_s = max(0.1, min(ASK_S, deadline - time.monotonic()))
                answer, _ = self._ask_once(self._coordinator(), command, left_s)
            except CometError as error:
                failures += 1
                _pause(error, failures, deadline)
            else:
                return answer

    def stop(self, attempt: str = "") -> None:
        """End all waiting pops of this consumer, or only the one with that `attempt`."""
        self._send_stop(self._stop_command(attempt))
        if not attempt:
            self.release_lost()

    def _stop_command(self, attempt: str) -> StopPopping:
        return StopPopping(self._wanted.group, self._wanted.consumer, attempt)

    def _send_stop(self, command: StopPopping | ReleasePopped) -> bool:
        """Send it once; return False if it has to be sent again."""
        try:
            self._coordinator().ask(command, timeout_s=STOP_S)
        except CometError as error:
            log.debug("broker %s: %s", self.name, error)
            return not may_help(error)
        return True


def by_broker(messages: Iterable[Message]) -> dict[PopBroker, list[Message]]:
    found: dict[PopBroker, list[Message]] = {}
    for message in messages:
        found.setdefault(taken_of(message).broker, []).append(message)
    return found


def raise_first(codes: Iterable[int], what: str) -> None:
    for code in codes:
        if code == HandleUnknown.code:
            raise HandleUnknown(
                f"{what}: the invisibility timeout is over, or the message was acknowledged or "
                "given back before; after the timeout it is delivered again"
            )
        if code:
            raise from_code(code, f"{what}: refused by the broker")


def by_take(messages: Iterable[Message]) -> dict[Taken, list[int]]:
    """Return the queue offsets of messages, grouped by their Taken."""
    found: dict[Taken, list[int]] = {}
    for message in messages:
        found.setdefault(taken_of(message), []).append(message.queue_offset)
    return found


def parts_of(taken: Taken, offsets: Sequence[int]) -> list[PopAck]:
    """Return these offsets of a take as ranges for AckPopped and ReleasePopped."""
    popped = taken.popped
    return [
        PopAck(popped.topic, popped.queue_id, popped.handle, first, count)
        for first, count in neighbours(offsets)
    ]


def look_up(routes: Routes, topic: str) -> None:
    """Learn where the topic's brokers are now, as far as the name server answers."""
    try:
        routes.find(topic, LOOK_UP_S)
    except CometError as error:
        log.debug("route of %s: %s", topic, error)


def may_help(error: CometError) -> bool:
    """To ask again, whoever is the master then."""
    return error.retriable or isinstance(error, NotConfirmed | NotReachable)


def _pause(error: CometError, failures: int, deadline: float) -> None:
    """Before the next attempt; raises the error if there is none."""
    pause = pause_s(failures)
    if not may_help(error) or time.monotonic() + pause >= deadline:
        raise error
    time.sleep(pause)


def neighbours(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches without a gap: (first offset, count)."""
    found: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((offset, 1))
    return found
