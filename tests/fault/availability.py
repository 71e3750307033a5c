"""How long a broker was not there, by measuring: bounds in rules are for the time that it was.

with Availability(lambda: roles_of(rig.broker), history):      # pings these, and notes gaps
    ...
away = intervals(ops)                          # where it was away, or was being broken
late_ns = up_ns(away, due_ns, done_ns)         # of that time, what it was up
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from family import RunningBroker
from fault.history import History, Op, now_ns

from cometmq.actors.launch.addresses import address_of
from cometmq.protocol.commands import Ping
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel

ROLES: Final = ("commitlog", "dispatcher", "scheduler", "coordinator")
CLIENTS: Final = ("producer", "consumer", "members")  # what is done to them breaks no broker
EVERY_S: Final = 0.05
GAP_NS: Final = 150_000_000  # a longer one between two rounds of answers is noted
PING_S: Final = 1.0


class Availability:
    """A thread that asks the processes that deliver, one after the other, whether they are there.

    Args:
        addresses: of those that are there now, maybe others each time; none: nobody is there.
    """

    def __init__(self, addresses: Callable[[], Sequence[str]], history: History) -> None:
        self._addresses, self._history = addresses, history
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="availability")
        self._lines: dict[str, Channel] = {}

    def __enter__(self) -> Availability:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        good_ns = now_ns()  # when the last round of answers began that all were given in
        try:
            while not self._over.wait(EVERY_S):
                began_ns = now_ns()
                if self._all_answer():
                    if now_ns() - good_ns > GAP_NS:
                        self._note(good_ns)
                    good_ns = began_ns
            if now_ns() - good_ns > GAP_NS:
                self._note(good_ns)
        finally:
            self._use([])

    def _note(self, since_ns: int) -> None:
        op = Op("availability", "info", "away", now_ns(), since_ns=since_ns)
        self._history.write([op])

    def _all_answer(self) -> bool:
        try:
            addresses = self._addresses()
            self._use(addresses)
            for line in self._lines.values():
                line.ask(Ping(), timeout_s=PING_S)
        except CometError:  # no answer
            return False
        return bool(addresses)

    def _use(self, addresses: Sequence[str]) -> None:
        if [*self._lines] != [*addresses]:
            for line in self._lines.values():
                line.close()
            self._lines = {address: Channel(address) for address in addresses}


def roles_of(broker: RunningBroker) -> list[str]:
    """None of a broker that is not ready yet."""
    ready = getattr(broker, "ready", None)
    return [address_of(ready.token, role) for role in ROLES] if ready else []


Interval = tuple[int, int]  # t_ns


def intervals(ops: Sequence[Op]) -> list[Interval]:
    """When the broker was away, or was being broken; disjoint, in order. `ops` by time."""
    found = [(op.since_ns, op.t_ns) for op in ops if op.f == "away"]
    broken_ns: int | None = None
    for op in ops:
        if op.f in ("fault", "power_cut") and op.value.split()[1] not in CLIENTS:
            broken_ns = op.t_ns if broken_ns is None else broken_ns
        elif op.f == "healed" and broken_ns is not None:
            found.append((broken_ns, op.t_ns))
            broken_ns = None
    if broken_ns is not None:
        found.append((broken_ns, 2**62))
    return merged(found)


def merged(found: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def up_ns(away: Sequence[Interval], begin: int, end: int) -> int:
    """Of the time from `begin` to `end`, what it was there."""
    up = max(0, end - begin)
    at = bisect_right(away, (begin, 2**63)) - 1
    for first, last in away[max(0, at) :]:
        if first >= end:
            break
        up -= max(0, min(last, end) - max(first, begin))
    return up


class Clock:
    """The system's clock by t_ns, from what was written down with "healed"."""

    def __init__(self, ops: Sequence[Op]) -> None:
        looks = [(op.t_ns, op.due_ms) for op in ops if op.f == "healed"]
        assert looks, "nobody has written down the time"
        self._times = [t_ns for t_ns, _ in looks]
        self._shifts = [due_ms * 10**6 - t_ns for t_ns, due_ms in looks]

    def t_ns(self, ms: int) -> int:
        """Of a time of the system's clock. It may have been adjusted by a little meanwhile."""
        guess = ms * 10**6 - self._shifts[0]
        at = max(0, bisect_right(self._times, guess) - 1)
        return ms * 10**6 - self._shifts[at]
