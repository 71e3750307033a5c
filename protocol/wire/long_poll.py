"""Long polls: commands that the other side holds until there is something to answer.

A client sends each with a deadline. An unanswered one is given up then, and asked again: a lost
answer never silences a client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from cometmq.protocol.commands import Command
from cometmq.protocol.retry import MOST_S, pause_s
from cometmq.protocol.wire.channel import Channel, Pending

LATE_S: Final = 5.0  # extra time for an answer, then it is given up
CONNECT_S: Final = 1.0  # time limit of the connection


def ask_held(
    channel: Channel,
    command: Command,
    held_s: float,
    on_done: Callable[[Pending], None],
    *,
    late_s: float | None = None,
    pump: bool = True,
) -> Pending:
    """Send a command that may be held for `held_s`, and give it up when its answer is late.

    `on_done` is called in any case: with the answer, NotConfirmed when that is lost, or
    NotReachable when nobody was there to send it to. See `Channel.request`.
    """
    return channel.request(
        command,
        on_done=on_done,
        pump=pump,
        timeout_s=held_s + (LATE_S if late_s is None else late_s),
        connect_s=CONNECT_S,
    )


class LongPoll:
    """One command at a time, asked again and again. Used by one thread at a time."""

    __slots__ = ("again_at", "failures", "pending", "sent_at")

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.sent_at = 0.0  # time.monotonic(), as the next one
        self.again_at = 0.0  # when it is to be asked; infinite while it is under way
        self.failures = 0  # in a row

    def ask(
        self,
        channel: Channel,
        command: Command,
        held_s: float,
        on_done: Callable[[Pending], None],
        *,
        late_s: float | None = None,
    ) -> None:
        """Send a command in place of an earlier one; see `ask_held`."""
        if self.pending is not None:
            self.pending.channel.forget(self.pending)
        self.pending = None
        self.sent_at, self.again_at = time.monotonic(), math.inf
        self.pending = ask_held(channel, command, held_s, on_done, late_s=late_s)

    def take(self) -> Pending | None:
        """Return the command once it is settled; None: not yet, or there is none."""
        pending = self.pending
        if pending is None or not pending.done:
            return None
        self.pending = None
        return pending

    def answered(self) -> None:
        """Ask again at once."""
        self.failures = 0
        self.again_at = 0.0

    def failed(self, most_s: float = MOST_S) -> float:
        """Ask again after a pause, which counts from when it was asked; return what is left."""
        self.failures += 1
        self.again_at = self.sent_at + pause_s(self.failures, most_s=most_s)
        return max(0.0, self.again_at - time.monotonic())
