"""Propagation of topics to one other process, until it has confirmed them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime.service import ServiceActor, Timer
from cometmq.protocol.commands import Command, TopicList, TopicsKnown
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel, Pending

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class NewsLine:
    """Tells one other process the topics, page by page, until it has them all.

    One page is under way at a time; what changes meanwhile is told after it. Which page is next
    follows from how far the process says it has come. Nothing here blocks: all methods run in the
    actor's thread, and so do `page`, `command` and `heard`.

    Args:
        run, version: where the process is taken to be at first. It corrects that.
        timeout_s: for an answer; then the channel is given up and a new one taken.
        page: the page that follows that version of that run.
        command: what tells a page; None: nothing is to be told now.
        heard: called when `confirmed` or `trouble` has changed.
        without: what does not work while the process does not answer, for the log.
    """

    def __init__(
        self,
        actor: ServiceActor,
        name: str,
        endpoint: str,
        *,
        run: int,
        version: int,
        timeout_s: float,
        page: Callable[[int, int], TopicList],
        command: Callable[[TopicList], Command | None],
        heard: Callable[[Command | None], None],
        without: str,
    ) -> None:
        self.name = name
        self.confirmed = -1  # the version that the process has
        self.trouble = ""  # why the last attempt failed; empty: it did not
        self._actor, self._endpoint, self._timeout_s = actor, endpoint, timeout_s
        self._known = TopicsKnown(run, version)  # where the process is taken to be
        self._page, self._command, self._heard = page, command, heard
        self._without = without
        self._channel = Channel(endpoint, name)
        self._attempt = 0  # answers to an earlier one are too late
        self._timeout: Timer | None = None  # of the message under way
        self._retry: Timer | None = None
        self._again = False

    def send(self) -> None:
        """Tell what is new, after the page under way if there is one."""
        if self._timeout is not None:
            self._again = True
            return
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        page = self._page(self._known.run, self._known.version)
        command = self._command(page)
        if command is None:
            return
        self._again = False
        self._attempt += 1
        attempt = self._attempt
        self._timeout = self._actor.after(self._timeout_s, self._give_up)

        def on_done(pending: Pending) -> None:  # in the channel's thread
            self._actor.call_soon(partial(self._done, attempt, page, command, pending))

        self._channel.request(command, on_done=on_done)

    def ask_last(self, command: Command) -> Pending | None:
        """Send a last word, to be waited for with `wait`; None if it never heard anything."""
        return self._channel.request(command) if self.confirmed >= 0 else None

    def wait(self, pending: Pending, timeout_s: float) -> bool:
        return self._channel.wait(pending, timeout_s)

    def complaint(self) -> str:
        return f"{self.name} has not confirmed it: {self.trouble or 'no answer yet'}"

    def close(self) -> None:
        self._channel.close()

    def _done(self, attempt: int, page: TopicList, command: Command, pending: Pending) -> None:
        if attempt != self._attempt or self._timeout is None:
            return
        self._timeout.cancel()
        self._timeout = None
        try:
            answer, _ = pending.result()
        except CometError as error:
            self._failed(str(error))
            return
        if not isinstance(answer, TopicsKnown):
            self._failed(f"it answered {type(answer).__name__}: is it of another version?")
            return
        self._known = answer
        taken = (answer.run, answer.version) == (page.run, page.version)
        if not taken and page.since == 0:
            self._failed("it has not taken the topics from their beginning")
            return
        if self.trouble:
            log.warning("%s answers, and has the topics", self.name)
        self.trouble = ""
        # A version above the page's is of a page that somebody else has sent, and proves nothing.
        is_ours = answer.run == page.run and answer.version <= page.version
        self.confirmed = answer.version if is_ours else 0
        self._heard(command if taken and page.complete else None)
        if self._again or not (taken and page.complete):
            self.send()

    def _give_up(self) -> None:
        """No answer. A new line, so that nothing which waits in the old one is sent later."""
        self._attempt += 1
        self._timeout = None
        self._channel.close()
        self._failed(f"no answer from {self.name} within {self._timeout_s:g} s")
        self._channel = Channel(self._endpoint, self.name)  # should this fail: it is tried again

    def _failed(self, trouble: str) -> None:
        if trouble != self.trouble:
            text = "%s has not confirmed the topics: %s; %s. It is tried again until it answers"
            log.warning(text, self.name, trouble, self._without)
        self.trouble = trouble
        self._retry = self._actor.after(RETRY_S, self.send)
        self._heard(None)
