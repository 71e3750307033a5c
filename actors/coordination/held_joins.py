"""JoinGroups that are held until there is news for the member, or it has waited for long enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.actors.tables.group_share import ConsumerGroup
from cometmq.protocol.commands import JoinGroup
from cometmq.protocol.errors import CometError


class _Held:
    """A JoinGroup that waits for news. `timer` is None for one that does not want to wait."""

    __slots__ = ("request", "timer", "version")

    def __init__(self, request: Request, version: int, timer: Timer | None) -> None:
        self.request = request
        self.version = version
        self.timer = timer

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class HeldJoins:
    """One of each member at most; an earlier one is answered in any case.

    Args:
        wait_max_s: no JoinGroup is held for longer.
        is_unkept: whether a group has changes that nobody may be told of yet.
    """

    def __init__(
        self, actor: ServiceActor, wait_max_s: float, is_unkept: Callable[[str], bool]
    ) -> None:
        self._actor = actor
        self._wait_max_s = wait_max_s
        self._is_unkept = is_unkept
        self._held: dict[str, dict[str, _Held]] = {}  # group -> member
        self._overtaken: list[tuple[ConsumerGroup, str, _Held]] = []  # by the member's next one

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, group: ConsumerGroup, command: JoinGroup, request: Request) -> None:
        """Keep the request until the end of the round, or longer if it wants to wait."""
        held_ones = self._held.setdefault(group.name, {})
        earlier = held_ones.pop(command.member, None)
        if earlier is not None:
            self._overtaken.append((group, command.member, earlier))
        wait_s = min(command.wait_ms / 1000, self._wait_max_s)
        timer = None
        if wait_s > 0:
            timer = self._actor.after(wait_s, partial(self._stop, group, command.member, request))
        held_ones[command.member] = _Held(request, command.version, timer)

    def answer(self, group: ConsumerGroup, error: CometError | None = None) -> None:
        """Answer those of a group that wait no longer; with an error, if there is one."""
        for member, held in _take_news(group, self._held.get(group.name, {})):
            if error is None:
                _answer(group, member, held)
            else:
                held.request.fail(error)

    def answer_overtaken(self) -> None:
        overtaken, self._overtaken = self._overtaken, []
        for group, member, held in overtaken:
            if self._is_unkept(group.name):
                self._overtaken.append((group, member, held))
            else:
                _answer(group, member, held)

    def take(self, name: str) -> list[tuple[str, Request]]:
        """All of a group, to be answered by the caller: (member, its request)."""
        held_ones = self._held.pop(name, {})
        for held in held_ones.values():
            held.cancel()
        return [(member, held.request) for member, held in held_ones.items()]

    def end(self, error: CometError) -> None:
        """Whoever waits hears that there will be no news."""
        for name in list(self._held):
            for _, request in self.take(name):
                request.fail(error)

    def _stop(self, group: ConsumerGroup, member: str, request: Request) -> None:
        held = self._held.get(group.name, {}).get(member)
        if held is None or held.request is not request:
            return
        if self._is_unkept(group.name):
            held.timer = None  # it is answered as soon as it may be told
        else:
            del self._held[group.name][member]
            _answer(group, member, held)


def _answer(group: ConsumerGroup, member: str, held: _Held) -> None:
    held.cancel()
    held.request.reply(group.share_of(member))


def _take_news(group: ConsumerGroup, held_ones: dict[str, _Held]) -> list[tuple[str, _Held]]:
    """Take out the JoinGroups that wait no longer: there is news, or no patience."""
    ready = [
        (member, held)
        for member, held in held_ones.items()
        if held.timer is None or member not in group or group.version_of(member) != held.version
    ]
    for member, held in ready:
        del held_ones[member]
        held.cancel()
    return ready
