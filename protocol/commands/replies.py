"""Requests and replies: how an answer comes to whoever has sent a request.

A requester waits at the commitlog processes of all brokers that its requests go to, which it sends
to in any case. A reply goes to the one whose broker the request lies at.
"""

from __future__ import annotations

from typing import Final

from cometmq.protocol.commands.root import Answer, Command, Part, by_clients, publish, read
from cometmq.protocol.integers import Int64

REPLY_WAIT_MS_MAX: Final = 15_000


class AwaitReplies(Command, frozen=True, tag=160):
    """Requester to commitlog: what has been replied to me? -> Replies

    At once when there is something, or when `mailbox` is not the one that is kept for this
    requester; else after at most `wait_ms`. A requester that does not say it again within some
    seconds, or whose process has ended, is gone. Of several that wait under one secret the last one
    waits on. The topic is there: EnsureTopic makes it.

    Raises SystemBusy when there are too many requesters.
    """

    access = by_clients(read("topic"), later=True)
    new_in = "0.2.0"

    topic: str  # of replies, in this cluster
    secret: str  # known to the requester alone; its name is derived from it
    process: str = ""  # that it lives in; see JoinGroup
    mailbox: Int64 = 0  # as last answered; 0: none was
    received: Int64 = 0  # the number of the last reply that has come out of that mailbox
    wait_ms: Int64 = 0


class ReplyHead(Part, frozen=True):
    correlation_id: str
    properties: dict[str, str]
    pushed_ms: Int64  # when the broker handed it out


class Replies(Answer, frozen=True, tag=161):
    """A payload frame for each: its body. They come until the requester says that they came."""

    mailbox: Int64
    first: Int64  # the number of the first; the others follow without a gap
    replies: list[ReplyHead]
    is_larger: bool = False  # before 0.2.0: the first is too large for a packet of 64 KiB


class SendReply(Command, frozen=True, tag=162):
    """Consumer to commitlog: the reply to a request. One payload frame: the body. -> Done

    Done says that the requester has it, and, with storeReplyMessageEnable, that it is stored in
    the topic as well. Raises RequesterGone; SystemBusy when too much waits for requesters.
    """

    access = by_clients(publish("topic"), later=True)
    new_in = "0.2.0"

    topic: str  # of replies, in this cluster
    requester: str  # as the request names it: REPLY_TO_CLIENT
    correlation_id: str
    properties: dict[str, str]  # all of them


class LeaveReplies(Command, frozen=True, tag=163):
    """Requester to commitlog: I wait no longer. -> Done"""

    access = by_clients(read("topic"))
    new_in = "0.2.0"

    topic: str
    secret: str
