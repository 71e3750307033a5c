"""Checks: the broker asks what has become of transactions, and the user's checker answers.

A thread of its own waits at every broker, and calls the checker. While that one works no more
questions are taken: they go to another producer of the group, if there is one.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Final

from cometmq.client.routes import MASTER, Routes
from cometmq.client.sending.pending import Checker, PendingTransaction
from cometmq.protocol.commands import (
    AwaitChecks,
    BrokerEndpoints,
    EndTransactions,
    TransactionCheck,
    TransactionChecks,
    TransactionEnd,
    TransactionsEnded,
)
from cometmq.protocol.errors import CometError, from_code
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Pending
from cometmq.protocol.wire.long_poll import LongPoll
from cometmq.protocol.wire.steady import Steady
from cometmq.shm.kernel.codec import Message, decode

log = logging.getLogger(__name__)

# Short compared with the pause between two rounds of checks: until the loss of an answer is
# noticed, rounds pass, and after transactionCheckMax of them a half message is given up.
WAIT_MS: Final = 5_000
LOOK_S: Final = 10.0  # for brokers that are new; sooner where one was lost
ASK_S: Final = 3.0
CLOSE_S: Final = 5.0  # for a checker that works


class Checks:
    """Answers for one group.

    Args:
        is_open: whether a transaction is still at work in this process: then nobody is asked.
    """

    def __init__(
        self, group: str, routes: Routes, checker: Checker, is_open: Callable[[str], bool]
    ) -> None:
        self._group = group
        self._routes = routes
        self._checker = checker
        self._is_open = is_open
        self._answers: queue.SimpleQueue[tuple[str, Pending] | None] = queue.SimpleQueue()
        # By the coordinator's endpoint.
        self._polls: dict[str, LongPoll] = {}
        self._brokers: dict[str, BrokerEndpoints] = {}
        self._looks = 0  # since a broker was lost: another one may be the master soon
        self._look_at = 0.0
        self._closed = False
        self._thread = Steady(f"cometmq checks {group}", self._turn)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._answers.put(None)
        if not self._thread.join(CLOSE_S):
            log.error("the checker of %s works on and on; it is not waited for", self._group)

    # --- the thread ---

    def _turn(self) -> bool:
        now = time.monotonic()
        if self._look_at <= now:
            self._look()
        for endpoint, poll in list(self._polls.items()):
            if poll.again_at <= now:
                self._poll(endpoint, poll)
        next_at = min([self._look_at, *(poll.again_at for poll in self._polls.values())])
        try:
            item = self._answers.get(timeout=max(0.0, next_at - time.monotonic()))
        except queue.Empty:
            return not self._closed
        if item is not None and not self._closed:
            self._heard(*item)
        return not self._closed

    def _look(self) -> None:
        try:
            found = self._routes.brokers(ASK_S)
        except CometError as error:
            log.debug("it is not known which brokers there are: %s", error)
            found = list(self._brokers.values())
        self._brokers = {each.coordinator: each for each in found if each.broker_id == MASTER}
        gone = self._polls.keys() - self._brokers.keys()
        for endpoint in gone:
            del self._polls[endpoint]
        for endpoint in self._brokers.keys() - self._polls.keys():
            self._polls[endpoint] = LongPoll()
        self._looks = 1 if gone else self._looks + 1
        self._look_at = time.monotonic() + pause_s(self._looks, most_s=LOOK_S)

    def _look_soon(self) -> None:
        self._looks = 0
        self._look_at = min(self._look_at, time.monotonic() + pause_s(1))

    def _poll(self, endpoint: str, poll: LongPoll) -> None:
        def heard(pending: Pending) -> None:
            self._answers.put((endpoint, pending))

        try:
            channel = self._routes.channel(endpoint, "a coordinator")
            poll.ask(channel, AwaitChecks(self._group, WAIT_MS), WAIT_MS / 1000, heard)
        except CometError as error:
            self._again(endpoint, poll, error)

    def _heard(self, endpoint: str, pending: Pending) -> None:
        poll = self._polls.get(endpoint)
        if poll is None:
            return
        try:
            answer, payload = pending.result()
            if isinstance(answer, TransactionChecks) and answer.checks:
                records = [bytes(frame.buffer) for frame in payload]
                checks = list(zip(answer.checks, records, strict=True))
                self._answer(self._brokers[endpoint], checks)
        except (CometError, ValueError) as error:
            if poll.pending is pending:  # else an earlier poll's: this one is under way
                self._again(endpoint, poll, error)
        else:
            if poll.pending is pending:
                poll.answered()

    def _again(self, endpoint: str, poll: LongPoll, error: Exception) -> None:
        log.debug("no checks from %s: %s", endpoint, error)
        poll.failed()
        if poll.failures == 1:
            self._look_soon()

    # --- the checker ---

    def _answer(
        self, broker: BrokerEndpoints, checks: list[tuple[TransactionCheck, bytes]]
    ) -> None:
        """Ask the checker for each, and end what it has decided."""
        for check, record in checks:
            if self._closed:
                return
            commit = self._decide(check, record)
            if commit is None:
                continue
            end = TransactionEnd(check.transaction_id, commit, check.parts)
            try:
                channel = self._routes.commitlog(broker.commitlog, f"broker {broker.broker}")
                command = EndTransactions.of(self._group, [end])
                answer, _ = channel.ask(command, timeout_s=ASK_S)
                assert isinstance(answer, TransactionsEnded)
                if answer.codes[0]:
                    raise from_code(answer.codes[0], answer.texts[0])
            except CometError as error:  # if it is still pending, it is asked for again
                log.warning("transaction %s is not ended: %s", check.transaction_id, error)

    def _decide(self, check: TransactionCheck, record: bytes) -> bool | None:
        if not check.parts or self._is_open(check.transaction_id):
            return None
        try:
            (message,) = decode(record)
            assert isinstance(message, Message)
            pending = PendingTransaction(
                check.transaction_id, check.parts[0].topic, check.times, len(check.parts), message
            )
            decided = self._checker(pending)
        except Exception:
            log.exception("the checker of %s fails for transaction %s; it is asked again later",
                          self._group, check.transaction_id)  # fmt: skip
            return None
        if decided is not None and not isinstance(decided, bool):
            log.error("the checker of %s says %.80r of transaction %s: True is commit, False roll "
                      "back, None not decided yet; it is asked again later",
                      self._group, decided, check.transaction_id)  # fmt: skip
            return None
        return decided
