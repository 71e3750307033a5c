"""Books on their way from a master to a replica with an empty store, piece by piece."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patient

from cometmq.actors.replication.core.frames import (
    AnyFrame,
    Beat,
    Books,
    decode_frame,
    encode_frame,
)
from cometmq.actors.replication.group import state_transfer as books_line
from cometmq.actors.replication.group.state_transfer import StateTransfer
from cometmq.shm.live.control import CONTROL_FILE, ControlFile
from cometmq.shm.state.laid_books import place_books

WAIT_S = patient(60)
PIECE = 1  # bytes: the books of a master without any are few

Wire = deque[tuple[str, bytes, bytes | None]]


class Failed(Exception):
    """The process would end."""


class Side:
    """One replica's `ha` process, as far as books concern it. Calls are made in the test's thread;
    timers when the test says so."""

    def __init__(
        self, name: str, store: Path, wire: deque[tuple[str, bytes, bytes | None]]
    ) -> None:
        self.name = name
        self.calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self.timers: list[Callable[[], None]] = []
        self.staged = False
        store.mkdir(exist_ok=True)
        self.line = StateTransfer(
            store,
            "orders",
            send=self._send,
            call_soon=self.calls.put,
            after=lambda _delay_s, action: self.timers.append(action),
            master=lambda: "n0",
            on_failed=self._fail,
        )
        self._wire = wire

    def _send(self, to: str, frame: AnyFrame, content: memoryview | None) -> None:
        copied = None if content is None else bytes(content)
        self._wire.append((self.name, encode_frame(frame), copied))
        assert to != self.name

    def _fail(self, why: str) -> None:
        raise Failed(why)

    def take(self, sender: str, frame: AnyFrame, content: bytes | None = None) -> bool:
        view = None if content is None else memoryview(content)
        return self.line.take(sender, frame, view)

    def stage(self) -> None:
        self.staged = True

    def run_timers(self) -> None:
        due, self.timers = self.timers, []
        for action in due:
            action()


class Pair:
    """n0, whose books are wanted, and n1, which wants them."""

    def __init__(self, folder: Path) -> None:
        self.wire: Wire = deque()
        self.store = folder / "n1"
        self.master = Side("n0", folder / "n0", self.wire)
        self.follower = Side("n1", self.store, self.wire)
        ControlFile.create(folder / "n0" / CONTROL_FILE, {})
        self.lost = 0
        self.passed: list[AnyFrame] = []

    def carry(self, lose: Callable[[int], bool] = lambda _number: False) -> None:
        """Whatever is on the wire, until nothing is; some of it is lost, by its number."""
        while self.wire:
            sender, head, content = self.wire.popleft()
            frame = decode_frame(head)
            if lose(len(self.passed) + self.lost):
                self.lost += 1
                continue
            self.passed.append(frame)
            to = self.follower if sender == "n0" else self.master
            assert to.take(sender, frame, content)

    def until_staged(self, lose: Callable[[int], bool] = lambda _number: False) -> None:
        """Where nothing comes by itself, the follower's timer does."""
        while not self.follower.staged:
            self.carry(lose)
            try:
                self.master.calls.get(timeout=0.05)()
                continue
            except queue.Empty:
                pass
            try:
                self.follower.calls.get(timeout=0.05)()
            except queue.Empty:
                self.follower.run_timers()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(books_line, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(books_line, "ASK_AGAIN_S", 0.0)
    return Pair(tmp_path)


def pieces(pair: Pair) -> list[Books]:
    return [frame for frame in pair.passed if isinstance(frame, Books)]


def test_books_come_in_pieces(pair: Pair) -> None:
    assert pair.follower.line.are_needed(0)
    pair.follower.line.fetch(pair.follower.stage)
    pair.until_staged()
    found = pieces(pair)
    assert len(found) > 3
    assert [frame.offset for frame in found] == [PIECE * index for index in range(len(found))]
    place_books(pair.store, 0)
    assert not pair.follower.line.are_needed(0)


@pytest.mark.parametrize("every", [3, 4, 5])
def test_what_is_lost_is_asked_for_again(pair: Pair, every: int) -> None:
    pair.follower.line.fetch(pair.follower.stage)
    pair.until_staged(lambda number: number % every == 1)
    assert pair.lost > 2
    place_books(pair.store, 0)
    assert not pair.follower.line.are_needed(0)


def test_pieces_that_come_twice_or_from_elsewhere_change_nothing(pair: Pair) -> None:
    follower = pair.follower
    follower.line.fetch(follower.stage)
    pair.carry()
    pair.master.calls.get(timeout=WAIT_S)()
    sender, head, content = pair.wire[0]
    first = decode_frame(head)
    assert isinstance(first, Books)
    assert content is not None
    for _ in range(3):
        assert follower.take(sender, first, content)
    other = Books("orders", 0, first.nonce + 1, 16, 16, first.total)
    assert follower.take("n0", other, bytes(16))
    stranger = Books("orders", 0, first.nonce, 16, 16, first.total)
    assert follower.take("n2", stranger, bytes(16))
    pair.until_staged()
    place_books(pair.store, 0)


def test_books_that_nobody_asked_for(pair: Pair) -> None:
    assert pair.follower.take("n0", Books("orders", 0, 7, 0, 16, 16), bytes(16))
    assert not pair.follower.take("n0", Beat("orders", 1, 7, 0, 0, 1))
    assert not pair.wire


def test_more_than_may_come_is_refused_unread(pair: Pair) -> None:
    follower = pair.follower
    follower.line.fetch(follower.stage)
    (_, head, _) = pair.wire.popleft()
    nonce = decode_frame(head).nonce
    with pytest.raises(Failed, match="at most"):
        follower.take("n0", Books("orders", 0, nonce, 0, 16, 1 << 40), bytes(16))


def test_what_is_no_copy_ends_the_attempt(pair: Pair) -> None:
    follower = pair.follower
    follower.line.fetch(follower.stage)
    (_, head, _) = pair.wire.popleft()
    nonce = decode_frame(head).nonce
    follower.take("n0", Books("orders", 0, nonce, 0, 16, 16), bytes(16))
    with pytest.raises(Failed, match="cannot be laid down"):
        follower.calls.get(timeout=WAIT_S)()
    assert follower.line.are_needed(0)


def test_a_master_that_is_gone_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.follower.line.fetch(pair.follower.stage)
    pair.wire.clear()
    pair.follower.run_timers()
    assert len(pair.wire) == 1  # it is asked again
    monkeypatch.setattr(books_line, "GIVE_UP_S", 0.0)
    with pytest.raises(Failed, match="has sent none of its books"):
        pair.follower.run_timers()


def test_copies_that_nobody_asks_for_are_forgotten(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.follower.line.fetch(pair.follower.stage)
    pair.carry()
    pair.master.calls.get(timeout=WAIT_S)()
    monkeypatch.setattr(books_line, "KEEP_S", -1.0)
    pair.master.line.tick()
    pair.until_staged()  # another one is made, of the same name
    place_books(pair.store, 0)
