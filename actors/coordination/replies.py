"""Replies: the coordinator takes them from consumers, and hands them to the requesters that wait.

RocketMQ's broker pushes a reply to its requester's connection. Here a requester has a command held,
which the next replies answer, many at once under load. A consumer hears that the requester has its
reply, or why it has not. Stored they are beside that, in RocketMQ's topic.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from cometmq.actors.books.mailboxes import Letter, Mailbox, Mailboxes
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import (
    REPLY_WAIT_MS_MAX,
    AwaitReplies,
    Command,
    Done,
    LeaveReplies,
    RecordsAppended,
    Replies,
    ReplyHead,
    SendReply,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageIllegal,
    MessageTooLarge,
    RequesterGone,
    SystemBusy,
    from_code,
)
from cometmq.protocol.replies import (
    NAME_MAX,
    SECRET_CHARACTERS,
    encode_properties,
    reply_topic,
    requester_of,
)
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.kernel._kernel import BatchFull
from cometmq.shm.os.processes import NAME_MAX as PROCESS_NAME_MAX
from cometmq.shm.os.processes import has_ended

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5  # for requesters that are gone, and polls that have waited for long enough
RETURN_S: Final = 5.0  # after a start: for requesters that waited at the process before
STORE_S: Final = 10.0
STORING_MAX: Final = 64  # writes that the commitlog process has not answered

MakeTopic = Callable[[str, int], None]


class ReplySettings(Protocol):
    """What it needs of the broker's settings."""

    @property
    def broker_cluster_name(self) -> str: ...
    @property
    def max_message_size(self) -> int: ...
    @property
    def store_reply_message_enable(self) -> bool: ...


class RepliesPart:
    """See the module.

    Args:
        commitlog_endpoint: where replies are stored.
        make_topic: takes a topic and its queues; makes it unless it is there.
    """

    def __init__(
        self,
        actor: ServiceActor,
        settings: ReplySettings,
        commitlog_endpoint: str,
        make_topic: MakeTopic,
    ) -> None:
        self._actor = actor
        self._settings = settings
        self._topic = reply_topic(settings.broker_cluster_name)
        self._make_topic = make_topic
        self._boxes = Mailboxes()
        self._polls: dict[str, tuple[Request, float]] = {}  # by requester: until when it is held
        self._fresh: set[str] = set()  # requesters for whom something has come in this round
        self._unstored: list[Letter] = []  # of this round
        self._numbers = itertools.count()
        self._writes: dict[int, Timer] = {}  # that the commitlog process has not answered
        self._began = time.monotonic()
        self._commitlog = Channel(commitlog_endpoint, "the commitlog process")

    def begin(self) -> None:
        self._began = time.monotonic()
        self._actor.every(LOOK_S, self._look)

    def close(self) -> None:
        self._commitlog.close()

    def end(self, error: CometError) -> None:
        """Whoever waits hears that there will be nothing."""
        for requester, _ in self._boxes.items():
            self._close(requester, error)

    # --- requesters ---

    def on_await_replies(self, command: AwaitReplies, request: Request) -> None:
        self._check_topic(command.topic)
        least, most = SECRET_CHARACTERS
        if not least <= len(command.secret) <= most:
            raise ArgumentIllegal(
                f"a secret of {len(command.secret)} characters: {least} to {most}"
            )
        requester = requester_of(command.secret)
        self._make_topic(self._topic, 1)
        box = self._boxes.open(requester, request.sender)
        self._release(requester)  # an earlier one
        if len(command.process) <= PROCESS_NAME_MAX:
            box.process = command.process
        now = box.heard_at = time.monotonic()
        is_known = command.mailbox == box.number
        if is_known:
            for letter in self._boxes.confirm(box, command.received):
                letter.is_received = True
                _conclude(letter)
        wait_s = min(command.wait_ms, REPLY_WAIT_MS_MAX) / 1000 if is_known else 0
        self._polls[requester] = (request, now + wait_s)
        box.waits = True
        if box.letters or wait_s <= 0:
            self._release(requester)

    def on_leave_replies(self, command: LeaveReplies, request: Request) -> Command:
        self._check_topic(command.topic)
        requester = requester_of(command.secret)
        self._close(requester, RequesterGone(f"requester {requester} has left"))
        return Done()

    # --- repliers ---

    def on_send_reply(self, command: SendReply, request: Request) -> None:
        self._check_topic(command.topic)
        letter = self._letter_of(command, request)
        stores = self._settings.store_reply_message_enable
        if stores and len(self._writes) >= STORING_MAX:
            raise SystemBusy(f"{STORING_MAX} writes of replies wait for the commitlog process")
        try:
            kept = self._boxes.put(command.requester, letter)
        except RequesterGone:
            if time.monotonic() - self._began < RETURN_S:
                raise SystemBusy("the coordinator has just begun; the requester may come") from None
            raise
        kept.asked.append(request)
        self._fresh.add(command.requester)
        if kept is letter and stores:
            letter.is_stored = False
            self._unstored.append(letter)

    def _letter_of(self, command: SendReply, request: Request) -> Letter:
        for name in (command.requester, command.correlation_id):
            if not 0 < len(name) <= NAME_MAX:
                raise ArgumentIllegal(f"a name of {len(name)} characters: 1 to {NAME_MAX}")
        if len(request.payload) != 1 or not len(request.payload[0]):
            raise MessageIllegal("a reply has one body of at least one byte")
        size, most = len(request.payload[0]), self._settings.max_message_size
        if size > most:
            raise MessageTooLarge(f"a reply of {size} bytes, at most {most}")
        try:
            encode_properties(command.properties)
        except ValueError as error:
            raise MessageIllegal(str(error)) from None
        return Letter(command.correlation_id, command.properties, bytes(request.payload[0].buffer))

    # --- the end of a round ---

    def finish_round(self) -> None:
        """What has come in it is handed out together, and then stored together."""
        fresh, self._fresh = self._fresh, set()
        for requester in fresh:
            self._release(requester)
        unstored, self._unstored = self._unstored, []
        while unstored:
            unstored = self._store(unstored)

    def _release(self, requester: str) -> None:
        """Answer the poll that is held, with what there is."""
        held = self._polls.pop(requester, None)
        box = self._boxes.get(requester)
        if held is None or box is None:
            return
        box.waits = False
        box.heard_at = time.monotonic()
        letters = box.due()
        now_ms = time.time_ns() // 1_000_000
        heads = [ReplyHead(each.correlation_id, each.properties, now_ms) for each in letters]
        answer = Replies(box.number, box.first, heads)
        held[0].reply(answer, [each.body for each in letters])

    def _look(self) -> None:
        now = time.monotonic()
        for requester, (_, until) in list(self._polls.items()):
            if now >= until:
                self._release(requester)
        known: dict[str, bool] = {}
        for requester, box in self._boxes.items():
            if box.letters and self._has_ended(box, known):
                self._close(requester, _gone(requester, "its process has ended"))
        for requester in self._boxes.silent(now):
            self._close(requester, _gone(requester, "it has not been heard of for some seconds"))

    def _has_ended(self, box: Mailbox, known: dict[str, bool]) -> bool:
        if box.process not in known:
            known[box.process] = has_ended(box.process)
        return known[box.process]

    def _close(self, requester: str, error: CometError) -> None:
        held = self._polls.pop(requester, None)
        if held is not None:
            held[0].fail(error)
        for letter in self._boxes.close(requester):
            _fail(letter, error)

    # --- storing ---

    def _store(self, letters: list[Letter]) -> list[Letter]:
        """Have as many stored as fit into one command; the rest."""
        records = InnerRecords(size_max=self._settings.max_message_size + 1_048_576)
        queue = records.queue(self._topic, 0)
        born = time.time_ns() // 1_000_000
        for index, letter in enumerate(letters):
            try:
                records.encoder.add(
                    queue, letter.body, encode_properties(letter.properties), born_timestamp=born
                )
            except BatchFull:
                now, later = letters[:index], letters[index:]
                break
        else:
            now, later = letters, []
        number = next(self._numbers)
        pending = self._commitlog.request(
            *records.take(),
            on_done=lambda done: self._actor.call_soon(partial(self._is_stored, number, now, done)),
        )
        give_up = partial(self._give_up, number, now, pending)
        self._writes[number] = self._actor.after(STORE_S, give_up)
        return later

    def _is_stored(self, number: int, letters: list[Letter], done: Pending) -> None:
        timer = self._writes.pop(number, None)
        if timer is None:
            return  # too late
        timer.cancel()
        error = done.error
        answer = done.answer
        if error is None and isinstance(answer, RecordsAppended) and not answer.is_kept:
            error = from_code(answer.code, answer.text)
        for letter in letters:
            if error is None:
                letter.is_stored = True
                _conclude(letter)
            else:
                _fail(letter, error)

    def _give_up(self, number: int, letters: list[Letter], pending: Pending) -> None:
        if self._writes.pop(number, None) is not None:
            error = self._commitlog.give_up(pending, "AppendRecords", STORE_S)
            for letter in letters:
                _fail(letter, error)

    def _check_topic(self, topic: str) -> None:
        if topic != self._topic:
            raise ArgumentIllegal(
                f"replies go to {self._topic} in this cluster, not {topic[:255]!r}"
            )

    def statistics(self) -> dict[str, int | float | str]:
        return {"requesters": len(self._boxes), "reply_bytes": self._boxes.size}


def _gone(requester: str, why: str) -> RequesterGone:
    return RequesterGone(f"requester {requester} is gone: {why}")


def _conclude(letter: Letter) -> None:
    """Those who have sent it hear so once it has come, and is stored."""
    if letter.is_received and letter.is_stored:
        asked, letter.asked = letter.asked, []
        for request in asked:
            request.done()


def _fail(letter: Letter, error: CometError) -> None:
    asked, letter.asked = letter.asked, []
    for request in asked:
        request.fail(error)
