"""Group membership at one broker: heartbeats, assignment of queues, commits of offsets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

from cometmq.client.presence import AWAY, Presence
from cometmq.client.receiving.buffer import Lease
from cometmq.client.receiving.doubts import Settling
from cometmq.client.receiving.joining import News
from cometmq.client.receiving.owned import OwnedQueues
from cometmq.client.receiving.replicas import Replicas
from cometmq.protocol.commands import (
    BrokerEndpoints,
    CommitOffsets,
    FetchOffsets,
    GetLine,
    GiveBackMessages,
    GivenBack,
    GroupOffsets,
    GroupShare,
    JoinGroup,
    LeaveGroup,
    MessagesGivenBack,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import (
    CometError,
    NotOwner,
)
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.protocol.wire.long_poll import LongPoll
from cometmq.protocol.wire.steady import Steady
from cometmq.shm.os.processes import boot_id

log = logging.getLogger(__name__)

ASK_S: Final = 3.0
CLOSE_S: Final = 15.0  # for the last commit and the farewell, and what was under way before
SESSION_MS: Final = 30_000  # until the coordinator has said what it is
REFRESH_S: Final = 30.0
LOOK_S: Final = 1.0  # the same while the broker does not answer: it may be another one by now


class Owner(Protocol):
    """What a membership needs of the member. Called in the membership's thread."""

    group: str
    name: str
    process: str  # that it lives in

    def take_on(self, place: Membership, offsets: Sequence[QueueOffset]) -> None: ...
    def refused(self, error: CometError) -> None: ...
    def accepted(self) -> None: ...
    def look_up_brokers(self) -> None: ...
    def settle(self, place: Membership) -> None:
        """Check for lost messages; see `Member.settle`. Raises CometError while unknown."""


class Membership:
    """One thread, one channel to the coordinator of one broker.

    Stays in the group by JoinGroup, which the coordinator answers when the share changes, or after
    a third of the session time. A queue that is taken away is given up in order: nothing more of
    it is handed out, its progress is committed, and only then `owned` names it no longer.

    Each queue is owned by an epoch that the coordinator gives with it. Whatever is committed names
    it; where the coordinator knows of another one, the queue has been somebody else's meanwhile,
    and is dropped with all that is known of it.

    Args:
        near: commit by a line, where the broker is on this machine.
    """

    def __init__(
        self,
        owner: Owner,
        owned: OwnedQueues,
        replicas: Sequence[BrokerEndpoints],
        auto_commit_s: float,
        *,
        near: bool,
    ) -> None:
        self.replicas = Replicas(replicas)
        endpoints = self.replicas.master
        self.broker = endpoints.broker
        self.presence = Presence(f"group {owner.group}", self.broker)
        self.joined = threading.Event()  # the first share has been taken in
        self.commit_lock = threading.Lock()  # one commit at a time, in order
        self._owner = owner
        self._queues = owned
        self._auto_commit_s = auto_commit_s
        self._line_request = GetLine(boot_id(), is_stream=True) if near else None
        self._channel = _channel_to(endpoints, self._line_request)
        self._wake = threading.Condition()
        self._owned: dict[QueueKey, int] = {}  # -> epoch
        self._disowned: set[tuple[QueueKey, int]] = set()  # a commit of these was refused
        self._version = -1
        self.lease = Lease()  # of all that is owned here
        self._session_ms = SESSION_MS
        self._join = LongPoll()
        self._doubts = False  # the coordinator says that something is not ours: hear it all
        self._news = News()
        self._lost_contact = False
        self.doubts = Settling(self._wake, lambda: owner.settle(self))
        self._refused = False
        self._closed = False
        self._commit_at = time.monotonic() + auto_commit_s
        self._refresh_at = time.monotonic() + REFRESH_S
        self._has_left = False
        self._thread = Steady(f"cometmq consumer {self.broker}", self._turn)

    def start(self) -> None:
        self._thread.start()

    # --- from other threads ---

    def stir(self) -> None:
        """The subscriptions have changed: join anew."""
        with self._wake:
            self._news.waits = True
            self._wake.notify()

    def look_up(self) -> None:
        """A reader does not answer: see where the broker is now."""
        with self._wake:
            self._lost_contact = True
            self._wake.notify()

    def met(self, replicas: Sequence[BrokerEndpoints]) -> None:
        """Where the broker and its slaves are now."""
        with self._wake:
            old = self.replicas.master
            self.replicas.update(replicas)
            new = self.replicas.master
            if old.coordinator == new.coordinator:
                return
            before = self._channel
            self._channel = _channel_to(new, self._line_request)
        before.close()

    def commit(self) -> None:
        """Commit what is acknowledged, now. Raises what the coordinator answers."""
        self.doubts.settle()
        with self.commit_lock:
            offsets = self._queues.progress_of(self.broker)
            if offsets:
                self._commit(offsets)

    def give_back(
        self, messages: list[GivenBack], max_reconsume_times: int, timeout_s: float
    ) -> list[int]:
        """For each of these 0, when its copy is stored, else an error's code. Raises CometError."""
        command = GiveBackMessages(self._owner.group, messages, max_reconsume_times)
        answer, _ = self._channel.ask(command, timeout_s=timeout_s)
        if not isinstance(answer, MessagesGivenBack) or len(answer.codes) != len(messages):
            raise CometError(f"GiveBackMessages was answered by {type(answer).__name__}")
        return answer.codes

    def set_offsets(self, offsets: Sequence[QueueOffset], *, seek: bool = False) -> None:
        """Move the group's offsets; with `seek` also back. The caller holds `commit_lock`.

        Raises NotOwner if one of them is not ours any more, and then none is moved.
        """
        command = CommitOffsets(self._owner.group, list(offsets), self._owner.name, seek)
        try:
            self._channel.ask(command, timeout_s=ASK_S)
        except NotOwner:
            self._disown(())  # it does not say which one; the next share does
            raise

    def close(self) -> None:
        """Commit, leave the group, close the channel."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if not self._thread.join(CLOSE_S):
            log.error("group %s: %s does not end", self._owner.group, self._thread.name)
        self._channel.close()

    # --- commits ---

    def _commit(self, offsets: list[QueueOffset]) -> None:
        group, member = self._owner.group, self._owner.name
        try:
            self._channel.ask(CommitOffsets(group, offsets, member), timeout_s=ASK_S)
        except NotOwner as error:
            if len(offsets) > 1:  # it does not say which one
                half = len(offsets) // 2
                self._commit(offsets[:half])
                self._commit(offsets[half:])
                return
            log.warning("group %s: %s", group, error)
            self._disown(offsets)
        else:
            self.presence.answered()
            self._queues.committed(self.broker, offsets)

    def _disown(self, offsets: Sequence[QueueOffset]) -> None:
        """Have the thread drop these queues, and ask what is ours."""
        with self._wake:
            self._doubts = True
            self._disowned.update(
                (QueueKey(each.topic, each.queue_id), each.epoch) for each in offsets
            )
            self._news.waits = True
            self._wake.notify()

    def _commit_quietly(self) -> None:
        try:
            self.commit()
        except AWAY as error:
            self.presence.missed(str(error))
        except CometError as error:
            log.warning("group %s: progress not committed: %s", self._owner.group, error)

    # --- the thread ---

    def _turn(self) -> bool:
        join = None if self._closed else self._await_join(min(self._commit_at, self._refresh_at))
        if self._closed:
            if not self._has_left:
                self._has_left = True
                self._leave()
            return False
        now = time.monotonic()
        self.doubts.settle_due()
        if now >= self._commit_at:
            self._commit_at = now + self._auto_commit_s
            self._commit_quietly()
        if join is not None:
            self._answered(join)
        if now >= self._refresh_at or self._lost_contact:
            self._lost_contact = False
            self._owner.look_up_brokers()
            pause = REFRESH_S if self.presence.connected else LOOK_S
            self._refresh_at = time.monotonic() + pause
        return True

    def _await_join(self, wake_at: float) -> Pending | None:
        """See that a JoinGroup is under way; it, when it is answered, or None when time is up."""
        with self._wake:
            disowned, self._disowned = self._disowned, set()
            doubts, self._doubts = self._doubts, False
        self._drop([key for key, epoch in disowned if self._owned.get(key) == epoch])
        if doubts:
            self._version = -1
        with self._wake:
            before, command = self._join.pending, None
            if self._news.is_due(before, self._join.sent_at) or before is None:
                self._news.tell(before)
                command = self._join_command()
        if command is not None:
            self._send_join(command)
        with self._wake:
            while not (
                self._closed
                or self._news.is_due(self._join.pending, self._join.sent_at)
                or self._lost_contact
                or time.monotonic() >= self.doubts.due
            ):
                join = self._join.take()
                if join is not None:
                    self._news.answered()
                    return join
                self.presence.check()
                wake_at = min(wake_at, self.presence.due, self.doubts.due)
                tell_at = self._news.due_at(self._join.sent_at)
                left_s = min(wake_at, tell_at, self._join.again_at) - time.monotonic()
                if left_s <= 0:
                    break
                self._wake.wait(left_s)
        return None

    def _join_command(self) -> JoinGroup:
        owner = self._owner
        waits = self._version >= 0 and self.presence.connected  # else: is it there?
        wait_ms = self._session_ms // 3 if waits else 0
        return JoinGroup(
            owner.group,
            owner.name,
            self._queues.subscriptions(),
            sorted(self._owned, key=lambda key: (key.topic, key.queue_id)),
            self._version,
            wait_ms,
            owner.process,
        )

    def _send_join(self, command: JoinGroup) -> None:
        try:
            held_s = command.wait_ms / 1000
            self._join.ask(self._channel, command, held_s, self._on_done)
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
        except AWAY as error:
            self.presence.missed(str(error))
            self._pause()
            self._lost_contact = True
        except NotOwner as error:  # it was ours, and is not any more
            log.warning("group %s: %s", self._owner.group, error)
            self._version = -1
        except CometError as error:
            if not error.retriable:
                self._refused = True
                self._owner.refused(error)
            elif self._join.failures == 2:
                log.warning("group %s: %s; trying again", self._owner.group, error)
            self._pause()
            self._lost_contact = True
        else:
            self._join.answered()
            self.presence.answered()
            self.joined.set()
            if self._refused:
                self._refused = False
                self._owner.accepted()

    def _pause(self) -> None:
        pause = self._join.failed()
        with self._wake:
            if not self._closed:
                self._wake.wait(pause)

    def _take_in(self, share: GroupShare) -> None:
        """Become the owner of what the share names, and of nothing else."""
        self._session_ms = share.session_timeout_ms
        self.replicas.near, self.replicas.far = share.reads_from, share.reads_far_from
        lease_until = self._join.sent_at + self._session_ms / 1000
        epochs = share.epochs or [0] * len(share.queues)  # none: an older coordinator's
        wanted = dict(zip(share.queues, epochs, strict=True))
        # What has been somebody else's meanwhile: nobody would take our commits of it.
        self._drop([key for key, epoch in self._owned.items() if wanted.get(key, epoch) != epoch])
        lost = [key for key in self._owned if key not in wanted]
        if lost:
            self._queues.give_up(self.broker, lost, wait=True)
            self._commit_quietly()
            self._forget(lost)
        gained = {key: epoch for key, epoch in wanted.items() if key not in self._owned}
        self.lease.until = lease_until  # what was lost has none any more
        if gained:
            self._take_on(gained)
        self._version = share.version
        if lost:
            self.stir()  # now it can be given to somebody else

    def _take_on(self, gained: dict[QueueKey, int]) -> None:
        command = FetchOffsets(self._owner.group, list(gained))
        answer, _ = self._channel.ask(command, timeout_s=ASK_S)
        if not isinstance(answer, GroupOffsets):
            raise CometError(f"FetchOffsets was answered by {type(answer).__name__}")
        offsets = [
            QueueOffset(key.topic, key.queue_id, each.queue_offset, epoch)
            for each, (key, epoch) in zip(answer.offsets, gained.items(), strict=True)
        ]
        self._owner.take_on(self, offsets)
        self._owned.update(gained)

    def _drop(self, keys: list[QueueKey]) -> None:
        """They are not ours any more: nothing of them is committed."""
        if keys:
            self._queues.give_up(self.broker, keys, wait=False)
            self._forget(keys)

    def _forget(self, keys: list[QueueKey]) -> None:
        self._queues.forget(self.broker, keys)
        for key in keys:
            del self._owned[key]

    def _leave(self) -> None:
        self._commit_quietly()
        command = LeaveGroup(self._owner.group, self._owner.name)
        try:
            # A JoinGroup that this overtakes brings the member back until its session ends.
            self._channel.ask(command, timeout_s=1.0)
        except CometError as error:
            log.debug("leaving group %s: %s", self._owner.group, error)


def _channel_to(endpoints: BrokerEndpoints, line_request: GetLine | None) -> Channel:
    name = f"the coordinator of {endpoints.broker} at {endpoints.coordinator}"
    return Channel(endpoints.coordinator, name, line_request=line_request)
