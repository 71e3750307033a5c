"""What an actor's inbox looks at, and what it is told to look at no longer."""

from __future__ import annotations

import fcntl
import os

from cometmq.actors.runtime.inbox import SocketInbox

FAR = 300  # Python keeps the small numbers, so each of them is always the same object


def test_a_descriptor_is_forgotten_by_its_number() -> None:
    inbox = SocketInbox()
    reader, writer = os.pipe()
    far = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, FAR)
    try:
        before = list(inbox._poll_list)
        inbox.listen_to(int(str(far)))
        os.write(writer, b"x")
        inbox.forget(int(str(far)))
        assert inbox._poll_list == before
        assert not inbox.is_listening_to(far)
    finally:
        inbox.close()
        for descriptor in (reader, writer, far):
            os.close(descriptor)
