"""When a disk is too full: by its percentages, and by what is free."""

from __future__ import annotations

import pytest

from cometmq.actors.maintenance.disk_marks import DiskMarks, DiskUse
from cometmq.conf import BrokerSettings

GIB = 1 << 30


def disk(percent: float, free: float) -> DiskUse:
    """So full, with so many GiB free."""
    return DiskUse(int(free * GIB * percent / (100 - percent)), int(free * GIB))


def marks(**settings: object) -> DiskMarks:
    return DiskMarks(BrokerSettings.from_keys(settings))


@pytest.mark.parametrize(
    ("percent", "free", "old_go", "all_go", "refused"),
    [
        (96, 4.6, True, False, False),  # a laptop
        (96, 3.9, True, True, False),
        (96, 1.9, True, True, True),
        (89, 1.9, True, True, False),  # a small volume
        (84, 0.1, True, False, False),
        (74, 0.1, False, False, False),
        (99.9, 4.1, True, False, False),
    ],
)
def test_each_mark(percent: float, free: float, old_go: bool, all_go: bool, refused: bool) -> None:
    found = marks()
    disks = [disk(10, 100), disk(percent, free)]
    assert found.is_over_max_used(disks) is old_go
    assert found.is_too_full(disks) is all_go
    assert found.refuses(disks) is refused


def test_percentages_alone_as_in_rocketmq() -> None:
    found = marks(diskFreeBytesMin=0)
    assert found.is_too_full([disk(85.1, 1_000)])
    assert found.refuses([disk(90.1, 1_000)])
    assert not found.refuses([disk(90, 1_000)])


def test_marks_that_were_raised() -> None:
    found = marks(diskSpaceWarningLevelRatio=99, diskSpaceCleanForciblyRatio=98)
    assert not found.refuses([disk(98.9, 0.5)])
    assert not found.is_too_full([disk(97.9, 0.5)])


def test_the_refusal_names_keys_and_values() -> None:
    text = marks().why_refused([disk(96, 1.5)])
    assert text == (
        "the disk is 96.0 % full, with 1.50 GiB free, over diskSpaceWarningLevelRatio = 90 and "
        "below diskFreeBytesMin = 2147483648: writes are taken again at 85 %, or with 4294967296 "
        "bytes free"
    )
    assert "diskFreeBytesMin" not in marks(diskFreeBytesMin=0).why_refused([disk(96, 1.5)])


def test_what_will_come_back_counts() -> None:
    full = disk(96, 1.5)
    assert full.with_back(5 * GIB).free == int(6.5 * GIB)
    assert full.with_back(10_000 * GIB).used == 0
