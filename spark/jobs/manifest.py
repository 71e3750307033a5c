"""ARCHIVE_V1: what lies where in an archive, and how each segment's entry gets there once.

    <root>/v1/topic=<escaped>/dt=YYYY-MM-DD/<broker>-<segment>.parquet
    <root>/v1/topic=_small/dt=.../...     topics with less than 1 % of their segment share a file
    <root>/v1/_raw/<broker>-<segment>.bin what in the segment is no record: damage, the blank
    <root>/v1/_manifest/<broker>/<segment>.json

Readers go by the manifest alone: a file that no entry names does not exist.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote

import msgspec

from cometmq.protocol.errors import CometError
from cometmq.shm.os.durable import sync_folder, write_beside
from cometmq.shm.os.files import segment_name

VERSION: Final = 1
FOLDER: Final = "v1"
MANIFESTS: Final = "_manifest"
RAW: Final = "_raw"
SMALL: Final = "_small"
LOCK: Final = "_lock"
TMP: Final = ".tmp"
TMP_AGE_S: Final = 86_400
NAME_MAX: Final = 180  # characters of an escaped name

# Column in the file, the kernel's column, Arrow's type.
COLUMNS: Final = (
    ("broker", "broker", "string"),
    ("topic", "topic", "string"),
    ("queue_id", "queue_id", "int32"),
    ("queue_offset", "queue_offset", "int64"),
    ("physical_offset", "physical_offset", "int64"),
    ("record_version", "record_version", "int32"),
    ("flag", "flag", "int32"),
    ("sys_flag", "sys_flag", "int32"),
    ("born_ts", "born_ts", "timestamp"),
    ("store_ts", "store_ts", "timestamp"),
    ("born_host", "born_host_raw", "binary"),
    ("store_host", "store_host_raw", "binary"),
    ("reconsume_times", "reconsume_times", "int32"),
    ("prepared_txn_offset", "prepared_txn_offset", "int64"),
    ("body_crc", "body_crc", "int32"),
    ("body", "body_raw", "binary"),
    ("properties_raw", "properties_raw", "binary"),
    ("keys", "keys", "string"),
    ("tags", "tags", "string"),
    ("unique_key", "unique_key", "string"),
    ("record_raw", "record_raw", "binary"),
)


class ArchiveError(CometError):
    """An archive that cannot be read or written as it is; the text names the file."""

    code = 9041


class ArchivedFile(msgspec.Struct, frozen=True):
    path: str  # below the root
    rows: int
    size_bytes: int
    sha256: str
    min_store_ms: int
    max_store_ms: int


class ArchivedQueue(msgspec.Struct, frozen=True):
    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    count: int
    size_bytes: int


class RawStretch(msgspec.Struct, frozen=True):
    """Bytes of the segment that are no record; zeros at the end are left out."""

    physical_offset: int
    size_bytes: int  # of the stretch
    kept_bytes: int  # in the side file
    at: int  # in the side file
    reason: str


class Entry(msgspec.Struct, frozen=True):
    """One segment of one broker's log."""

    version: int
    broker: str
    store_id: str
    begin: int  # physical offsets
    end: int
    queue_segment_bytes: int
    records: int
    crc32: int  # of the whole segment
    files: list[ArchivedFile]
    queues: list[ArchivedQueue]
    raw_path: str
    raw: list[RawStretch]
    damaged: int  # stretches that are neither records nor the blank at the end

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def local_root(text: str | Path) -> Path:
    """A folder; file:// may stand in front. Raises ArchiveError for other places."""
    plain = str(text).removeprefix("file://")
    if "://" in plain:
        raise ArchiveError(f"{text}: archives lie in folders, object stores are not there yet")
    return Path(plain).absolute()


def escaped(name: str) -> str:
    """A broker's or topic's name as part of a file's; always the same, never two the same."""
    text = quote(name, safe="")
    if len(text) <= NAME_MAX and not text.startswith("_"):
        return text
    return f"{text[:NAME_MAX].lstrip('_')}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def entry_path(root: Path, broker: str, begin: int) -> Path:
    return root / FOLDER / MANIFESTS / escaped(broker) / f"{segment_name(begin)}.json"


def inside(root: Path, path: str) -> Path:
    """Where a file of an entry lies. Raises ArchiveError where that leads out of the archive."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not path.startswith(f"{FOLDER}/"):
        raise ArchiveError(f"{root}: a manifest names the file {path!r}")
    return root / parts


def entries(root: Path, broker: str = "") -> list[Entry]:
    """Of one broker or all, in the order of their logs. Raises ArchiveError."""
    folder = root / FOLDER / MANIFESTS
    pattern = f"{escaped(broker)}/*.json" if broker else "*/*.json"
    found = [_load(path) for path in sorted(folder.glob(pattern))]
    return sorted(found, key=lambda entry: (entry.broker, entry.begin))


def _load(path: Path) -> Entry:
    try:
        entry = msgspec.json.decode(path.read_bytes(), type=Entry)
    except msgspec.DecodeError as error:
        raise ArchiveError(f"{path}: {error}") from None
    if entry.version != VERSION:
        raise ArchiveError(f"{path}: version {entry.version}, this program knows {VERSION}")
    if not 0 <= entry.begin < entry.end or entry.end - entry.begin > 1 << 40:
        raise ArchiveError(f"{path}: a segment from {entry.begin} to {entry.end}")
    return entry


def commit(root: Path, entry: Entry) -> bool:
    """Make the segment part of the archive; False if it was already. Durable when it returns.

    The entry appears whole or not at all, and is never replaced.
    """
    path = entry_path(root, entry.broker, entry.begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = write_beside(path, msgspec.json.format(msgspec.json.encode(entry)), several=True)
    try:
        try:
            os.link(made, path)
        except FileExistsError:
            return False
    finally:
        made.unlink(missing_ok=True)
    for folder in (path.parent, path.parent.parent, root / FOLDER):
        sync_folder(folder)
    return True


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One job at a time writes to an archive. Raises ArchiveError."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with (root / FOLDER / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArchiveError(f"{root}: another job writes to this archive") from None
        yield


def sweep(root: Path) -> int:
    """Remove what jobs that were killed left behind a day ago or longer; the number of files."""
    swept = 0
    for path in (root / FOLDER).rglob(f"*{TMP}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > TMP_AGE_S:
                path.unlink()
                swept += 1
    return swept


def arrow_schema() -> Any:
    """The pyarrow.Schema of the files."""
    import pyarrow as pa  # type: ignore[import-untyped]

    kinds = {
        "string": pa.string(),
        "binary": pa.binary(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    return pa.schema([pa.field(name, kinds[kind]) for name, _, kind in COLUMNS])
