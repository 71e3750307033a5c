"""Replies that are sent again: each is stored once (Fault 16)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.actors.writer import replies
from cometmq.actors.writer.replies import RepliesPart
from cometmq.protocol.commands import AwaitReplies, Command, Failed, RecordsAppended, SendReply
from cometmq.protocol.errors import DiskFull, NotConfirmed, SystemBusy
from cometmq.protocol.frames import Part
from cometmq.protocol.replies import SECRET_CHARACTERS, reply_topic, requester_of

TOPIC = reply_topic("c")
SECRET = "s" * SECRET_CHARACTERS[0]
KEPT, LATE = RecordsAppended(0, 0), RecordsAppended(NotConfirmed.code, 0, "late")
REFUSED = Failed(DiskFull.code, "full")


class Asked:
    """A request; the answers that it receives."""

    def __init__(self, command: Command, *payload: bytes) -> None:
        self.command = command
        self.payload = [Part(memoryview(each)) for each in payload]
        self.sender = b"connection"
        self.answers: list[Any] = []

    def drop_payload(self) -> None:
        self.payload = []

    def reply(self, answer: Command, _payload: object = ()) -> None:
        self.answers.append(answer)

    def fail(self, error: Exception) -> None:
        self.answers.append(type(error))

    def done(self) -> None:
        self.answers.append("done")


class Replying:
    """The part of a commitlog process with one requester; the test answers for the log."""

    def __init__(self) -> None:
        settings: Any = SimpleNamespace(
            broker_cluster_name="c", max_message_size=1_000, store_reply_message_enable=True
        )
        actor: Any = SimpleNamespace(after=lambda *_: None)
        self.part = RepliesPart(actor, settings, None)
        self.mailbox = 0
        self.fetch(0)

    def fetch(self, received: int) -> list[str]:
        """The requester names the last reply that it has received, and gets those behind it."""
        asked: Any = Asked(AwaitReplies(TOPIC, SECRET, "", self.mailbox, received))
        self.part.on_await_replies(asked.command, asked)
        (answer,) = asked.answers
        self.mailbox = answer.mailbox
        return [each.correlation_id for each in answer.replies]

    def send(self, name: str = "id") -> tuple[list[Any], list[Any]]:
        """Send the reply, once more; what it is answered later, and what goes to the log."""
        asked: Any = Asked(SendReply(TOPIC, requester_of(SECRET), name, {}), b"body")
        self.part.on_send_reply(asked.command, asked)
        self.part.hand_out()
        return asked.answers, self.part.take_unstored()


def test_a_received_reply_is_not_stored_again() -> None:
    """The requester has received it before it is stored, or while its acks are awaited."""
    replying = Replying()
    first, (stored,) = replying.send()
    assert stored.command.count == 1
    assert replying.fetch(0) == ["id"]
    assert replying.fetch(1) == []
    second, none = replying.send()
    assert not none  # the log has not answered yet
    stored.reply(LATE)
    assert first == second == [NotConfirmed]
    third, (acks,) = replying.send()
    assert acks.command.count == 0
    fourth, none = replying.send()
    assert not none
    acks.reply(LATE)
    assert third == fourth == [NotConfirmed]
    last, (acks,) = replying.send()
    assert acks.command.count == 0
    acks.reply(KEPT)
    assert last == ["done"]
    after, none = replying.send()  # an answer that was lost
    assert (after, none) == (["done"], [])
    assert replying.fetch(1) == []


def test_a_reply_that_the_log_refused_is_stored_by_the_next_attempt() -> None:
    for is_received in (False, True):
        replying = Replying()
        first, (stored,) = replying.send()
        if is_received:
            assert replying.fetch(0) == ["id"]
            replying.fetch(1)
        stored.reply(REFUSED)
        assert first == [DiskFull]
        second, (again,) = replying.send()
        assert (again.command.count, [*map(len, again.payload)]) == (1, [*map(len, stored.payload)])
        again.reply(KEPT)
        if not is_received:
            assert second == []
            replying.fetch(1)
        assert second == ["done"]


@pytest.mark.parametrize("is_received", [False, True])
def test_an_unconfirmed_reply_is_known_behind_many_others(
    is_received: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not stored a second time, and its replier hears what becomes of it."""
    monkeypatch.setattr(replies, "KNOWN_MAX", 4)
    replying = Replying()
    first, (stored,) = replying.send()
    for number in range(8):
        _, (other,) = replying.send(f"other {number}")
        other.reply(KEPT)
    if is_received:
        assert len(replying.fetch(0)) == 9
        replying.fetch(9)
    stored.reply(LATE)
    assert first == [NotConfirmed]
    second, (acks,) = replying.send()
    assert acks.command.count == 0
    acks.reply(KEPT)
    if not is_received:
        replying.fetch(9)
    assert second == ["done"]


def test_repeats_of_one_reply_are_limited() -> None:
    replying = Replying()
    replying.send()
    for _ in range(replies.ASKED_MAX - 1):
        replying.send()
    with pytest.raises(SystemBusy, match="64 requests wait"):
        replying.send()
