"""A replica whose `ha` process lays down what a test feeds it, and confirms it at once. No tests.

    with RunningBroker(store, replica_settings(), module=group_member.MODULE) as replica:
        with Feed(replica) as feed:
            feed.lay_down(0, content)       # returns once it is in the log

The broker is the real one but for that process. It is run as `cometmq.actors.launch.embedded`, with
the actor exchanged before the zygote is forked, so that every child has it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from family import RunningBroker
from patience import patient

from cometmq.actors.launch import embedded
from cometmq.actors.maintenance import dispatcher
from cometmq.actors.maintenance.dispatcher import DispatcherActor
from cometmq.actors.replication.group import member
from cometmq.actors.replication.group.log_feed import LogFeed
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.wire.line import abstract
from cometmq.shm.live.control import Counter, Phase

MODULE = "group_member"
RAW = "COMETMQ_TEST_RAW"  # in the environment: nobody listens for the log, a test does it itself
# In the environment: nothing is confirmed, and a dispatcher that has said of its queues that they
# are recovered, and not yet of the log that it is dispatched, lets all others go first.
UNCONFIRMED = "COMETMQ_TEST_UNCONFIRMED"
HEAD = struct.Struct(">qi")  # of a frame that is fed
ANSWER = struct.Struct(">qH")  # the end that is laid down, and the length of what is wrong
TIMEOUT_S = patient(60.0)


def feed_name(address: str) -> str:
    """Where the test hands frames in."""
    return f"{address.removeprefix('ipc://@')}-feed"


class FedMember(ServiceActor):
    """In place of MemberActor."""

    role = "ha"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        self._wrote = family.control.sleep_on(Counter.WROTE, family.doorbell)
        self._replicated = family.control.own(Counter.REPLICATED)
        self._known = family.control.own(Counter.CONFIRM_KNOWN)
        self._phase = family.control.sleep_on(Counter.PHASE, family.doorbell)
        self._feed: socket.socket | None = None
        self._line: LogFeed | None = None

    def on_start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(abstract(feed_name(self._family.addresses["ha"])))
        self._listener.listen()
        self.inbox.listen_to(self._listener.fileno())
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        if RAW not in os.environ:
            self._line = LogFeed(self._family.log_source, self._wrote, self._laid_down)
            self.inbox.listen_to(self._line.fileno())
        self._follow()

    def on_readable(self, source: Any) -> None:
        if self._line is not None and source == self._line.fileno():
            try:
                self._line.on_readable()
            except StoreDamaged as error:
                self._answer(-1, str(error))
                self._line.begin_run(self._wrote)
        elif source == self._listener.fileno():
            self._feed, _ = self._listener.accept()
            self.inbox.listen_to(self._feed.fileno())
        elif self._feed is not None:
            try:
                head = self._feed.recv(HEAD.size, socket.MSG_WAITALL)
            except ConnectionResetError:  # the test has not read all that it was told
                head = b""
            if head:
                offset, size = HEAD.unpack(head)
                content = self._feed.recv(size, socket.MSG_WAITALL)
                assert self._line is not None
                if self._line.lay_down(offset, memoryview(content)):
                    self._laid_down(offset + size)
            else:
                self.inbox.forget(self._feed.fileno())
                self._feed = None
        self._follow()  # LogFeed sleeps on `wrote` as well, and wakes up for both

    def on_doorbell(self) -> None:
        if self._line is not None:
            self._line.look()
        self._follow()

    def _follow(self) -> None:
        """All that is written is confirmed, whoever wrote it."""
        self._wrote.arm()
        self._phase.arm()
        if self._phase.value < Phase.RECOVERED:
            return
        if UNCONFIRMED not in os.environ:
            self._replicated.reset(self._wrote.value)
            self._replicated.wake()
        self._known.advance(1)

    def _laid_down(self, end: int) -> None:
        self._answer(end, "")

    def _answer(self, end: int, why: str) -> None:
        if self._feed is not None:
            self._feed.sendall(ANSWER.pack(end, len(why)) + why.encode())


class LateDispatcher(DispatcherActor):
    """Of UNCONFIRMED."""

    def _tell(self, reached: int) -> None:
        control = self._family.control
        if control.read(Counter.QUEUES_RECOVERED).value and not self._dispatched.value:
            self._family.wait_for(Counter.PHASE, Phase.SERVING)
        super()._tell(reached)


class Feed:
    """The test's end."""

    def __init__(self, replica: RunningBroker) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(abstract(feed_name(replica.address("ha"))))

    def hand_in(self, offset: int, content: bytes | memoryview) -> None:
        self._socket.sendall(HEAD.pack(offset, len(content)))
        self._socket.sendall(content)

    def wait(self) -> int:
        """The end that is laid down. Raises StoreDamaged as LogFeed has."""
        end, size = ANSWER.unpack(self._socket.recv(ANSWER.size, socket.MSG_WAITALL))
        if size:
            raise StoreDamaged(self._socket.recv(size, socket.MSG_WAITALL).decode())
        return int(end)

    def lay_down(self, offset: int, content: bytes | memoryview) -> None:
        self.hand_in(offset, content)
        assert self.wait() == offset + len(content)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def replica_settings(**more: Any) -> dict[str, Any]:
    """Of a RunningBroker that follows in a group."""
    return {
        "brokerName": "copied",
        "enableDLegerCommitLog": True,
        "dLegerGroup": "copied",
        "dLegerPeers": "n0-127.0.0.1:1;n1-127.0.0.1:2;n2-127.0.0.1:3",
        "dLegerSelfId": "n0",
        "groupEngine": "sqlite:/nowhere",
        "groupSecretFile": "/nowhere/secret",
        **more,
    }


def main() -> None:
    member.MemberActor = FedMember  # type: ignore[misc,assignment]
    if UNCONFIRMED in os.environ:
        dispatcher.DispatcherActor = LateDispatcher  # type: ignore[misc]
    embedded.main()


if __name__ == "__main__":
    main()
