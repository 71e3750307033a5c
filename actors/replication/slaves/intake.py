"""How a master's frames come to the log of its slave: through the inbox, or while it sleeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cometmq.actors.runtime.inbox import SocketInbox
from cometmq.shm.kernel.store import COPY_CLOSED, COPY_MORE, LogCopy


class Intake:
    """Of one actor, in whose thread all is called.

    Args:
        in_sleep: frames are laid down, published and woken for natively, where the inbox sleeps.
            Not for who has more to do for each of them.
        on_come: something has come, and why it is not laid down (COPY_): COPY_MORE, where it is;
            None: nobody has tried.
        on_lost: the connection is lost, and why.
        call_soon: has a call made in the actor's thread.
    """

    def __init__(
        self,
        inbox: SocketInbox,
        copy: LogCopy,
        *,
        in_sleep: bool,
        on_come: Callable[[int | None], object],
        on_lost: Callable[[str], None],
        call_soon: Callable[[Callable[[], object]], object],
    ) -> None:
        self._inbox = inbox
        self._copy = copy
        self._in_sleep = in_sleep
        self._on_come = on_come
        self._on_lost = on_lost
        self._call_soon = call_soon
        self._fd = -1  # that is listened to
        self._frames = 0  # of the copy, that were told of

    def listen(self, fd: int) -> None:
        """Take what comes there."""
        self._fd, self._frames = fd, self._copy.frames
        if self._in_sleep:
            self._inbox.sleep_in(self._sleep)
        else:
            self._inbox.listen_to(fd)

    def stop(self) -> None:
        """Take nothing."""
        if self._fd >= 0:
            self._inbox.sleep_in(None)
            self._inbox.forget(self._fd)
            self._fd = -1

    def on_readable(self, source: object) -> None:
        """The inbox tells of a source, which may be another one."""
        if source != self._fd:
            return
        try:
            count = self._copy.receive(self._fd)
        except OSError as error:
            self._fail(error)
            return
        if count == 0:
            self._end(COPY_CLOSED)
        elif count > 0:
            self._on_come(None)

    def _sleep(self, descriptor: int, timeout_s: float) -> None:
        """Whatever is out of the ordinary is done by the actor, and nothing is taken before."""
        try:
            what = self._copy.follow(self._fd, descriptor, timeout_s)
        except Exception as error:
            self._later(partial(self._fail, error))
            return
        if what != COPY_MORE:
            self._later(partial(self._end, what))
        elif self._copy.frames != self._frames:
            self._frames = self._copy.frames
            self._on_come(COPY_MORE)

    def _later(self, action: Callable[[], None]) -> None:
        """Unless it has been told to stop by then."""
        fd = self._fd

        def act() -> None:
            if self._fd == fd:
                self._inbox.sleep_in(self._sleep)
                action()

        self._inbox.sleep_in(None)
        self._call_soon(act)

    def _end(self, what: int) -> None:
        if what == COPY_CLOSED:
            self._on_lost("has closed the connection")
        else:
            self._on_come(what)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._on_lost(f"is lost: {error.strerror}")
        else:
            self._on_lost("is left: what it has sent could not be taken")
            raise error
