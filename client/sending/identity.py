"""Who a producer is to brokers: a random number, and with `producer_id` a name in an epoch."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from typing import Final

from cometmq.client.routes import Routes
from cometmq.client.sending.receipt import STORED_CODES
from cometmq.protocol.commands import OpenProducer, ProducerOpened
from cometmq.protocol.errors import (
    CometError,
    NotConfirmed,
    NotReachable,
    ProducerFenced,
    from_code,
)
from cometmq.protocol.names import check_producer_id
from cometmq.protocol.retry import pause_s

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0  # for a broker that has forgotten who this is


class Identity:
    """Of one producer. The epoch is the same at all brokers.

    Args:
        producer_id: None: it has no name.
    """

    def __init__(self, producer_id: str | None) -> None:
        if producer_id is not None:
            check_producer_id(producer_id)
        self.sender: Final = secrets.randbits(62) | 1  # who numbers the attempts
        self.producer_id: Final = producer_id or ""
        self.epoch = 0

    def begin(self, routes: Routes, timeout_s: float) -> None:
        """Tell every broker that this is the newest producer of the name.

        A broker that does not answer hears it before it stores anything. Raises NotReachable when
        none has answered within the time.
        """
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while True:
            error = self._begin(routes, deadline)
            if error is None:
                return
            attempts += 1
            left_s = deadline - time.monotonic()
            if not error.retriable and not isinstance(error, NotConfirmed | NotReachable):
                raise error
            if left_s <= 0:
                raise NotReachable(
                    f"no broker has taken up producer {self.producer_id} within {timeout_s:g} s: "
                    f"{error}"
                )
            time.sleep(min(left_s, pause_s(attempts)))

    def _begin(self, routes: Routes, deadline: float) -> CometError | None:
        """One attempt; why no broker knows it now, or None."""
        try:
            endpoints = [each.commitlog for each in routes.masters(_left_s(deadline))]
        except CometError as error:
            return error
        epochs: dict[str, int] = {}
        failure: CometError | None = None
        for endpoint in endpoints:
            try:
                epochs[endpoint] = self._open(routes, endpoint, 0, _left_s(deadline))
            except CometError as error:
                log.warning("producer %s at %s: %s", self.producer_id, endpoint, error)
                failure = error
        if not epochs:
            return failure
        self.epoch = max(epochs.values())
        self.open_again(routes, (each for each, epoch in epochs.items() if epoch < self.epoch))
        return None

    def open_again(self, routes: Routes, endpoints: Iterable[str]) -> None:
        """Say to these brokers which epoch this is. What fails is found when something is sent."""
        for endpoint in endpoints:
            try:
                self._open(routes, endpoint, self.epoch, AGAIN_S)
            except ProducerFenced:
                pass  # whoever sends is told so
            except CometError as error:
                log.debug("producer %s at %s: %s", self.producer_id, endpoint, error)

    def _open(self, routes: Routes, endpoint: str, epoch: int, timeout_s: float) -> int:
        command = OpenProducer(self.producer_id, self.sender, epoch)
        answer, _ = routes.commitlog(endpoint, "a broker").ask(command, timeout_s=timeout_s)
        if not isinstance(answer, ProducerOpened):
            raise CometError(f"{endpoint} answered {type(answer).__name__} to OpenProducer")
        if answer.code not in STORED_CODES:
            raise from_code(answer.code, answer.text)
        if answer.code:
            log.warning("producer %s at %s: %s", self.producer_id, endpoint, answer.text)
        return answer.epoch


def _left_s(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
