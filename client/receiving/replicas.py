"""The replicas of one broker: its master, and the slaves that its messages can be read from too.

Which of them a queue is read from is decided after each answer. RocketMQ's rule (PullMessage-
Processor): the broker that has been asked says whether the messages lie so far back that they are
not in its memory; then the next pull goes to the slave that the group names
(`whichBrokerWhenConsumeSlowly`), else to the one that it names for all others (`brokerId`). Beyond
that rule, a replica that does not answer is passed over for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from cometmq.client.routes import MASTER, replicas_of
from cometmq.protocol.commands import BrokerEndpoints, TopicRoute

log = logging.getLogger(__name__)

PASSED_OVER_S: Final = 5.0  # a replica that did not answer; then it is tried again


class Replicas:
    """Where they are now, and which of them do not answer. The polling thread chooses, another one
    may `update` meanwhile.

    Args:
        replicas: at least one, in the order of their ids.
    """

    def __init__(self, replicas: Sequence[BrokerEndpoints]) -> None:
        self.near = MASTER  # the id that is read from as a rule
        self.far = 1  # the id that what lies far back is read from
        self._all = tuple(replicas)
        self._master = replicas[0]
        self._passed_over: dict[int, float] = {}  # until when, time.monotonic()
        self._told = False  # the log has been told that it is not the master that is read

    @property
    def master(self) -> BrokerEndpoints:
        """The last master that was known. Where there was none yet: the first of its slaves."""
        return self._master

    def update(self, replicas: Sequence[BrokerEndpoints]) -> None:
        """As a newer route has them. A master that the name server has lost is still the one that
        commits are meant for."""
        self._all = tuple(replicas)
        if replicas[0].broker_id == MASTER or self._master.broker_id != MASTER:
            self._master = replicas[0]

    def at(self, broker_id: int) -> BrokerEndpoints:
        """The replica of that id; the master where there is none, or none any more."""
        return next((each for each in self._all if each.broker_id == broker_id), self._master)

    def all(self) -> tuple[BrokerEndpoints, ...]:
        """The master first, also one that the route does not name any more; then the slaves."""
        return (self._master, *(each for each in self._all if each != self._master))

    def in_turn(self) -> list[BrokerEndpoints]:
        """To be asked one after the other: those that answer first."""
        now = time.monotonic()
        return sorted(self.all(), key=lambda each: self._passed_over.get(each.broker_id, 0.0) > now)

    # --- choosing ---

    def answered(self, broker_id: int, *, is_far_behind: bool) -> int:
        """That replica has answered: the id of the one to ask next."""
        self._passed_over.pop(broker_id, None)
        if self._told and broker_id == self._master.broker_id:
            self._told = False
            log.info("the master of broker %s is read again", self._master.broker)
        return self.choose(is_far_behind=is_far_behind)

    def missed(self, broker_id: int) -> int:
        """That replica has not answered, or had nothing to say: the id of the one to ask next."""
        self._passed_over[broker_id] = time.monotonic() + PASSED_OVER_S
        chosen = self.choose()
        if not self._told and broker_id == self._master.broker_id != chosen:
            self._told = True
            text = "broker %s does not answer: its messages are read from its slave %d at %s"
            log.warning(text, self._master.broker, chosen, self.at(chosen).readers[0])
        return chosen

    def choose(self, *, is_far_behind: bool = False) -> int:
        """The one that is wanted, if it is there and answers; else the first that does; else the
        master."""
        if self._all == (self._master,):
            return self._master.broker_id
        wanted = self.far if is_far_behind else self.near
        now = time.monotonic()
        ids = [each.broker_id for each in self.all()]
        usable = [each for each in ids if self._passed_over.get(each, 0.0) <= now]
        return wanted if wanted in usable else next(iter(usable), self._master.broker_id)


def follow(known: dict[str, Replicas], route: TopicRoute) -> None:
    """Bring what is known of brokers, by name, up to a route."""
    for broker, replicas in replicas_of(route).items():
        if broker in known:
            known[broker].update(replicas)
        else:
            known[broker] = Replicas(replicas)
