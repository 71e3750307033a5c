"""Named holds: kept in the ledger, respected by the cleaner."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.relay import Relay
from cometmq.actors.runtime.service import Request
from cometmq.protocol.commands import (
    Command,
    DeleteSegments,
    Done,
    DropHold,
    Hold,
    HoldList,
    HoldsWanted,
    ListHolds,
    PlaceHold,
    SetHolds,
)
from cometmq.protocol.errors import BadRequest, CometError, SystemBusy
from cometmq.protocol.ledger import HoldDropped, HoldPut
from cometmq.protocol.names import check_hold
from cometmq.protocol.wire.channel import Pending
from cometmq.shm.state.identity import read_identity

HOLDS_MAX: Final = 1000
LEASE_MS_MAX: Final = 10 * 365 * 86_400_000


class Holds:
    """Takes the commands on holds.

    A change goes into the ledger first. Once it is kept, the cleaner is told all holds there are,
    and its answer is the client's: nobody is told of a hold that the cleaner does not respect. What
    it is told is what stood here when the change was made: a later one may not be kept yet.

    Each list is numbered, and the cleaner passes over those that come late. It asks for one as long
    as it runs, so that one that was lost is made good.

    Args:
        store: whose identity a hold may name.
        log_begin: as the cleaner has it.
    """

    def __init__(
        self, books: Books, relay: Relay, store: Path, log_begin: Callable[[], int]
    ) -> None:
        self._books = books
        self._book = books.holds
        self._relay = relay
        self._store = store
        self._log_begin = log_begin
        self._lists = 0

    def begin(self) -> None:
        """The cleaner may be waiting: it deletes nothing before it has heard of us."""
        self._tell()

    # --- commands ---

    def on_place_hold(self, command: PlaceHold, request: Request) -> None:
        check_hold(command.name)
        self._check_store(command)
        now_ms = time.time_ns() // 1_000_000
        live = self._book.live(now_ms)
        if len(live) >= HOLDS_MAX and all(hold.name != command.name for hold in live):
            raise SystemBusy(f"there are {len(live)} holds, at most {HOLDS_MAX}")
        self._books.check_room()
        self._relay.expect(request)
        for hold in self._book.ended(now_ms):
            self._books.change(HoldDropped(hold.name))
        begin = max(command.physical_offset, self._log_begin())
        lease_ms = min(command.lease_ms, LEASE_MS_MAX)
        expires_ms = now_ms + lease_ms if lease_ms > 0 else 0
        self._place(Hold(command.name, begin, expires_ms), request)

    def on_drop_hold(self, command: DropHold, request: Request) -> None:
        self._books.check_room()
        self._relay.expect(request)
        if self._book.get(command.name) is not None:
            self._books.change(HoldDropped(command.name), on_disk=True)
        self._answer(request)

    def on_list_holds(self, _command: ListHolds, request: Request) -> None:
        self._relay.expect(request)
        self._answer(request)

    def on_delete_segments(self, command: DeleteSegments, request: Request) -> None:
        """The cleaner keeps what of the ledger is in no file yet: that is not to be in the way."""
        self._relay.expect(request)
        hand_back = partial(self._relay.hand_back, request)
        self._books.snapshots.then(partial(self._relay.ask, command, hand_back))

    def on_holds_wanted(self, _command: HoldsWanted, _request: Request) -> Command:
        self._tell()
        return Done()

    def _check_store(self, command: PlaceHold) -> None:
        if not command.store_id:
            return
        own = read_identity(self._store).store_id
        if command.store_id != own:
            raise BadRequest(
                f"hold {command.name} is for store {command.store_id}, this one is {own}"
            )

    def _place(self, hold: Hold, request: Request) -> None:
        change = HoldPut(hold.name, hold.physical_offset, hold.expires_ms)
        self._books.change(change, on_disk=True)
        self._answer(request, hold)

    # --- the cleaner ---

    def _list(self) -> SetHolds:
        self._lists += 1
        live = self._book.live(time.time_ns() // 1_000_000)
        return SetHolds(self._books.epoch, self._lists, live)

    def _answer(self, request: Request, placed: Hold | None = None) -> None:
        """By what the cleaner says, once what has changed is kept and the cleaner knows it."""
        holds = self._list()

        def when_known(error: CometError | None) -> None:
            if error is None:
                self._relay.ask(holds, partial(self._heard, request, placed))
            else:
                self._relay.fail(request, error)
                self._tell_instead_of(holds)

        self._books.then(when_known)

    def _heard(self, request: Request, placed: Hold | None, done: Pending) -> None:
        """What was deleted before the cleaner heard of a hold cannot be held: it begins with the
        log, and is told as it is."""
        answer = done.answer
        if placed is not None and isinstance(answer, HoldList) and self._is(placed):
            begin = answer.min_physical_offset
            if placed.physical_offset < begin:
                self._place(Hold(placed.name, begin, placed.expires_ms), request)
                self._books.send()
                return
        self._relay.hand_back(request, done)

    def _is(self, hold: Hold) -> bool:
        return self._book.get(hold.name) == hold

    def _tell(self) -> None:
        """The same, where nobody waits for it."""
        holds = self._list()

        def when_known(error: CometError | None) -> None:
            if error is None:
                self._relay.tell(holds)
            else:
                self._tell_instead_of(holds)

        self._books.then(when_known)

    def _tell_instead_of(self, holds: SetHolds) -> None:
        """That list was not told: it was taken back, or may be kept yet."""
        if holds.number == self._lists:  # else there is a later one, which is
            self._tell()
