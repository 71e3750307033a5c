"""Lines for the demo: of the files it is pointed at, or of what a machine has lying about."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

FILE_BYTES_MAX: Final = 16 * 1_048_576
LINES_MAX: Final = 200_000
LINES_ENOUGH: Final = 2_000
LINE_BYTES_MAX: Final = 16_384
FILTER_TAGS: Final = 3
MACHINE_LOGS: Final = Path("/var/log")
_LEVEL: Final = re.compile(
    rb"\b(TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL)\b", re.IGNORECASE
)
_LEVEL_WITHIN: Final = 100  # bytes from the beginning


@dataclass(frozen=True)
class Text:
    """Lines, the tag of each (its level, or else its file's name), and where they come from."""

    lines: list[bytes]
    tags: list[str]
    files: list[str]

    def filter_tags(self) -> list[str]:
        """A few tags that not every line has: the commonest but one, and those after it."""
        common = [tag for tag, _ in Counter(self.tags).most_common(FILTER_TAGS + 1)]
        return common[1:] or common


def collect(paths: Sequence[str]) -> Text:
    """Read the files, and all files of the folders. Raises ClickException when there is no line."""
    text = Text([], [], [])
    if paths:
        _read(text, (file for path in paths for file in _files(Path(path))))
    else:
        _read(text, _files(MACHINE_LOGS) if MACHINE_LOGS.is_dir() else ())
        if len(text.lines) < LINES_ENOUGH:
            _read(text, sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    if not text.lines:
        raise click.ClickException(f"no line of text in {', '.join(paths) or 'what was found'}")
    return text


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise click.ClickException(f"{path}: there is no such file or folder")
    if path.is_dir():
        yield from sorted(entry for entry in path.rglob("*") if entry.is_file())
    else:
        yield path


def _read(text: Text, files: Iterable[Path]) -> None:
    for file in files:
        if len(text.lines) >= LINES_MAX:
            return
        lines = _lines_of(file)[: LINES_MAX - len(text.lines)]
        if not lines:
            continue
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem)[:60]
        text.files.append(str(file))
        text.lines.extend(lines)
        text.tags.extend(_tag_of(line, name) for line in lines)


def _lines_of(file: Path) -> list[bytes]:
    """Its lines, without empty ones; none of a file that is no text or may not be read."""
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX)
    except OSError:
        return []
    if b"\0" in data:
        return []
    return [line[:LINE_BYTES_MAX] for line in data.split(b"\n") if line]


def _tag_of(line: bytes, name: str) -> str:
    level = _LEVEL.search(line, 0, _LEVEL_WITHIN)
    if level is None:
        return name
    found = level[1].decode().upper()
    return "WARN" if found == "WARNING" else found
