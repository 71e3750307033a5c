"""Held requests, which wait for an event until their deadline: the one way to hold any."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, Generic, TypeVar

from cometmq.actors.runtime.loop import Timer
from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import CometError, SystemBusy

NEVER: Final = math.inf  # a deadline that does not come
EXPIRED_MAX: Final = 256  # requests that expire at once; the actor receives others in between

K = TypeVar("K", bound=Hashable)


class HeldRequest(Generic[K]):
    """A request that waits. Subclasses add what they need to answer it.

    Args:
        key: what it waits for; several requests may share it.
        deadline: time.monotonic(), or NEVER.
        name: who asks; at most one request of a key has this name. "" is no name.
    """

    __slots__ = ("deadline", "key", "name", "request")

    def __init__(self, key: K, request: Request, deadline: float, name: str = "") -> None:
        self.key = key
        self.request = request
        self.deadline = deadline
        self.name = name


H = TypeVar("H", bound=HeldRequest[Any])


class HeldRequests(Generic[K, H]):
    """Held requests, found by key, by name and by deadline. Time is passed in.

    Args:
        what: the requests, in the text of an error.
        limit: requests held at once.
        sender_limit: those of one connection; half of `limit` if not given, so that no client takes
            the places of all others.
    """

    def __init__(self, what: str, limit: int, sender_limit: int | None = None) -> None:
        self._what = what
        self._limit = limit
        self._sender_limit = max(1, limit // 2) if sender_limit is None else sender_limit
        self._by_key: dict[K, dict[H, None]] = {}
        self._by_name: dict[tuple[K, str], H] = {}
        self._by_sender: dict[bytes, int] = {}
        self._due: list[tuple[float, int, H]] = []  # a heap; entries of released requests remain
        self._numbers = itertools.count()  # order of arrival
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[H]:
        """Iterate over a copy, so that requests may be released meanwhile."""
        return iter([held for of_key in self._by_key.values() for held in of_key])

    @property
    def keys(self) -> list[K]:
        return list(self._by_key)

    def of(self, key: K) -> list[H]:
        """Return the requests of a key in order of arrival."""
        return list(self._by_key.get(key, ()))

    def named(self, key: K, name: str) -> H | None:
        return self._by_name.get((key, name))

    def holds(self, held: H) -> bool:
        return held in self._by_key.get(held.key, ())

    def has_room(self, request: Request) -> bool:
        """Return whether this request can be held."""
        count = self._by_sender.get(request.sender, 0)
        return self._count < self._limit and count < self._sender_limit

    def check_room(self, request: Request) -> None:
        """Raise SystemBusy if this request cannot be held."""
        if not self.has_room(request):
            count = self._by_sender.get(request.sender, 0)
            raise SystemBusy(
                f"{self._what}: {self._count} wait already, at most {self._limit}, {count} of them "
                f"of this connection, at most {self._sender_limit}: try again"
            )

    def add(self, held: H) -> None:
        """Hold a request. Raises SystemBusy."""
        sender = held.request.sender
        count = self._by_sender.get(sender, 0)
        if self._count >= self._limit or count >= self._sender_limit:
            self.check_room(held.request)
        self._by_sender[sender] = count + 1
        self._count += 1
        of_key = self._by_key.get(held.key)
        if of_key is None:
            self._by_key[held.key] = {held: None}
        else:
            of_key[held] = None
        if held.name:
            self._by_name[held.key, held.name] = held
        if held.deadline != NEVER:
            heapq.heappush(self._due, (held.deadline, next(self._numbers), held))

    def release(self, held: H) -> Request:
        """Stop holding a request and return it; the caller answers it."""
        self._count -= 1
        of_key = self._by_key[held.key]
        del of_key[held]
        if not of_key:
            del self._by_key[held.key]
        if held.name and self._by_name.get((held.key, held.name)) is held:
            del self._by_name[held.key, held.name]
        sender = held.request.sender
        count = self._by_sender[sender]
        if count > 1:
            self._by_sender[sender] = count - 1
        else:
            del self._by_sender[sender]
        if len(self._due) > 2 * self._count + 64:
            self._due = [each for each in self._due if self.holds(each[2])]
            heapq.heapify(self._due)
        return held.request

    def release_key(self, key: K) -> list[H]:
        """Stop holding all requests of a key and return them in order of arrival."""
        found = self.of(key)
        for held in found:
            self.release(held)
        return found

    @property
    def first(self) -> H | None:
        """Return the request with the next deadline; of equal deadlines, the earliest request."""
        while self._due and not self.holds(self._due[0][2]):
            heapq.heappop(self._due)
        return self._due[0][2] if self._due else None

    def release_expired(self, now: float, count_max: int) -> list[H]:
        """Stop holding the requests whose deadline has passed, at most so many, and return them."""
        found: list[H] = []
        while len(found) < count_max:
            first = self.first
            if first is None or first.deadline > now:
                break
            self.release(first)
            found.append(first)
        return found

    def fail_all(self, error: CometError) -> None:
        """Answer all requests with an error, and hold none."""
        for held in self:
            self.release(held).fail(error)


class TimedRequests(HeldRequests[K, H]):
    """Held requests of an actor, which ends those whose deadline passes.

    Args:
        expire: returns the answer to a request whose deadline has passed, and which is not held any
            more; None: it is answered otherwise. What this raises becomes the answer.
    """

    def __init__(
        self,
        actor: ServiceActor,
        what: str,
        limit: int,
        expire: Callable[[H], Command | None],
        sender_limit: int | None = None,
    ) -> None:
        super().__init__(what, limit, sender_limit)
        self._actor = actor
        self._expire = expire
        self._timer: Timer | None = None  # for the next deadline: most requests are answered before

    def add(self, held: H) -> None:
        super().add(held)
        if held.deadline != NEVER and (self._timer is None or held.deadline < self._timer.due):
            self._set_timer(held.deadline)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, deadline - time.monotonic())
        self._timer = self._actor.after(delay_s, self._expire_due)

    def _expire_due(self) -> None:
        self._timer = None
        for held in self.release_expired(time.monotonic(), EXPIRED_MAX):
            self._actor.carry_out(held.request, self._expire, held)
        first = self.first
        if first is not None and (self._timer is None or first.deadline < self._timer.due):
            self._set_timer(first.deadline)
