"""What a start looks at before it changes anything: reasons to refuse a store.

Reads only. Each of these is met again later by the process that it concerns; but by then the marks
of a run stand in the store, and the next start would have to recover what was in order.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ConfigError, StoreDamaged, StoreError, StoreNotOurs
from cometmq.shm.derived.consume_queue import list_queues
from cometmq.shm.derived.queue_check import StoreFiles, files_not_ours
from cometmq.shm.os.files import COMMITLOG_DIR, CONFIG_DIR, CONSUME_QUEUE_DIR, Checkpoint
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.holds import holds_file, load_holds
from cometmq.shm.state.identity import read_identity
from cometmq.shm.state.ledger_mark import read_mark
from cometmq.shm.state.tables import ConsumerOffsetTable, SubscriptionGroupTable, TopicTable

CONFIG_FILES: Final[dict[str, Any]] = {
    "topics.json": TopicTable,
    "subscriptionGroup.json": SubscriptionGroupTable,
    "consumerOffset.json": ConsumerOffsetTable,
}

SIZE_KEYS: Final = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue")
LOOKED_AT_MAX: Final = 1_000  # files


def check_store(files: StoreFiles) -> None:
    """Raises what a broker would refuse it with: StoreNotOurs, StoreDamaged, OSError."""
    store = files.store
    check_sizes(files)
    files.log_starts()
    for key in list_queues(store):
        files_not_ours(files, *key)  # a file that was cut off is mended, and refuses nothing
    Checkpoint(store)
    read_identity(store)
    load_holds(store, holds_file(store))
    read_mark(store)
    for name, kind in CONFIG_FILES.items():
        ConfigFile[Any](store / CONFIG_DIR / name, kind).check()


def check_sizes(files: StoreFiles) -> None:
    """Raise StoreNotOurs where a store's segments all have other sizes than the settings say."""
    wanted = dict(zip(SIZE_KEYS, (files.segment_bytes, files.queue_segment_bytes), strict=True))
    for (key, size), (folder, there) in zip(
        wanted.items(), _segment_sizes(files.store).items(), strict=True
    ):
        if there and size not in there:
            found = _most(there)
            raise StoreNotOurs(
                f"{key} = {size}, but the segments in {files.store / folder} have {found} bytes: "
                f"set it to {found}, or leave it out, and the store's own is taken"
            )


def sizes_there(store: Path) -> dict[str, int]:
    """What a store's segments are, by the settings of that: for who was told nothing else.

    What is not clear is not in it: there are none, or they differ from what the last broker had, as
    where a file was cut off.
    """
    try:
        there = map(_most, _segment_sizes(store).values())
        found = dict(zip(SIZE_KEYS, there, strict=True))
        known = read_identity(store)
    except (OSError, StoreDamaged):
        return {}  # the start says what it is
    last = dict(zip(SIZE_KEYS, (known.segment_bytes, known.queue_segment_bytes), strict=True))
    return {
        key: size
        for key, size in found.items()
        if size == (last[key] or size) and _may_be_set(key, size)
    }


def _may_be_set(key: str, size: int) -> bool:
    try:
        return BrokerSettings.from_keys({key: size}).as_keys()[key] == size
    except ConfigError:
        return False


def _segment_sizes(store: Path) -> dict[str, Counts[int]]:
    """Of the first files of log and queues: size -> how many have it."""
    log = (path for path in sorted(_listed(store / COMMITLOG_DIR)) if path.is_file())
    queues = (path for path in (store / CONSUME_QUEUE_DIR).rglob("*") if path.is_file())
    return {COMMITLOG_DIR: _counted(log), CONSUME_QUEUE_DIR: _counted(queues)}


def _listed(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _counted(paths: Iterable[Path]) -> Counts[int]:
    sizes = (path.stat().st_size for path in islice(paths, LOOKED_AT_MAX))
    return Counts(size for size in sizes if size)


def _most(sizes: Counts[int]) -> int:
    """The larger of two as frequent ones, since files are cut off; 0 where there are none."""
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def not_usable(store: Path, error: OSError) -> StoreError:
    """What the system does not let this user do with a store, and whose it is."""
    where = error.filename or store
    text = f"{where}: {error.strerror}"
    try:
        owner = Path(store).stat().st_uid
    except OSError:
        return StoreError(text)
    return StoreError(f"{text}; the store belongs to user {owner}, run the broker as that one")
