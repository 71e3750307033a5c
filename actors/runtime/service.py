"""The service actor, which every actor of the family is: commands, handled and answered."""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NoReturn

import pykka

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.access import FAMILY, Doorman
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.inbox import SocketInbox
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.loop import LoopActor, Timer
from cometmq.actors.runtime.request import Payload, Request
from cometmq.protocol.commands import (
    COMMANDS,
    Command,
    Done,
    Finish,
    GetLine,
    GetStatistics,
    LineAddress,
    Ping,
    Pong,
    Statistics,
)
from cometmq.protocol.errors import BadRequest, NotLocal, ShuttingDown, UnknownCommand
from cometmq.protocol.version import VERSION
from cometmq.shm.os.processes import boot_id

log = logging.getLogger(__name__)

# The request is None where the process itself asks.
Handler = Callable[[Any, Any], Command | None]

SLICE_S: Final = 0.01  # for commands of clients, before the family, doorbell and timers are heard


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_HANDLER_NAMES: Final[dict[type[Command], str]] = {
    kind: f"on_{_snake(kind.__name__)}" for kind in COMMANDS
}


@functools.cache
def handled_by(owner: type) -> dict[type[Command], str]:
    """Which commands instances of a class handle, and by which methods."""
    return {kind: name for kind, name in _HANDLER_NAMES.items() if hasattr(owner, name)}


@functools.cache
def doorman_of(role: str, *owners: type) -> Doorman:
    """Of an actor of that role that is made of those. It has no state."""
    return Doorman(role, {kind for owner in owners for kind in handled_by(owner)})


class ServiceActor(LoopActor):
    """A command `XyzAbc` is handled by `on_xyz_abc(command, request)`.

    The handler returns the answer, or None if it answers later through `request.reply`. A
    CometError that it raises becomes the answer. Any other exception is answered as an error of
    ours, logged with its traceback, and the actor lives on.

    Writes, wakes on: see each actor.

    Args:
        bind: where it listens from the start: (address, whether only the family may come there).
            What became of them (a port of 0 or * is chosen) stands in `addresses`, in order.
        limits: of the connections of clients, if not the defaults.
    """

    part_types: ClassVar[tuple[type, ...]] = ()  # what `parts` are made of
    # On a slave's actor: the actor that has this role on a master. Commands that only the master's
    # actor handles are admitted, and passed to `refuse`.
    stands_in_for: ClassVar[type[ServiceActor] | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Created here, so that all forks share it.
        doorman_of(cls.role, cls, *cls.part_types, *cls.masters_types())

    @classmethod
    def masters_types(cls) -> tuple[type, ...]:
        """Return the classes whose commands are admitted only to be refused."""
        master = cls.stands_in_for
        return () if master is None else (master, *master.part_types)

    def __init__(
        self,
        *,
        bind: Sequence[tuple[str, bool]] = (),
        limits: ConnectionLimits | None = None,
    ) -> None:
        super().__init__()
        self._owners = (self, *self.parts())
        self._handlers: dict[type[Command], Handler] = {}  # of the commands that have come
        kinds: list[type] = [type(owner) for owner in self._owners]
        self.inbox.doorman = doorman_of(self.role, *kinds, *self.masters_types())
        self.settled = False  # it has come to its end in order
        self.addresses = tuple(
            self.inbox.bind(endpoint, internal=internal, limits=limits)
            for endpoint, internal in bind
        )

    @classmethod
    def of_family(cls, family: Any, bind: Sequence[tuple[str, bool]]) -> pykka.ActorRef[Any]:
        """Start it as one of a broker's processes; `family` is a Family."""
        return cls.start(family, bind=bind)

    # --- for subclasses ---

    def parts(self) -> Sequence[object]:
        """What takes commands in this actor's stead, by handlers of the same names. They are there
        before the actor is."""
        return ()

    def on_requests(self, requests: list[Request]) -> None:
        """Everything the sockets held. The default handles one after the other, and what a slice
        of time does not suffice for after the family, the doorbell and timers have been heard."""
        gone_by = time.monotonic() + SLICE_S
        for done, request in enumerate(requests, 1):
            self.handle(request)
            if done < len(requests) and time.monotonic() > gone_by:
                self.inbox.hold_back(requests[done:])
                return

    def statistics(self) -> meters.Figures:
        return {}

    def settle(self) -> None:
        """Bring the work to its orderly end; called on Finish, before it is answered."""

    # --- commands ---

    def handle(self, request: Request) -> None:
        """Carry out one request and answer it."""
        command = request.command
        self.carry_out(request, self._handler_of(type(command)), command, request)

    def carry_out(
        self, request: Request, action: Callable[..., Command | None], *arguments: Any
    ) -> bool:
        """Answer a request with what the action returns, or with why it failed; then False. With
        None the action has answered, or will."""
        try:
            answer = action(*arguments)
        except Exception as caught:
            kind = type(request.command).__name__
            error = explained(caught, "%s failed in %s", kind, self.role)
            log.debug("%s refused: %s", kind, error)
            request.fail(error)
            return False
        if answer is not None:
            request.reply(answer)
        return True

    def answer_within(self, command: Command) -> Command | None:
        """Asked from within the process, where an answer is what the handler returns."""
        if command.access.later:
            raise UnknownCommand(f"{type(command).__name__} is taken through a socket only")
        self.inbox.doorman.admit(command, FAMILY)
        return self._handler_of(type(command))(command, None)

    def _handler_of(self, kind: type[Command]) -> Handler:
        """It is looked for when its first command comes: to look at all of them would make a fork's
        own of the pages that they lie in."""
        found = self._handlers.get(kind)
        if found is None:
            found = self._handlers[kind] = self.find_handler(kind)
        return found

    def find_handler(self, kind: type[Command]) -> Handler:
        """Of a command that the doorman lets in."""
        for owner in reversed(self._owners):
            kind_of_owner: type = type(owner)
            name = handled_by(kind_of_owner).get(kind)
            if name is not None:
                found: Handler = getattr(owner, name)
                return found
        return self.refuse

    def refuse(self, command: Command, _request: Any) -> NoReturn:
        """Answer a command that only the master's actor handles."""
        raise UnknownCommand(f"{self.role} does not take {type(command).__name__}")

    # --- lines ---

    def listen_for_lines(self, address: str) -> None:
        """Also take clients of this machine without ZeroMQ between.

        Args:
            address: where the family comes to this actor.
        """
        self.inbox.listen_for_lines(address.removeprefix("ipc://@") + "-line")

    def line_for(self, command: GetLine) -> Command:
        """The answer to a client that wants a line. Raises NotLocal."""
        if not command.boot_id or command.boot_id != boot_id():
            raise NotLocal("the broker is on another machine")
        if not command.is_stream:
            raise NotLocal("local connections are streams since 0.2.0, and this client is older")
        lines = self.inbox.lines
        if lines is None or not lines.is_open:
            raise NotLocal("the broker takes no more lines")
        return LineAddress(lines.name, os.getuid(), is_stream=True)

    # --- what every actor answers ---

    def on_ping(self, _command: Ping, _request: Request) -> Command:
        return Pong(self.role, os.getpid(), VERSION)

    def on_get_statistics(self, _command: GetStatistics, _request: Request) -> Command:
        return Statistics(self.role, meters.values_of(self.statistics() | self.inbox.statistics()))

    def on_finish(self, _command: Finish, _request: Request) -> Command:
        try:
            self.settle()
            self.settled = True
        finally:
            self.stop_once_answered()  # also unsettled: nobody waits for a second try
        return Done()

    def stop_once_answered(self) -> None:
        """The command that ends this actor is being handled, and will be answered."""
        self.stop()

    def on_stop(self) -> None:
        """pykka's hook, in the actor's thread, after the last message."""
        for request in self.inbox.take_rest():
            request.fail(ShuttingDown(f"the {self.role} is shutting down"))
        self.inbox.close()

    def on_failure(self, kind: Any, error: Any, trace: Any) -> None:
        """pykka's hook: an exception that nobody was there to be told of ends the actor."""
        log.critical("%s dies of an exception", self.role, exc_info=(kind, error, trace))
        self.inbox.close()


__all__ = ["BadRequest", "Payload", "Request", "ServiceActor", "SocketInbox", "Timer"]
