"""Replies: the commitlog process takes them from consumers, and hands them to the requesters that
wait.

RocketMQ's broker pushes a reply to its requester's connection. Here a requester has a command held,
which the next replies answer, many at once under load. A consumer hears that the requester has its
reply, or why it has not. Stored they are beside that, in RocketMQ's topic, together with whatever
is sent in the same round: so no other process takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.access import FAMILY
from cometmq.actors.runtime.gate import Gate
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import Payload, Request, ServiceActor, Timer
from cometmq.actors.tables.mailboxes import (
    REQUESTERS_MAX,
    REQUESTERS_OF_SENDER_MAX,
    Letter,
    Mailbox,
    Mailboxes,
)
from cometmq.protocol import frames
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
from cometmq.shm.kernel.codec import BatchFull
from cometmq.shm.os.processes import NAME_MAX as PROCESS_NAME_MAX
from cometmq.shm.os.processes import has_ended

LOOK_S: Final = 0.5  # for requesters that are gone
KNOWN_MAX: Final = 4_096  # replies
ASKED_MAX: Final = 64  # requests that wait to hear of one reply
RETURN_S: Final = 5.0  # after a start: for requesters that waited at the process before

REPLYING: Final = AwaitReplies, SendReply, LeaveReplies  # no send depends on them


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
        gate: of a broker in a group; replies are its master's.
    """

    def __init__(self, actor: ServiceActor, settings: ReplySettings, gate: Gate | None) -> None:
        self._actor = actor
        self._settings = settings
        self._gate = gate
        self._topic = reply_topic(settings.broker_cluster_name)
        self._boxes = Mailboxes()
        self._polls: TimedRequests[str, HeldRequest[str]] = TimedRequests(
            actor, "requesters", REQUESTERS_MAX, self._answer, REQUESTERS_OF_SENDER_MAX
        )  # by requester
        self._fresh: set[str] = set()  # requesters for whom something has come in this round
        self._unstored: list[tuple[Letter, bytes, bytes]] = []  # of this round: body, properties
        # By requester and correlation id: the last replies for the log, also those that their
        # requesters have received. If one is sent again, no second one is stored: at most its
        # acks are requested again.
        self._known: dict[tuple[str, str], Letter] = {}
        self._doubted: list[Letter] = []  # of this round: sent again, without the required acks
        self._began = time.monotonic()
        self._timer: Timer | None = None  # as long as there are requesters

    def begin(self) -> None:
        """From now on requesters may come."""
        self._began = time.monotonic()

    def end(self, error: CometError) -> None:
        """Whoever waits hears that there will be nothing."""
        for requester, _ in self._boxes.items():
            self._close(requester, error)

    # --- requesters ---

    def on_await_replies(self, command: AwaitReplies, request: Request) -> None:
        self._admit(command.topic)
        least, most = SECRET_CHARACTERS
        if not least <= len(command.secret) <= most:
            raise ArgumentIllegal(
                f"a secret of {len(command.secret)} characters: {least} to {most}"
            )
        requester = requester_of(command.secret)
        box = self._boxes.open(requester, request.sender)
        self._look_later()
        self._release(requester)  # an earlier one
        if len(command.process) <= PROCESS_NAME_MAX:
            box.process = command.process
        now = box.heard_at = time.monotonic()
        is_known = command.mailbox == box.number
        if is_known:
            for letter in self._boxes.confirm(box, command.received):
                _conclude(letter)
        wait_s = min(command.wait_ms, REPLY_WAIT_MS_MAX) / 1000 if is_known else 0
        box.waits = True
        self._polls.add(HeldRequest(requester, request, now + wait_s))
        if box.letters or wait_s <= 0:
            self._release(requester)

    def on_leave_replies(self, command: LeaveReplies, request: Request) -> Command:
        self._admit(command.topic)
        requester = requester_of(command.secret)
        self._close(requester, RequesterGone(f"requester {requester} has left"))
        return Done()

    # --- repliers ---

    def on_send_reply(self, command: SendReply, request: Request) -> None:
        self._admit(command.topic)
        letter, properties = self._letter_of(command, request)
        known = self._known.get((command.requester, command.correlation_id))
        if known is not None and (known.is_received or self._boxes.holds(known)):
            _wait_for(known, request)
            if not (known.is_stored or known.is_storing):
                self._store(known, letter.body, properties)
            _conclude(known)
            return
        try:
            kept = self._boxes.put(command.requester, letter)
        except RequesterGone:
            if time.monotonic() - self._began < RETURN_S:
                raise SystemBusy("the broker has just begun; the requester may come") from None
            raise
        _wait_for(kept, request)
        self._fresh.add(command.requester)
        is_missing = kept is letter or not (kept.is_stored or kept.is_storing)
        if is_missing and self._settings.store_reply_message_enable:
            self._store(kept, letter.body, properties)
            self._remember(kept)

    def _store(self, letter: Letter, body: bytes, properties: bytes) -> None:
        """Have a reply stored, or only its acks requested."""
        letter.begin_storing()
        if letter.is_written:
            self._doubted.append(letter)
        else:
            self._unstored.append((letter, body, properties))

    def _remember(self, letter: Letter) -> None:
        key = letter.requester, letter.correlation_id
        self._known.pop(key, None)
        self._known[key] = letter
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _letter_of(self, command: SendReply, request: Request) -> tuple[Letter, bytes]:
        """And its properties, as a record has them."""
        for name in (command.requester, command.correlation_id):
            if not 0 < len(name) <= NAME_MAX:
                raise ArgumentIllegal(f"a name of {len(name)} characters: 1 to {NAME_MAX}")
        if len(request.payload) != 1 or not len(request.payload[0]):
            raise MessageIllegal("a reply has one body of at least one byte")
        size, most = len(request.payload[0]), self._settings.max_message_size
        if size > most:
            raise MessageTooLarge(f"a reply of {size} bytes, at most {most}")
        try:
            properties = encode_properties(command.properties)
        except ValueError as error:
            raise MessageIllegal(str(error)) from None
        body = bytes(request.payload[0].buffer)
        request.drop_payload()
        letter = Letter(command.correlation_id, command.properties, body, command.requester)
        return letter, properties

    # --- the end of a round ---

    def hand_out(self) -> None:
        """What has come in this round."""
        fresh, self._fresh = self._fresh, set()
        for requester in fresh:
            self._release(requester)

    def take_unstored(self) -> list[Request]:
        """What is to be stored of this round, as commands of this very process."""
        unstored, self._unstored = self._unstored, []
        found: list[Request] = []
        if self._doubted:  # without records, to ask for the acks of the log
            found.append(_Storing(self._doubted, InnerRecords(), self._remember))
            self._doubted = []
        while unstored:
            count, records = self._records_of(unstored)
            letters = [letter for letter, _, _ in unstored[:count]]
            found.append(_Storing(letters, records, self._remember))
            unstored = unstored[count:]
        return found

    def _records_of(self, unstored: list[tuple[Letter, bytes, bytes]]) -> tuple[int, InnerRecords]:
        """As many as fit into one command."""
        records = InnerRecords(size_max=self._settings.max_message_size + 1_048_576)
        queue = records.queue(self._topic, 0)
        born = time.time_ns() // 1_000_000
        for count, (_, body, properties) in enumerate(unstored):
            try:
                records.encoder.add(queue, body, properties, born_timestamp=born)
            except BatchFull:
                return count, records
        return len(unstored), records

    def _release(self, requester: str) -> None:
        """Answer the poll that is held, with what there is."""
        for held in self._polls.release_key(requester):
            self._answer(held)

    def _answer(self, held: HeldRequest[str]) -> None:
        box = self._boxes.get(held.key)
        if box is None:
            return
        box.waits = False
        box.heard_at = time.monotonic()
        letters = box.due()
        now_ms = time.time_ns() // 1_000_000
        heads = [ReplyHead(each.correlation_id, each.properties, now_ms) for each in letters]
        answer = Replies(box.number, box.first, heads)
        held.request.reply(answer, [each.body for each in letters])

    def _look_later(self) -> None:
        if self._timer is None and self._boxes:
            self._timer = self._actor.after(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        known: dict[str, bool] = {}
        for requester, box in self._boxes.items():
            if box.letters and self._has_ended(box, known):
                self._close(requester, _gone(requester, "its process has ended"))
        for requester in self._boxes.silent(time.monotonic()):
            self._close(requester, _gone(requester, "it has not been heard of for some seconds"))
        self._look_later()

    def _has_ended(self, box: Mailbox, known: dict[str, bool]) -> bool:
        if box.process not in known:
            known[box.process] = has_ended(box.process)
        return known[box.process]

    def _close(self, requester: str, error: CometError) -> None:
        for held in self._polls.release_key(requester):
            held.request.fail(error)
        for letter in self._boxes.close(requester):
            _fail(letter, error)

    def _admit(self, topic: str) -> None:
        if topic != self._topic:
            raise ArgumentIllegal(
                f"replies go to {self._topic} in this cluster, not {topic[:255]!r}"
            )
        error = self._gate.why_not_heard() if self._gate is not None else None
        if error is not None:
            raise error

    def statistics(self) -> meters.Figures:
        return {meters.REQUESTERS: len(self._boxes), meters.REPLY_BYTES: self._boxes.size}


class _Storing(Request):
    """Letters to be stored, as if an actor had asked for it: its answer is for them.

    Args:
        remember: called with each that is not stored with the required acks.
    """

    __slots__ = ("_letters", "_remember")

    def __init__(
        self, letters: list[Letter], records: InnerRecords, remember: Callable[[Letter], None]
    ) -> None:
        command, payload = records.take()
        parts = [frames.Part(memoryview(each)) for each in payload]
        super().__init__(command, parts, FAMILY)
        self._letters = letters
        self._remember = remember

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        """Once; who asks again after that is not heard."""
        letters, self._letters = self._letters, []
        try:
            frames.raise_if_failed(answer)
        except CometError as error:
            failure: CometError | None = error
        else:
            assert isinstance(answer, RecordsAppended)
            failure = None if answer.is_kept else from_code(answer.code, answer.text)
        for letter in letters:
            is_written = isinstance(answer, RecordsAppended)
            letter.end_storing(is_written=is_written, is_stored=failure is None)
            if failure is None:
                _conclude(letter)
            else:
                self._remember(letter)  # it may be sent again
                _fail(letter, failure)


def _wait_for(letter: Letter, request: Request) -> None:
    """Have a replier hear what becomes of its letter. Raises SystemBusy."""
    if len(letter.asked) >= ASKED_MAX:
        raise SystemBusy(f"{ASKED_MAX} requests wait for what becomes of this reply already")
    letter.asked.append(request)


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
