"""The gate of a master in a group: what it does for clients, as `ha` has it at this moment.

What a master hands out for a time, as the invisibility of popped messages, it must not hand out
when there may be another master. Nor may it tell a member that its queues are still its own: the
other master waits for as long as a member goes on without being told, and gives them to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import Handler
from cometmq.protocol.commands import ChangeInvisible, Command, JoinGroup, PopMessages, ServedBy
from cometmq.protocol.errors import (
    CometError,
    InSyncReplicasNotEnough,
    NotMaster,
    ServiceNotAvailable,
)
from cometmq.shm.kernel.live import ReadCell
from cometmq.shm.live.control import Counter, Service

GRANTS: Final = frozenset({PopMessages, ChangeInvisible})


class Gate:
    """Asked before each command.

    Args:
        service: the counter.
        sure_until: the counter. It is looked at beside the clock: a broker that was stopped for a
            while is not certain any more when it wakes, whoever of its processes wakes first.
        group: its name, for people.
        min_iss: how many replicas must have a message.
        session_s: for how long a master is certain of itself without having heard of the engine.
    """

    def __init__(
        self,
        service: ReadCell,
        sure_until: ReadCell,
        group: str,
        min_iss: int,
        session_s: float,
    ) -> None:
        self.session_s = session_s
        self._service = service
        self._sure_until = sure_until
        self._group = group
        self._min_iss = min_iss

    @classmethod
    def of(cls, family: Family) -> Gate | None:
        """None: this broker is in no group."""
        settings = family.settings
        if not settings.is_in_group:
            return None
        service = family.control.read(Counter.SERVICE)
        sure_until = family.control.read(Counter.SURE_UNTIL)
        session_s = settings.group_session_timeout_ms / 1000
        return cls(service, sure_until, settings.group_name, settings.min_iss, session_s)

    @property
    def grants(self) -> bool:
        """Whether anything may be handed out for a time."""
        return self._service.value == Service.OPEN and self._has_session

    @property
    def shares(self) -> bool:
        """Whether members may be told that queues are theirs: also while nothing can be stored."""
        return self._service.value in (Service.OPEN, Service.SHORT) and self._has_session

    @property
    def _has_session(self) -> bool:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000 < self._sure_until.value

    def why_not_stored(self) -> CometError | None:
        """Why nothing is stored now; None: it is."""
        service = self._service.value
        if service in (Service.OPEN, Service.UNSURE):
            return None
        if service == Service.SHORT:
            return InSyncReplicasNotEnough(
                f"of group {self._group} fewer than {self._min_iss} replicas are in sync "
                "(minInSyncReplicas): nothing is stored until they are"
            )
        return NotMaster(
            f"this broker is not the master of group {self._group} any more, or not yet: the name "
            "server knows who is"
        )

    def why_not_granted(self) -> CometError | None:
        if self.grants:
            return None
        return self.why_not_stored() or ServiceNotAvailable(
            f"this broker is not certain to be the master of group {self._group}: nothing is "
            "popped, nor kept invisible, until it is"
        )

    def why_not_shared(self) -> CometError | None:
        if self.shares:
            return None
        return self.why_not_heard() or ServiceNotAvailable(
            f"this broker is not certain to be the master of group {self._group}: no member is "
            "told that queues are its own, until it is"
        )

    def guarded(self, kind: type[Command], handler: Handler) -> Handler:
        """The handler, behind this gate."""
        if kind.access.served_by is not ServedBy.MASTER:
            return handler
        why_not = self._rule_of(kind)

        def handle(command: Command, request: object) -> Command | None:
            error = why_not()
            if error is not None:
                raise error
            return handler(command, request)

        return handle

    def _rule_of(self, kind: type[Command]) -> Callable[[], CometError | None]:
        if kind in GRANTS:
            return self.why_not_granted
        return self.why_not_shared if kind is JoinGroup else self.why_not_heard

    def why_not_heard(self) -> CometError | None:
        """Why it is another broker's. What cannot be stored just now is told when it is stored."""
        error = self.why_not_stored()
        return error if isinstance(error, NotMaster) else None
