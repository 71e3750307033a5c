"""A replica whose disk is full: its promises wait, and nothing else is lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cometmq.actors.replication.core.promises import Promises
from cometmq.actors.replication.group import free_space as room_module
from cometmq.actors.replication.group.free_space import FreeSpace
from cometmq.actors.replication.group.promises_file import PromisesFile
from cometmq.protocol.errors import DiskFull


class SmallDisk(PromisesFile):
    """Has room, or has none."""

    has_room = True

    def keep(self, promises: Promises) -> None:
        if not self.has_room:
            raise DiskFull("cometmq.promises: No space left on device")
        super().keep(promises)


def promises(epoch: int) -> Promises:
    return Promises(group="g", replica="n0", store_uuid="uuid", promised_epoch=epoch)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "RETRY_S", 0.0)


def test_a_promise_waits_for_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, kept = SmallDisk(tmp_path), []
    room = FreeSpace(
        tmp_path, file, on_kept=lambda: kept.append(file.load("g", "n0").promised_epoch)
    )
    assert room.keep(promises(1))
    file.has_room = False
    with caplog.at_level(logging.WARNING):
        assert not room.keep(promises(2))
        for _ in range(3):
            room.look(False)  # the log has room: of what it had reserved
    assert (room.is_stuck, kept, file.load("g", "n0").promised_epoch) == (True, [], 1)
    assert "its disk is full" in room.why
    assert "cometmq.promises" in room.why
    (said,) = caplog.records
    assert "bytes are free" in said.getMessage()
    file.has_room = True
    room.look(None)  # another run: nobody has looked at the disk yet
    assert (room.is_stuck, kept, room.why != "") == (False, [2], True)
    room.look(False)
    assert (room.why, kept) == ("", [2])


def test_a_promise_behind_one_that_has_waited_waits_as_well(tmp_path: Path) -> None:
    """What the core does next, as soon as the first is kept."""
    file = SmallDisk(tmp_path)
    answers: list[bool] = []

    def next_one() -> None:
        file.has_room = False
        answers.append(room.keep(promises(3)))

    room = FreeSpace(tmp_path, file, on_kept=next_one)
    file.has_room = False
    assert not room.keep(promises(2))
    file.has_room = True
    room.look(False)
    assert (answers, room.is_stuck, bool(room.why)) == ([False], True, True)
    file.has_room = True
    room._on_kept = lambda: None
    room.look(False)
    assert (room.is_stuck, room.why) == (False, "")
    assert file.load("g", "n0").promised_epoch == 3


def test_a_log_without_room_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = FreeSpace(tmp_path, PromisesFile(tmp_path), on_kept=lambda: None)
    with caplog.at_level(logging.WARNING):
        room.look(None)
        assert not room.why
        room.look(True)
        room.look(True)
        room.look(None)
        assert str(tmp_path) in room.why
        assert not room.is_stuck
        room.look(False)
    assert not room.why
    assert len(caplog.records) == 2
