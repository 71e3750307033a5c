"""Segments that have left the log, on the way to their end in `cometmq.retired/`.

    commitlog/N --> N.held --> N --> N.releasing --> gone
                       |       '--> cometmq.tmp/, used again by the allocator
                       '--> N.forced --> gone

- `N.held`: a process may still use it. Nothing is done to its bytes.
- `N`: nobody uses it, and nobody can any more. The allocator may take it, by a rename.
- `N.releasing`: cut from its end in small steps, so that no single one keeps the disk busy.
- `N.forced`: somebody did not let go in time. It is only unlinked: to cut it would kill who still
  has it mapped. The space comes back when that one lets go, or ends.

Every step is one system call that leaves one of these states, and which state it is stands in the
name: killed anywhere, the next cleaner goes on. A segment is moved out of `commitlog/` durably
before anything else happens to it, since a cut one there would make the store unreadable.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.shm.log.references import References
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import COMMITLOG_DIR, RETIRED_DIR, segment_name

log = logging.getLogger(__name__)

STEP_BYTES: Final = 64 * 1_048_576
FREE, HELD, FORCED, RELEASING = "", ".held", ".forced", ".releasing"


class RetiredSegments:
    """The folder, for its one user, the cleaner.

    Args:
        force_after_s: how long a segment may stay held.
    """

    def __init__(
        self,
        store: Path,
        segment_bytes: int,
        *,
        force_after_s: float,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._log_folder = store / COMMITLOG_DIR
        self._folder = store / RETIRED_DIR
        self._references = References(store, segment_bytes)
        self._force_after_s = force_after_s
        self._step_bytes = step_bytes
        self._held_since: dict[int, float] = {}  # time.monotonic()
        self.forced_count = 0

    def begin(self) -> None:
        """Take over what another cleaner left: all of it is to go."""
        self._folder.mkdir(exist_ok=True)
        sync_folder(self._log_folder)
        sync_folder(self._folder)
        for start in self._in(FREE):
            self._rename(start, FREE, RELEASING)

    def take_in(self, start: int) -> None:
        """Move a segment out of the log. `settle` must follow before the next `step`."""
        name = segment_name(start)
        os.rename(self._log_folder / name, self._folder / f"{name}{HELD}")

    def settle(self) -> None:
        """Make the moves durable."""
        sync_folder(self._folder)
        sync_folder(self._log_folder)

    def step(self, keep: int) -> None:
        """Do one small piece of what there is to do.

        Args:
            keep: how many free segments stay for the allocator.
        """
        for start in self._in(HELD):
            self._look_at_held(start)
        for start in self._in(FORCED):
            self._path(start, FORCED).unlink(missing_ok=True)
        if not self._in(RELEASING):
            for start in self._in(FREE)[keep:][:1]:
                self._rename(start, FREE, RELEASING)
        for start in self._in(RELEASING)[:1]:
            self._shrink(self._path(start, RELEASING))

    def has_work(self, keep: int) -> bool:
        return len(self._in(FREE)) > keep or any(map(self._in, (HELD, FORCED, RELEASING)))

    def _look_at_held(self, start: int) -> None:
        if not self._references.is_used(start):
            self._rename(start, HELD, FREE)
            self._held_since.pop(start, None)
            return
        now = time.monotonic()
        if now - self._held_since.setdefault(start, now) < self._force_after_s:
            return
        log.warning(
            "segment %s is removed by force: %s has not let go of it for %g s; its space comes "
            "back when that process does",
            segment_name(start), self._references.users_of(start), self._force_after_s,
        )  # fmt: skip
        self._rename(start, HELD, FORCED)
        del self._held_since[start]
        self.forced_count += 1

    def _shrink(self, path: Path) -> None:
        size = path.stat().st_size
        if size > self._step_bytes:
            os.truncate(path, (size - 1) // self._step_bytes * self._step_bytes)
        else:
            path.unlink()

    def _rename(self, start: int, before: str, after: str) -> None:
        """Where the allocator was faster there is nothing to do."""
        try:
            os.rename(self._path(start, before), self._path(start, after))
        except FileNotFoundError:
            if before != FREE:
                raise

    def _path(self, start: int, state: str) -> Path:
        return self._folder / f"{segment_name(start)}{state}"

    def _in(self, state: str) -> list[int]:
        """Segments in a state, oldest first."""
        return sorted(start for start, found in self._states() if found == state)

    def _states(self) -> Iterator[tuple[int, str]]:
        for name in os.listdir(self._folder):
            digits, dot, suffix = name.partition(".")
            if digits.isascii() and digits.isdigit():
                yield int(digits), dot + suffix

    def used_bytes(self) -> int:
        """Disk space that will come back by itself."""
        total = 0
        for start, state in self._states():
            try:
                total += self._path(start, state).stat().st_blocks * 512
            except FileNotFoundError:  # the allocator has it
                continue
        return total

    def counts(self) -> dict[str, int]:
        """Segments by state."""
        return {
            "held_segments": len(self._in(HELD)),
            "free_segments": len(self._in(FREE)),
            "releasing_segments": len(self._in(RELEASING)),
            "forced_segments": self.forced_count,
        }
