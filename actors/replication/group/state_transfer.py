"""How the books of a master come to a replica that begins with an empty store.

The replica asks for one piece after the other. What gets lost is asked for again; where nothing
comes for too long, the master has gone, and this process ends: the next one asks whoever is master.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from cometmq.actors.replication.core.frames import AnyFrame, Books, WantBooks
from cometmq.actors.replication.group.state_copy import COPY_BYTES_MAX, pack_books, stage_copy
from cometmq.protocol.errors import CometError
from cometmq.shm.state.laid_books import needs_books

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 20
ASK_AGAIN_S: Final = 1.0
GIVE_UP_S: Final = 30.0  # without a piece; a million offsets are packed in 0.1 s
KEEP_S: Final = 60.0  # a copy that is not asked for any more

Send = Callable[[str, AnyFrame, memoryview | None], object]
CallSoon = Callable[[Callable[[], object]], object]
After = Callable[[float, Callable[[], None]], Any]


class _Copy(NamedTuple):
    nonce: int
    content: bytes  # empty: it is being made
    asked_at: float  # time.monotonic()


class StateSender:
    """The master's side: one copy for each replica that asks."""

    def __init__(self, store: Path, send: Send, call_soon: CallSoon) -> None:
        self._store = store
        self._send = send
        self._call_soon = call_soon
        self._copies: dict[str, _Copy] = {}

    def on_want(self, sender: str, frame: WantBooks) -> None:
        now = time.monotonic()
        copy = self._copies.get(sender)
        if copy is None or copy.nonce != frame.nonce:
            self._copies[sender] = _Copy(frame.nonce, b"", now)
            self._make(sender, frame)
        elif copy.content:
            self._copies[sender] = copy._replace(asked_at=now)
            self._give(sender, frame, copy.content)

    def tick(self) -> None:
        """Forget copies that nobody asks for."""
        old = time.monotonic() - KEEP_S
        self._copies = {to: copy for to, copy in self._copies.items() if copy.asked_at > old}

    def _make(self, sender: str, frame: WantBooks) -> None:
        def make() -> None:
            try:
                content = pack_books(self._store)
            except (CometError, OSError) as error:
                log.error("the books cannot be copied for %s: %s", sender, error)
                self._call_soon(lambda: self._copies.pop(sender, None))
            else:
                self._call_soon(lambda: self._made(sender, frame, content))

        threading.Thread(target=make, name="books", daemon=True).start()

    def _made(self, sender: str, frame: WantBooks, content: bytes) -> None:
        copy = self._copies.get(sender)
        if copy is not None and copy.nonce == frame.nonce:
            self._copies[sender] = copy._replace(content=content)
            log.info("%s is given a copy of the books, %d bytes", sender, len(content))
            self._give(sender, frame, content)

    def _give(self, sender: str, frame: WantBooks, content: bytes) -> None:
        piece = memoryview(content)[frame.offset : frame.offset + PIECE_BYTES]
        if piece:
            books = Books(
                frame.group, frame.epoch, frame.nonce, frame.offset, len(piece), len(content)
            )
            self._send(sender, books, piece)


class StateReceiver:
    """The follower's side: one copy, asked for once.

    Args:
        want: what is asked; its offset is put in.
        on_staged: the copy lies beside the store, whole and checked.
        on_failed: it does not come, or is none.
    """

    def __init__(
        self,
        store: Path,
        master: str,
        want: WantBooks,
        *,
        send: Send,
        call_soon: CallSoon,
        after: After,
        on_staged: Callable[[], None],
        on_failed: Callable[[str], object],
    ) -> None:
        self._store = store
        self._master = master
        self._want = want
        self._send = send
        self._call_soon = call_soon
        self._after = after
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._content = bytearray()
        self._done = False
        self._heard_at = time.monotonic()
        self._ask()
        self._look_again()

    def _ask(self) -> None:
        want = self._want
        offset = len(self._content)
        self._send(self._master, WantBooks(want.group, want.epoch, want.nonce, offset), None)

    def _look_again(self) -> None:
        self._after(ASK_AGAIN_S, self._on_time)

    def _on_time(self) -> None:
        if self._done:
            return
        silent_s = time.monotonic() - self._heard_at
        if silent_s > GIVE_UP_S:
            self._on_failed(f"{self._master} has sent none of its books for {silent_s:.0f} s")
            return
        if silent_s >= ASK_AGAIN_S:
            self._ask()
        self._look_again()

    def on_books(self, sender: str, frame: Books, piece: memoryview) -> None:
        expected = (self._master, self._want.nonce, len(self._content))
        if self._done or (sender, frame.nonce, frame.offset) != expected:
            return  # it comes twice
        if not frame.offset + frame.length <= frame.total <= COPY_BYTES_MAX:
            why = f"{sender} sends books of {frame.total} bytes, at most {COPY_BYTES_MAX}"
            self._on_failed(why)
            return
        self._content += piece
        self._heard_at = time.monotonic()
        if len(self._content) < frame.total:
            self._ask()
            return
        self._done = True
        threading.Thread(target=self._stage, name="books", daemon=True).start()

    def _stage(self) -> None:
        try:
            stage_copy(self._store, bytes(self._content))
        except (CometError, OSError) as error:
            why = f"the books of {self._master} cannot be laid down: {error}"
            self._call_soon(lambda: self._on_failed(why))
        else:
            self._call_soon(self._on_staged)


class StateTransfer:
    """Both sides, for the `ha` process of a replica.

    Args:
        group: its name.
        master: of the group, as this replica knows it; "": nobody.
        on_failed: the books do not come; says why, and does not return.
    """

    def __init__(
        self,
        store: Path,
        group: str,
        *,
        send: Send,
        call_soon: CallSoon,
        after: After,
        master: Callable[[], str],
        on_failed: Callable[[str], object],
    ) -> None:
        self._store = store
        self._group = group
        self._send = send
        self._call_soon = call_soon
        self._after = after
        self._master = master
        self._on_failed = on_failed
        self._given = StateSender(store, send, call_soon)
        self._taken: StateReceiver | None = None

    def are_needed(self, begin_at: int) -> bool:
        """Of a store whose log is to begin there, with nothing in it."""
        return needs_books(self._store, begin_at)

    def fetch(self, on_staged: Callable[[], None]) -> None:
        """Have the master's books laid beside this store."""
        master, nonce = self._master(), int.from_bytes(os.urandom(7), "big")
        log.info("this replica begins with an empty store: it asks %s for its books", master)
        self._taken = StateReceiver(
            self._store,
            master,
            WantBooks(self._group, 0, nonce, 0),
            send=self._send,
            call_soon=self._call_soon,
            after=self._after,
            on_staged=on_staged,
            on_failed=self._on_failed,
        )

    def take(self, sender: str, frame: AnyFrame, content: memoryview | None) -> bool:
        """Whether the frame was about books; then that is done."""
        if isinstance(frame, WantBooks):
            self._given.on_want(sender, frame)
            return True
        if isinstance(frame, Books):
            if self._taken is not None and content is not None:
                self._taken.on_books(sender, frame, content)
            return True
        return False

    def tick(self) -> None:
        self._given.tick()
