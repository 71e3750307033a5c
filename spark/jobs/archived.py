"""What lies in an archive: as a DataFrame, and as the segments that it was made of."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cometmq.shm.kernel import codec
from cometmq.shm.kernel.columns import RECORD_FIELDS, put_records
from cometmq.spark.jobs import manifest
from cometmq.spark.jobs.manifest import ArchiveError, Entry
from cometmq.spark.jobs.running import Progress, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_ROWS: Final = 65_536
_IN_FILE: Final = {kernel: name for name, kernel, _ in manifest.COLUMNS}
FIELDS: Final = tuple(_IN_FILE[name] for name in RECORD_FIELDS)


class Verified(msgspec.Struct, frozen=True):
    """What was reread."""

    archive: str
    segments: int
    records: int
    file_bytes: int
    wrong: list[str]  # what does not hold, a line each


def archive_table(
    spark: SparkSession, archive: str | Path, *, broker: str = "", topics: Sequence[str] = ()
) -> DataFrame:
    """All archived records, or those of some topics, from the files that the manifest names."""
    root = manifest.local_root(archive)
    wanted = {manifest.escaped(topic) for topic in topics} | {manifest.SMALL}
    paths = [
        str(manifest.inside(root, file.path))
        for entry in manifest.entries(root, broker)
        for file in entry.files
        if not topics or file.path.split("/")[1].removeprefix("topic=") in wanted
    ]
    if not paths:
        raise ArchiveError(f"{root}: nothing of that is in the archive")
    found = spark.read.parquet(*paths)
    return found.where(found.topic.isin(list(topics))) if topics else found


# --- segments ---


def fill_segment(root: Path, entry: Entry, memory: mmap.mmap) -> None:
    """Write a segment's bytes into zeroed memory. Raises ArchiveError where they come out other."""
    from pyarrow import lib as arrow  # type: ignore[import-untyped]

    rows = 0
    for file in entry.files:
        path = manifest.inside(root, file.path)
        _check_digest(path, file.sha256)
        try:
            rows += _fill_from(path, entry, memory)
        except (ValueError, arrow.ArrowException) as error:
            raise ArchiveError(f"{path}: {error}") from None
    _fill_raw(root, entry, memory)
    found = codec.crc32(memory)
    if rows != entry.records or found != entry.crc32:
        raise ArchiveError(
            f"{root}: segment {entry.begin} of {entry.broker}: {entry.records} records and CRC "
            f"{entry.crc32:#010x} were archived, {rows} and {found:#010x} came out"
        )


def _check_digest(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ArchiveError(f"{path}: the manifest names it, and it is not there") from None
    if found != expected:
        raise ArchiveError(f"{path}: SHA-256 {found}, the manifest says {expected}")


def _fill_from(path: Path, entry: Entry, memory: mmap.mmap) -> int:
    from pyarrow import parquet

    rows = 0
    with parquet.ParquetFile(path) as file:
        missing = set(FIELDS) - set(file.schema_arrow.names)
        if missing:
            raise ValueError(f"there is no column {', '.join(sorted(missing))}")
        for batch in file.iter_batches(BATCH_ROWS, columns=list(FIELDS)):
            columns = [_buffers(batch.column(name)) for name in FIELDS]
            put_records(memory, entry.begin, batch.num_rows, columns)
            rows += batch.num_rows
    return rows


def _buffers(array: Any) -> tuple[int, Any, Any, Any]:
    """As put_records takes them."""
    found = array.buffers()
    if len(found) == 3:
        return array.offset, found[0] if array.null_count else None, found[1], found[2]
    if array.null_count:
        raise ValueError("a number is null")
    return array.offset, None, None, found[1]


def _fill_raw(root: Path, entry: Entry, memory: mmap.mmap) -> None:
    if not entry.raw:
        return
    with manifest.inside(root, entry.raw_path).open("rb") as file:
        for stretch in entry.raw:
            low = stretch.physical_offset - entry.begin
            if not 0 <= low <= low + stretch.kept_bytes <= entry.end - entry.begin:
                raise ArchiveError(f"{root}: segment {entry.begin} has bytes outside of itself")
            file.seek(stretch.at)
            memory[low : low + stretch.kept_bytes] = file.read(stretch.kept_bytes)


def verify_entry(root: Path, entry: Entry) -> None:
    """Put the segment together again, and compare. Raises ArchiveError."""
    with tempfile.TemporaryFile(prefix="cometmq-verify-") as file:
        file.truncate(entry.end - entry.begin)
        with mmap.mmap(file.fileno(), entry.end - entry.begin) as memory:
            fill_segment(root, entry, memory)


@dataclass(frozen=True)
class VerifyTask:
    root: str
    entry: bytes  # JSON


def _verify_task(task: VerifyTask) -> bytes:
    try:
        verify_entry(Path(task.root), msgspec.json.decode(task.entry, type=Entry))
    except (ArchiveError, OSError) as error:
        return str(error).encode()
    return b""


def verify_archive(
    spark: SparkSession,
    archive: str | Path,
    *,
    broker: str = "",
    progress: Progress | None = None,
) -> Verified:
    """Reread every file: digests, and each segment byte by byte by its CRC."""
    root = manifest.local_root(archive)
    found = manifest.entries(root, broker)
    tasks = [VerifyTask(str(root), msgspec.json.encode(entry)) for entry in found]
    answers = run_tasks(spark, tasks, _verify_task, progress)
    return Verified(
        str(root), len(found), sum(entry.records for entry in found),
        sum(entry.size_bytes for entry in found), [text.decode() for text in answers if text],
    )  # fmt: skip


def contiguous(found: Sequence[Entry], what: str) -> Iterator[Entry]:
    """The entries of one broker, without a hole. Raises ArchiveError that names it."""
    after = -1
    for entry in found:
        if entry.broker != found[0].broker:
            raise ArchiveError(
                f"{what} has segments of {found[0].broker} and {entry.broker}: name one (--broker)"
            )
        if after >= 0 and entry.begin != after:
            raise ArchiveError(f"{what} lacks the segments [{after}, {entry.begin})")
        after = entry.end
        yield entry
