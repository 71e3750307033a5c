"""Drives the core: one event after the other, and what each has done carried out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from cometmq.actors.replication.core.actions import Action
from cometmq.actors.replication.core.replica import Replica
from cometmq.actors.replication.engines.engine import now_s
from cometmq.protocol.errors import DiskFull, StoreError

PAUSE_S: Final = 0.2  # without an event: then the core hears first what time it is

Event = Callable[..., Sequence[Action]]


class Driver:
    """Each action comes to its end before the next is begun, and all of them before another event.

    What the core or an action cannot get over ends the process: a core that was left in the middle
    of an event knows nothing that can be relied on.

    Args:
        carry_out: does what an action says; False: its end is awaited, and then `go_on` is called.
        on_idle: called once everything that waited is done.
        on_fault: ends the process: of the store, or of the system.
    """

    def __init__(
        self,
        core: Replica,
        carry_out: Callable[[Action], bool],
        on_idle: Callable[[], None],
        on_fault: Callable[[str], NoReturn],
    ) -> None:
        self._core = core
        self._carry_out = carry_out
        self._on_idle = on_idle
        self._on_fault = on_fault
        self._actions: deque[Action] = deque()
        self._events: deque[tuple[Event, tuple[Any, ...]]] = deque()
        self._heard_at = 0.0
        self.is_busy = False  # an action has not come to its end

    def event(self, event: Event, *arguments: Any) -> None:
        """Now, or once what is under way is done."""
        if self.is_busy:
            self._events.append((event, arguments))
            return
        self._wholly(self._hand_in, event, arguments)

    def event_first(self, event: Event, *arguments: Any) -> None:
        """Before all that waits: what has come of the action that is under way."""
        self._events.appendleft((event, arguments))

    def go_on(self) -> None:
        """The action that was under way has come to its end."""
        self.is_busy = False
        self._wholly(self._do_rest)
        if not self.is_busy:
            self._on_idle()

    def _do_rest(self) -> None:
        self._do_all()
        while self._events and not self.is_busy:
            event, arguments = self._events.popleft()
            self._hand_in(event, arguments)

    def _wholly(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except AssertionError:
            raise
        except (StoreError, DiskFull, OSError) as error:
            self._on_fault(str(error))
        except Exception as error:
            raise AssertionError("the core was left in the middle of an event") from error

    def _hand_in(self, event: Event, arguments: tuple[Any, ...]) -> None:
        assert not self._actions, self._actions
        now = now_s()
        if now > self._heard_at + PAUSE_S and event != self._core.start:
            self._actions.extend(self._core.tick(now))
            self._do_all()
            if self.is_busy:
                self._events.appendleft((event, arguments))
                return
        self._heard_at = now
        self._actions.extend(event(*arguments))
        self._do_all()

    def _do_all(self) -> None:
        while self._actions:
            self.is_busy = True
            if not self._carry_out(self._actions.popleft()):
                return  # `go_on` is called later, or was called meanwhile
            self.is_busy = False
