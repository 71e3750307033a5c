"""Dead letters: messages that a group has given up, in `%DLQ%group`; see them, send them again.

How far they are dealt with is the group's progress in that topic: what lies before it is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

from cometmq.client.administration.groups import GroupAdmin
from cometmq.client.arguments import checked
from cometmq.client.sending.outgoing import PROPERTIES_BYTES_MAX, compose
from cometmq.client.sending.producer import Producer
from cometmq.client.sending.receipt import Receipt
from cometmq.protocol.commands import (
    BrokerRoute,
    CommitOffsets,
    Done,
    FetchOffsets,
    GroupOffsets,
    PullMessages,
    PullResult,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import CometError, MessageIllegal, MessageNotFound, TopicNotExist
from cometmq.protocol.names import (
    DLQ_PREFIX,
    RESERVED_PROPERTIES,
    UNKEPT_PROPERTIES,
    check_group,
    check_usable_group,
)
from cometmq.shm.kernel.codec import Message, decode

PAGE_BYTES: Final = 1_048_576
PAGE_COUNT: Final = 256
# What a broker has put there about its deliveries; a message that is sent again begins anew.
_OF_DELIVERIES: Final = RESERVED_PROPERTIES | UNKEPT_PROPERTIES.keys() | {
    "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "REAL_TOPIC", "REAL_QID", "MAX_RECONSUME_TIMES",
    "RECONSUME_TIME", "DLQ_ORIGIN_MESSAGE_ID",
}  # fmt: skip


class DeadLetter(NamedTuple):
    """A message that a group has given up."""

    broker: str
    message: Message

    @property
    def id(self) -> str:
        """Id of the message."""
        return self.message.msg_id

    @property
    def topic(self) -> str:
        """Original topic; `%DLQ%group` if the properties had no room for its name."""
        return self.message.properties.get("RETRY_TOPIC", self.message.topic)

    @property
    def attempts(self) -> int:
        """How often it was delivered in vain."""
        return self.message.reconsume_times


class Resent(NamedTuple):
    """What became of a dead letter: the id of the new message, or why there is none."""

    letter: DeadLetter
    msg_id: str
    error: CometError | None


class DeadLetterAdmin(GroupAdmin):
    """See Admin."""

    @checked
    def dead_letters(self, group: str, max_count: int = 1_024) -> list[DeadLetter]:
        """The dead letters of a group that are not dealt with yet, oldest first on each broker; at
        most so many. Raises GroupNotExist where nobody knows group or letters."""
        found: list[DeadLetter] = []
        for route in self._with_dead_letters(group):
            for letter in self._letters(group, route):
                if len(found) >= max_count:
                    return found
                found.append(letter)
        return found

    @checked
    def resend_dead_letters(
        self, group: str, msg_ids: Sequence[str] | None = None, *, topic: str | None = None
    ) -> list[Resent]:
        """Send dead letters again to their original topics, and return one result for each.

        An error of one letter does not prevent others from being sent. Letters are committed up to
        the first that could not be sent; those behind it stay listed, and another call sends them
        again. With `msg_ids` nothing is committed, since other letters may precede them. A new
        message has the id of its letter as property DLQ_ORIGIN_MESSAGE_ID, if its properties have
        room for it.

        Args:
            msg_ids: ids of the letters to send; None: all uncommitted ones.
            topic: topic to send to instead of the original ones.

        Raises MessageNotFound for an id that no dead letter has, GroupNotExist.
        """
        check_usable_group(group)
        wanted = None if msg_ids is None else set(msg_ids)
        resent: list[Resent] = []
        with Producer(self._routes.addresses, linger_ms=5) as producer:
            for route in self._with_dead_letters(group):
                is_whole = wanted is None  # all letters before these are committed
                for page in self._pages(group, route):
                    letters = [each for each in page if wanted is None or each.id in wanted]
                    of_page = _send_again(producer, letters, topic)
                    resent += of_page
                    if is_whole:  # page by page: a call that fails has committed its sends
                        is_whole = self._note_dealt_with(group, route, of_page)
        missing = (wanted or set()) - {each.letter.id for each in resent}
        if missing:
            raise MessageNotFound(f"group {group} has no dead letter {min(missing)}")
        return resent

    @checked
    def purge_dead_letters(self, group: str) -> int:
        """Have all dead letters of a group dealt with; how many there were. They stay in the log
        until they expire. Raises GroupNotExist."""
        check_usable_group(group)
        count = 0
        for route in self._with_dead_letters(group):
            letters = list(self._letters(group, route))
            count += len(letters)
            if letters:
                self._commit(group, route, letters[-1].message.queue_offset + 1)
        return count

    # --- inside ---

    def _with_dead_letters(self, group: str) -> list[BrokerRoute]:
        """The brokers on which there are any, or were."""
        check_group(group)
        try:
            return self._serving(DLQ_PREFIX + group)
        except TopicNotExist:
            self.describe_group(group)  # a name that is not quite right has no letters either
            return []

    def _letters(self, group: str, route: BrokerRoute) -> Iterator[DeadLetter]:
        """Yield the uncommitted dead letters of one broker."""
        for page in self._pages(group, route):
            yield from page

    def _pages(self, group: str, route: BrokerRoute) -> Iterator[list[DeadLetter]]:
        topic, ends = DLQ_PREFIX + group, route.endpoints
        answer = self._ask(
            ends.coordinator, FetchOffsets(group, [QueueKey(topic, 0)]), GroupOffsets
        )
        at = max(0, answer.offsets[0].queue_offset)
        channel = self._routes.channel(ends.readers[0], f"a reader of {ends.broker}")
        end = None  # later messages are not read: they may be letters that failed again
        while end is None or at < end:
            command = PullMessages(topic, 0, at, PAGE_COUNT, PAGE_BYTES)
            page, payload = channel.ask(command, timeout_s=self._timeout_s)
            assert isinstance(page, PullResult)
            end = page.max_queue_offset if end is None else end
            if payload:
                messages = decode(payload[0].buffer)
                yield [DeadLetter(ends.broker, m) for m in messages if m.queue_offset < end]
            if page.next_queue_offset <= at:
                return
            at = page.next_queue_offset

    def _note_dealt_with(self, group: str, route: BrokerRoute, resent: Iterable[Resent]) -> bool:
        """Commit up to the first letter that was not sent; return whether all were."""
        end = -1
        is_whole = True
        for each in resent:
            if each.error is not None:
                is_whole = False
                break
            end = each.letter.message.queue_offset + 1
        if end >= 0:
            self._commit(group, route, end)
        return is_whole

    def _commit(self, group: str, route: BrokerRoute, queue_offset: int) -> None:
        offset = QueueOffset(DLQ_PREFIX + group, 0, queue_offset)
        self._ask(route.endpoints.coordinator, CommitOffsets(group, [offset], force=True), Done)


def _send_again(
    producer: Producer, letters: Iterable[DeadLetter], topic: str | None
) -> list[Resent]:
    """All of them at once, then their answers."""
    sent: list[tuple[DeadLetter, Future[Receipt] | CometError]] = []
    for letter in letters:
        try:
            sent.append((letter, _begin(producer, letter, topic)))
        except (
            CometError
        ) as error:  # concerns one letter, such as a body that cannot be decompressed
            sent.append((letter, error))
    resent = []
    for letter, outcome in sent:
        try:
            if isinstance(outcome, CometError):
                raise outcome
            resent.append(Resent(letter, outcome.result().msg_id, None))
        except CometError as error:
            resent.append(Resent(letter, "", error))
    return resent


def _begin(producer: Producer, letter: DeadLetter, topic: str | None) -> Future[Receipt]:
    message = letter.message
    if topic is None and letter.topic == message.topic:
        raise MessageIllegal(
            f"dead letter {message.msg_id} does not say which topic it came from, since its "
            "properties had no room for that: name the topic to send it to"
        )
    kept = {k: v for k, v in message.properties.items() if k not in _OF_DELIVERIES}
    with_origin = kept | {"DLQ_ORIGIN_MESSAGE_ID": message.msg_id}
    target, outgoing = compose(
        topic or letter.topic, message.body, message.tags, message.keys, with_origin, None, None,
        message.flag, True,
    )  # fmt: skip
    if outgoing.properties_bytes > PROPERTIES_BYTES_MAX:
        with_origin = kept
    return producer.send_async(
        target.topic,
        message.body,
        tags=message.tags,
        keys=message.keys,
        properties=with_origin,
        flag=message.flag,
    )
