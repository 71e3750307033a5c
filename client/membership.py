"""A consumer's place in its group at one broker: heartbeat, share of the queues, commits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from cometmq.client.recovery import pause_s
from cometmq.protocol.channel import Channel, Pending
from cometmq.protocol.commands import (
    BrokerEndpoints,
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    GroupShare,
    JoinGroup,
    LeaveGroup,
    QueueKey,
    QueueOffset,
    Subscription,
)
from cometmq.protocol.errors import CometError, NotOwner

log = logging.getLogger(__name__)

ASK_S: Final = 3.0
SESSION_MS: Final = 30_000  # until the coordinator has said what it is
LATE_S: Final = 5.0  # a heartbeat that is answered so late is given up
REFRESH_S: Final = 30.0


class Owner(Protocol):
    """What a membership needs of its consumer. Called in the membership's thread."""

    group: str
    member: str

    def subscriptions(self) -> list[Subscription]: ...
    def take_on(self, place: Membership, offsets: Sequence[QueueOffset]) -> None: ...
    def give_up(
        self, place: Membership, keys: Sequence[QueueKey], *, wait: bool = True
    ) -> None: ...
    def forget(self, place: Membership, keys: Sequence[QueueKey]) -> None: ...
    def progress_of(self, place: Membership) -> list[QueueOffset]: ...
    def committed(self, place: Membership, offsets: Sequence[QueueOffset]) -> None: ...
    def refused(self, place: Membership, error: CometError) -> None: ...
    def look_up_brokers(self) -> None: ...


class Membership:
    """One thread, one line to the coordinator of one broker.

    Stays in the group by JoinGroup, which the coordinator answers when the share changes, or after
    a third of the session time. A queue that is taken away is given up in order: nothing more of
    it is handed out, its progress is committed, and only then `owned` names it no longer.
    """

    def __init__(self, owner: Owner, endpoints: BrokerEndpoints, auto_commit_s: float) -> None:
        self.endpoints = endpoints
        self.broker = endpoints.broker
        self.joined = threading.Event()  # the first share has been taken in
        self.commit_lock = threading.Lock()  # one commit at a time, in order
        self._owner = owner
        self._auto_commit_s = auto_commit_s
        self._channel = Channel(endpoints.coordinator, self._name(endpoints))
        self._wake = threading.Condition()
        self._owned: set[QueueKey] = set()
        self._disowned: set[QueueKey] = set()  # a commit was refused: another member has them
        self._version = -1
        self._session_ms = SESSION_MS
        self._join: Pending | None = None
        self._join_until = 0.0
        self._stirred = False  # something changed that the coordinator has to hear of
        self._lost_contact = False
        self._failures = 0
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"cometmq consumer {self.broker}", daemon=True
        )

    @staticmethod
    def _name(endpoints: BrokerEndpoints) -> str:
        return f"the coordinator of {endpoints.broker} at {endpoints.coordinator}"

    def start(self) -> None:
        self._thread.start()

    # --- from other threads ---

    def stir(self) -> None:
        """The subscriptions have changed: join anew."""
        with self._wake:
            self._stirred = True
            self._wake.notify()

    def look_up(self) -> None:
        """A reader does not answer: see where the broker is now."""
        with self._wake:
            self._lost_contact = True
            self._wake.notify()

    def moved(self, endpoints: BrokerEndpoints) -> None:
        """The broker listens elsewhere now."""
        with self._wake:
            old, self.endpoints = self.endpoints, endpoints
            if old.coordinator == endpoints.coordinator:
                return
            line, self._channel = (
                self._channel,
                Channel(endpoints.coordinator, self._name(endpoints)),
            )
        line.close()

    def commit(self) -> None:
        """Commit what is acknowledged, now. Raises what the coordinator answers."""
        with self.commit_lock:
            offsets = self._owner.progress_of(self)
            if offsets:
                self._commit(offsets)

    def set_offsets(self, offsets: Sequence[QueueOffset]) -> None:
        """Move the group's offsets, also back. The caller holds `commit_lock`."""
        self._channel.ask(CommitOffsets(self._owner.group, list(offsets)), timeout_s=ASK_S)

    def close(self) -> None:
        """Commit, leave the group, let go of the line."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._channel.close()

    # --- commits ---

    def _commit(self, offsets: list[QueueOffset]) -> None:
        group, member = self._owner.group, self._owner.member
        try:
            self._channel.ask(CommitOffsets(group, offsets, member), timeout_s=ASK_S)
        except NotOwner as error:
            if len(offsets) > 1:  # it does not say which one
                for each in offsets:
                    self._commit([each])
                return
            log.warning("group %s: %s", group, error)
            with self._wake:  # the thread sees to it
                self._disowned.add(QueueKey(offsets[0].topic, offsets[0].queue_id))
                self._stirred = True
                self._wake.notify()
        else:
            self._owner.committed(self, offsets)

    def _commit_quietly(self) -> None:
        try:
            self.commit()
        except CometError as error:
            log.warning("group %s: progress not committed: %s", self._owner.group, error)

    # --- the thread ---

    def _run(self) -> None:
        commit_at = time.monotonic() + self._auto_commit_s
        refresh_at = time.monotonic() + REFRESH_S
        while True:
            wake_at = min(commit_at, refresh_at)
            join = self._await_join(wake_at)
            if self._closed:
                break
            now = time.monotonic()
            if join is not None:
                self._answered(join)
            if now >= commit_at:
                self._commit_quietly()
                commit_at = time.monotonic() + self._auto_commit_s
            if now >= refresh_at or self._lost_contact:
                self._lost_contact = False
                self._owner.look_up_brokers()
                refresh_at = time.monotonic() + REFRESH_S
        self._leave()

    def _await_join(self, wake_at: float) -> Pending | None:
        """See that a JoinGroup is under way; it, when it is answered, or None when time is up."""
        with self._wake:
            disowned, self._disowned = list(self._disowned), set()
        if disowned:
            self._owner.give_up(self, disowned, wait=False)
            self._owner.forget(self, disowned)
            self._owned.difference_update(disowned)
            self._version = -1  # hear the whole share anew
        with self._wake:
            if self._stirred or self._join is None or time.monotonic() > self._join_until:
                self._stirred = False
                self._join = None  # an earlier one may still be answered, and is not heard then
                command = self._join_command()
                self._join_until = time.monotonic() + command.wait_ms / 1000 + LATE_S
            else:
                command = None
        if command is not None:
            self._send_join(command)
        with self._wake:
            while not (self._closed or self._stirred or self._lost_contact):
                if self._join is not None and self._join.done:
                    join, self._join = self._join, None
                    return join
                left_s = min(wake_at, self._join_until) - time.monotonic()
                if left_s <= 0:
                    break
                self._wake.wait(left_s)
        return None

    def _join_command(self) -> JoinGroup:
        owner = self._owner
        wait_ms = 0 if self._version < 0 else self._session_ms // 3
        return JoinGroup(
            owner.group,
            owner.member,
            owner.subscriptions(),
            sorted(self._owned, key=lambda key: (key.topic, key.queue_id)),
            self._version,
            wait_ms,
        )

    def _send_join(self, command: JoinGroup) -> None:
        try:
            self._join = self._channel.request(command, on_done=self._on_done)
        except CometError as error:  # closed because the broker moved
            log.debug("join: %s", error)
            self._pause()

    def _on_done(self, _pending: Pending) -> None:
        with self._wake:
            self._wake.notify()

    def _answered(self, join: Pending) -> None:
        try:
            answer, _ = join.result()
            if not isinstance(answer, GroupShare):
                raise CometError(f"JoinGroup was answered by {type(answer).__name__}")
            self._take_in(answer)
        except CometError as error:
            self._failures += 1
            if not error.retriable:
                self._owner.refused(self, error)
            elif self._failures == 3:
                log.warning("group %s: %s; trying again", self._owner.group, error)
            self._pause()
            self._owner.look_up_brokers()
        else:
            self._failures = 0
            self.joined.set()

    def _pause(self) -> None:
        with self._wake:
            if not self._closed:
                self._wake.wait(pause_s(max(1, self._failures)))

    def _take_in(self, share: GroupShare) -> None:
        """Become the owner of what the share names, and of nothing else."""
        self._session_ms = share.session_timeout_ms
        wanted = set(share.queues)
        lost = self._owned - wanted
        if lost:
            self._owner.give_up(self, list(lost))
            self._commit_quietly()
            self._owner.forget(self, list(lost))
            self._owned -= lost
        gained = [key for key in share.queues if key not in self._owned]
        if gained:
            answer, _ = self._channel.ask(FetchOffsets(self._owner.group, gained), timeout_s=ASK_S)
            if not isinstance(answer, GroupOffsets):
                raise CometError(f"FetchOffsets was answered by {type(answer).__name__}")
            self._owner.take_on(self, answer.offsets)
            self._owned.update(gained)
        self._version = share.version
        if lost:
            self.stir()  # now it can be given to somebody else

    def _leave(self) -> None:
        self._commit_quietly()
        try:
            self._channel.ask(LeaveGroup(self._owner.group, self._owner.member), timeout_s=1.0)
        except CometError as error:
            log.debug("leaving group %s: %s", self._owner.group, error)


if TYPE_CHECKING:
    from cometmq.client.consumer import Consumer

    def _is_an_owner(consumer: Consumer) -> Owner:
        return consumer
