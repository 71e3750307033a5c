"""How full a disk is, and which of the marks it is over."""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from cometmq.conf import BrokerSettings


class DiskUse(msgspec.Struct, frozen=True):
    """Of one disk, for whoever may not use root's reserve."""

    used: int  # bytes
    free: int

    @classmethod
    def of(cls, folder: str) -> DiskUse:
        found = os.statvfs(folder)
        used, free = found.f_blocks - found.f_bfree, found.f_bavail
        return cls(used * found.f_frsize, free * found.f_frsize)

    @property
    def percent(self) -> float:
        return 100 * self.used / max(1, self.used + self.free)

    def with_back(self, back_bytes: int) -> DiskUse:
        """As it will be when so many bytes have come back."""
        return DiskUse(max(0, self.used - back_bytes), self.free + min(back_bytes, self.used))

    def __str__(self) -> str:
        return f"{self.percent:.1f} % full, with {self.free / (1 << 30):.2f} GiB free"


class DiskMarks:
    """RocketMQ's marks are percentages. Of a large disk these are many bytes, so the two that cost
    messages count only where there is little free as well (`diskFreeBytesMin`).

    RocketMQ rounds percentages up and asks for more than a mark, which comes to the same.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._free_min = settings.disk_free_bytes_min

    def is_over_max_used(self, disks: Iterable[DiskUse]) -> bool:
        """Whether old segments go at any hour."""
        return any(
            disk.percent > self._settings.disk_max_used_space_ratio_percent for disk in disks
        )

    def is_too_full(self, disks: Iterable[DiskUse]) -> bool:
        """Whether segments go that are not old."""
        ratio = self._settings.disk_space_clean_forcibly_ratio_percent
        return any(self._is_over(disk, ratio, 2 * self._free_min) for disk in disks)

    def refuses(self, disks: Iterable[DiskUse]) -> bool:
        """Whether writes are refused, until it is no longer too full."""
        ratio = self._settings.disk_space_warning_level_ratio_percent
        return any(self._is_over(disk, ratio, self._free_min) for disk in disks)

    @staticmethod
    def _is_over(disk: DiskUse, percent: int, free_min: int) -> bool:
        return disk.percent > percent and (not free_min or disk.free < free_min)

    def why_refused(self, disks: Iterable[DiskUse]) -> str:
        """For who sends: which settings say so, and when it is over."""
        settings, fullest = self._settings, max(disks, key=lambda disk: disk.percent)
        over = (
            f"over diskSpaceWarningLevelRatio = {settings.disk_space_warning_level_ratio_percent}"
        )
        below = f"at {settings.disk_space_clean_forcibly_ratio_percent} %"
        if self._free_min:
            over += f" and below diskFreeBytesMin = {self._free_min}"
            below += f", or with {2 * self._free_min} bytes free"
        return f"the disk is {fullest}, {over}: writes are taken again {below}"
