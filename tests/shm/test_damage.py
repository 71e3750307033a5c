"""What was found in a store is kept, and keeps its replica from starting."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.os import durable
from cometmq.shm.state.damage import (
    DAMAGED_FILE,
    TEXT_BYTES_MAX,
    check_not_damaged,
    note_damage,
    noted_damage,
)


def test_the_first_damage_is_kept(tmp_path: Path) -> None:
    check_not_damaged(tmp_path)
    assert noted_damage(tmp_path) == ""
    note_damage(tmp_path, "a segment: damaged at 7")
    note_damage(tmp_path, "another one")
    assert noted_damage(tmp_path) == "a segment: damaged at 7"
    with pytest.raises(StoreDamaged, match=f"damaged at 7.*{DAMAGED_FILE}.*empty one"):
        check_not_damaged(tmp_path)
    (tmp_path / DAMAGED_FILE).unlink()
    check_not_damaged(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 100_000])
def test_whatever_is_in_the_file_it_is_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / DAMAGED_FILE).write_bytes(content)
    assert 0 < len(noted_damage(tmp_path)) <= TEXT_BYTES_MAX
    with pytest.raises(StoreDamaged):
        check_not_damaged(tmp_path)


def test_a_disk_that_takes_nothing_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_beside", fails)
    note_damage(tmp_path, "a segment")
    assert "could not be noted" in caplog.text
    assert noted_damage(tmp_path) == ""
