"""Attempts to send a batch: the request that carries it, the retry policy, and what its end means.

An attempt has a number within its lane. What becomes of one that is not answered is not known, so
the next one of that lane fences it off (`Section`).
"""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Sequence
from typing import Final

from cometmq.client.sending.identity import Identity
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.outgoing import Outgoing
from cometmq.client.sending.receipt import STORED_CODES, Batch
from cometmq.protocol.client_timeout import configured_timeout_s
from cometmq.protocol.commands import Section, SectionResult, SendMessages, SendResult
from cometmq.protocol.errors import (
    ClientClosed,
    ClosedUnconfirmed,
    CometError,
    NoPermission,
    NotConfirmed,
    NotReachable,
    QueueNotExist,
    Refused,
    again,
    from_code,
)
from cometmq.protocol.retry import SOON_S, pause_after, pause_s
from cometmq.protocol.wire.pending import Pending

log = logging.getLogger(__name__)

SEND_S: Final = 3.0  # RocketMQ sendMsgTimeout
FAILOVER_S: Final = 15.0  # a group's session has to end, and a master to be elected
CHECK_S: Final = 0.5  # an answer that takes longer makes us look whether the broker has moved
GRACE_S: Final = 4 * CHECK_S  # after its time limit whoever waits for a batch goes by himself

Outcome = tuple[SectionResult | None, CometError | None]
Expired = list[tuple[Batch, CometError]]


class Flight:
    """One SendMessages on its way: its batches, by the lane they go to."""

    __slots__ = ("attempts", "batches", "endpoint", "lanes", "pending", "since")

    def __init__(self, endpoint: str, since: float) -> None:
        self.endpoint = endpoint
        self.since = since  # time.monotonic()
        self.lanes: list[Lane] = []
        self.batches: list[Batch] = []
        self.attempts: list[tuple[int, bool]] = []  # number and fence of each; see Lane
        self.pending: Pending | None = None

    def add(self, lane: Lane, batch: Batch) -> None:
        begin_attempt(lane, batch)
        self.lanes.append(lane)
        self.batches.append(batch)
        self.attempts.append((batch.number, batch.fence))

    def waits_for_connection(self) -> bool:
        return _waits_for_connection(self.pending)

    def was_never_sent(self) -> bool:
        """Whether it still waits for a connection; then it does no longer."""
        pending = self.pending
        return pending is not None and pending.channel.forget(pending)


def look_s(pending: Pending | None) -> float:
    """After how long to look where the broker is, if it has not answered this by then."""
    return SOON_S if _waits_for_connection(pending) else CHECK_S


def _waits_for_connection(pending: Pending | None) -> bool:
    return pending is not None and not pending.handed_over


def begin_attempt(lane: Lane, batch: Batch) -> None:
    batch.attempts += 1
    batch.number = next(lane.numbers)
    batch.fence = lane.unsure > 0
    if batch.unconfirmed:
        batch.repeats_ms = int((batch.deadline - batch.since) * 1000)
        batch.after = -1 if batch.waits else lane.end


def batch_of_one(topic: str, message: Outgoing, body: bytes, window_ms: int) -> Batch:
    """A closed batch."""
    batch = Batch(
        topic,
        None,
        wait=message.wait,
        delay_level=message.delay_level,
        sys_flag=message.sys_flag,
        producer_group=message.producer_group,
        window_ms=window_ms,
    )
    batch.count, batch.body = 1, body
    return batch


def send_command(endpoint: str, identity: Identity, batches: Sequence[Batch]) -> SendMessages:
    """What goes to the commitlog process at `endpoint` in front of the batch bodies."""
    sections = [
        Section(
            batch.topic,
            batch.queue_id,
            batch.count,
            batch.sys_flag,
            batch.wait,
            batch.number,
            batch.fence,
            batch.delay_level,
            batch.repeats_ms,
            batch.after,
            batch.producer_group,
            batch.window_ms,
        )
        for batch in batches
    ]
    return _command(endpoint, identity, sections)


def oneway_command(
    lane: Lane, identity: Identity, message: Outgoing, window_ms: int
) -> SendMessages:
    """The same for a message that travels alone, and of which nobody will hear."""
    section = Section(
        lane.topic,
        lane.queue_id,
        1,
        message.sys_flag or 0,
        message.wait,
        delay_level=message.delay_level,
        window_ms=window_ms,
    )
    return _command(lane.endpoint, identity, [section], oneway=True)


def _command(
    endpoint: str, identity: Identity, sections: list[Section], *, oneway: bool = False
) -> SendMessages:
    return SendMessages(
        sections,
        int(time.time() * 1000),
        born_host(endpoint),
        oneway,
        identity.sender,
        identity.producer_id,
        identity.epoch,
    )


@functools.lru_cache(maxsize=256)
def born_host(endpoint: str) -> str:
    """This machine's address as the broker at `endpoint` would see it; "" if there is none.

    The port is 0: ZeroMQ does not tell which one a connection has.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the way
            address = probe.getsockname()[0]
    except OSError:
        return ""
    return f"[{address}]:0" if family == socket.AF_INET6 else f"{address}:0"


def outcomes_of(answer: object, count: int) -> list[Outcome]:
    """Result or error of every section of an answer."""
    if not isinstance(answer, SendResult) or len(answer.results) != count:
        raise NotConfirmed(f"the broker answered {type(answer).__name__} to {count} batches")
    return [
        (result, None)
        if result.code in STORED_CODES
        else (None, from_code(result.code, result.text or f"code {result.code}"))
        for result in answer.results
    ]


def typed(error: Exception) -> CometError:
    """An error of ours in place of one that nobody expects."""
    if isinstance(error, CometError):
        return error
    log.error("a batch could not be sent", exc_info=error)
    return CometError(f"{type(error).__name__}: {error}")


def queue_is_refused(error: CometError) -> bool:
    """Return whether the broker refused the queue: it is missing or not writable."""
    return isinstance(error, (QueueNotExist, NoPermission))


def may_leave_queue(batch: Batch, error: CometError) -> bool:
    """Return whether the broker refused the queue, and the messages may go to another one. For
    messages with a dedup window NoPermission may refuse the messages themselves."""
    if batch.targets is None and not batch.free:
        return False
    return queue_is_refused(error) and not (batch.window_ms and isinstance(error, NoPermission))


class RetryPolicy:
    """Whether a batch is tried again, and the error that says what became of it if not.

    A refusal is told only of what was surely not stored: an attempt that was never answered makes
    it NotConfirmed.

    Args:
        timeout_s: how long a closed batch is tried before it fails. None: the value of
            COMETMQ_CLIENT_TIMEOUT, else SEND_S, or FAILOVER_S if its brokers have replicas that
            may become the master.
        attempts_max: how often it is sent at most; None: as often as the time allows.
    """

    def __init__(self, timeout_s: float | None, attempts_max: int | None) -> None:
        if timeout_s is None:
            timeout_s = configured_timeout_s()
        self.timeout_s = SEND_S if timeout_s is None else timeout_s
        self.timeout_most_s = FAILOVER_S if timeout_s is None else timeout_s
        self._attempts_max = attempts_max

    def timeout_of(self, lanes: TopicLanes) -> float:
        return self.timeout_most_s if lanes.has_replicas else self.timeout_s

    def give_time(self, batch: Batch, lanes: TopicLanes) -> None:
        """As much as its brokers are worth, as far as that is known: a master that is missed may
        turn out to have replicas."""
        batch.deadline = max(batch.deadline, batch.since + self.timeout_of(lanes))
        batch.limit = batch.deadline + GRACE_S

    def allows(self, batch: Batch, error: CometError) -> bool:
        """Return whether there may be another attempt after this error. An attempt at another queue
        does not count towards `attempts_max`."""
        if may_leave_queue(batch, error):
            return time.monotonic() < batch.deadline
        if batch.producer_group and batch.unconfirmed:
            return False  # a half message is not to be there twice under one name
        return (
            error.retriable
            and time.monotonic() < batch.deadline
            and (self._attempts_max is None or batch.attempts < self._attempts_max)
        )

    def pause_s(self, failures: int, error: CometError | None) -> float:
        """Before the attempt that follows on so many that failed, the last by this error. Attempts
        that are counted have to last for longer."""
        return pause_after(failures, error) if self._attempts_max is None else pause_s(failures)

    def last_error(self, batch: Batch, error: CometError) -> CometError:
        """Of a batch that is given up after this error."""
        if batch.unconfirmed and isinstance(error, Refused):
            return NotConfirmed(
                f"an earlier attempt was not answered, the last was refused: {error}"
            )
        if batch.unconfirmed and isinstance(error, ClientClosed):
            return ClosedUnconfirmed(f"an earlier attempt was not answered; now {error}")
        return again(error)

    def timed_out(self, batch: Batch, lane: Lane) -> CometError:
        """Of a batch whose time is up."""
        cause = lane.error
        if isinstance(cause, Refused):
            return self.last_error(batch, cause)
        last = "" if cause is None else f" (last: {cause})"
        if batch.unconfirmed:
            return self.not_confirmed(batch, lane, last)
        return NotReachable(
            f"broker {batch.broker} at {lane.endpoint} took nothing within "
            f"{batch.deadline - batch.since:.3g} s{last}; this was not sent, and will not be"
        )

    def not_confirmed(self, batch: Batch, lane: Lane, last: str = "") -> NotConfirmed:
        return NotConfirmed(
            f"no answer from broker {lane.broker} at {lane.endpoint} within "
            f"{batch.deadline - batch.since:.3g} s{last}; it may be stored, also later, until the "
            f"broker has answered the next message of this producer to {lane.topic}/{lane.queue_id}"
        )
