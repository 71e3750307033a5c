"""What lies in a store while a broker works in it. No tests here.

A file that is listed may be gone when it is looked at: a segment in the making moves to its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The folder and all below it, each with its status (of a link: its own), but for those that
    have gone meanwhile."""
    yield folder, folder.lstat()
    for at, folders, files in os.walk(folder):
        for path in (Path(at, name) for name in (*folders, *files)):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            yield path, status
