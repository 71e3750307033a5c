"""A channel's shortcut: the local connection beside the one by ZeroMQ, if there is one for us.

It is asked for with the first request of a connection, and carries all later ones. Once it has
ended, requests go by the connection again, and with the next one it is asked for again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cometmq.protocol.commands import Command, LineAddress
from cometmq.protocol.errors import BadRequest, CometError, NotConfirmed, NotLocal
from cometmq.protocol.wire.line import Line
from cometmq.protocol.wire.pending import Pending, PendingRequests, Settled
from cometmq.protocol.wire.stream import Payload

log = logging.getLogger(__name__)


class Shortcut:
    """Threads may share it; one at a time receives.

    Always: a request went by the line exactly if `pending.line` is that line. What a line had when
    it ended fails with NotConfirmed: it may have arrived.

    Args:
        name: what error texts call the other side.
        command: asks for a line; None: there is to be none.
        on_line: called when there is one to listen to.
    """

    def __init__(
        self,
        name: str,
        command: Command | None,
        requests: PendingRequests,
        on_line: Callable[[], None],
    ) -> None:
        self.line: Line | None = None
        self.command = command
        self._name = name
        self._requests = requests
        self._on_line = on_line
        self._lock = threading.Lock()  # guards that there is a line
        self._asked = False
        self._closed = False

    # --- to have one ---

    def to_ask(self) -> Command | None:
        """What to ask the other side now, once a connection."""
        if self.line is not None or self._asked:
            return None
        self._asked = True
        return self.command

    def connection_was_lost(self) -> None:
        """With the next one it may be asked for again."""
        self._asked = False

    def take(self, pending: Pending) -> None:
        """The other side has said whether there is one; in the thread that received that."""
        try:
            answer, _ = pending.result()
            self.use(answer)
        except NotConfirmed:
            return  # with the next connection it is asked again
        except CometError as error:
            log.debug("no line to %s: %s", self._name, error)
            self.command = None

    def use(self, answer: Command) -> None:
        """Unless another thread was first: what was sent by a line is answered there.

        Raises NotLocal when the answer leads to none.
        """
        if not isinstance(answer, LineAddress):
            raise NotLocal(f"{self._name} answered {type(answer).__name__}")
        if not answer.is_stream:
            raise NotLocal(f"{self._name} is older: it has no local connections that are streams")
        line = Line(answer.name, answer.uid)
        with self._lock:
            if self.line is not None or self._closed:
                return
            self.line = line
            self._on_line()

    # --- to use it ---

    def send(self, line: Line, pending: Pending, head: bytes, payload: Payload) -> bool:
        """False if it has to go by the connection: the other side is gone, and cannot have read
        it."""
        pending.line = line
        self._requests.add(pending)
        try:
            line.send(head, payload)
        except OSError:
            is_ours = self._requests.take(pending.request_id) is not None
            self.lose(line)
            pending.line = None
            return not is_ours  # else another thread has found the end of the line, and failed it
        return True

    def receive(self, line: Line, timeout_s: float, settled: list[Settled]) -> bool:
        """Whether something came in time. Raises EOFError when the line has ended."""
        try:
            messages = line.receive(timeout_s)
        except (OSError, BadRequest) as error:
            log.warning("the local connection to %s: %s", self._name, error)
            raise EOFError from None
        for head, payload in messages or ():
            self._requests.match(head, payload, settled)
        return messages is not None

    def receive_all(self, line: Line, settled: list[Settled]) -> Line | None:
        """Everything that somebody waits for and that has come; the line, if it has ended. Whoever
        sleeps on the line is woken again by what is left."""
        try:
            while self.receive(line, 0, settled) and self._requests:
                pass
        except EOFError:
            return line
        return None

    # --- its end ---

    def lose(self, line: Line) -> None:
        """It has ended. Not under the channel's lock."""
        with self._lock:
            if self.line is line:
                self.line = None
                self._asked = False
                if not line.answered:
                    self.command = None  # somebody does not want us there
        for pending in self._requests.take_all(lambda each: each.line is line):
            pending.settle(None, (), NotConfirmed(lost_text(self._name)))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            line, self.line = self.line, None
        if line is not None:
            line.shut()


def lost_text(name: str) -> str:
    return f"the connection to {name} was lost before it answered"
