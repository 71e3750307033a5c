"""Queues and index follow the log's beginning, whatever the disk says in between."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cometmq.actors.maintenance import following
from cometmq.actors.maintenance.following import Following
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.os.files import segment_name

ENTRIES = 4  # of a segment
SEGMENT = ENTRIES * CONSUME_QUEUE_UNIT.size
RECORD = 100


def write_queue(store: Path, queue_id: int, segments: int) -> Path:
    """Full segments whose entries point at one record after the other."""
    folder = store / "consumequeue" / "t" / str(queue_id)
    folder.mkdir(parents=True)
    for number in range(segments):
        units = [
            CONSUME_QUEUE_UNIT.pack(
                physical_offset=(number * ENTRIES + each) * RECORD, size=RECORD, tags_code=0
            )
            for each in range(ENTRIES)
        ]
        (folder / segment_name(number * SEGMENT)).write_bytes(b"".join(units))
    return folder


class Clock:
    """Calls what is to be called later, when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def after(self, _seconds: float, action: Callable[[], None]) -> None:
        self.calls.append(action)

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def follower(store: Path, clock: Clock) -> Following:
    return Following(store, queue_segment_bytes=SEGMENT, pause_s=0.1, after=clock.after)


@pytest.mark.parametrize("failing", range(3))
def test_a_queue_that_cannot_be_cut_holds_up_nobody(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are cut; it is tried again in the next round, without a restart."""
    folders = [write_queue(tmp_path, queue_id, segments=5) for queue_id in range(3)]
    unlink, clock = Path.unlink, Clock()
    fails = True

    def unlink_or_fail(path: Path, missing_ok: bool = False) -> None:
        if fails and path.parent == folders[failing]:
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_or_fail)
    derived = follower(tmp_path, clock)
    log_min = 2 * ENTRIES * RECORD
    derived.follow(log_min)
    clock.run()
    assert [len(list(folder.iterdir())) for folder in folders] == [
        5 if queue_id == failing else 3 for queue_id in range(3)
    ]
    assert "Input/output error" in caplog.text
    fails = False
    derived.follow(log_min)  # the next round: the log begins where it began
    clock.run()
    assert [len(list(folder.iterdir())) for folder in folders] == [3, 3, 3]
    derived.follow(2 * log_min)
    clock.run()
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1, 1]


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), KeyError("unforeseen")]
)
@pytest.mark.parametrize("name", ["list_served_queues", "delete_expired"])
def test_the_chain_goes_on_after_any_step_that_failed(
    name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_queue(tmp_path, 0, segments=5)
    real, clock = getattr(following, name), Clock()

    def failing_queues(_store: Path) -> Iterator[tuple[str, int]]:
        raise error
        yield

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(
        following, name, failing_queues if name == "list_served_queues" else failing
    )
    derived = follower(tmp_path, clock)
    derived.follow(ENTRIES * RECORD)
    clock.run()
    monkeypatch.setattr(following, name, real)
    derived.follow(2 * ENTRIES * RECORD)
    clock.run()
    assert len(list(folder.iterdir())) == 3
