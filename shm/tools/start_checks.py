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
from cometmq.shm.derived.index_file import list_index_files, read_header
from cometmq.shm.derived.other_queues import list_served_queues
from cometmq.shm.derived.queue_check import StoreFiles, files_not_ours, find_ends
from cometmq.shm.derived.timer_files import TIMER_LOG_DIR, WHEEL_FILE
from cometmq.shm.live.control import CONTROL_FILE
from cometmq.shm.live.queue_table import QUEUES_BEFORE_FILE, QUEUES_FILE
from cometmq.shm.log.cutting import CUT_FILE
from cometmq.shm.os.files import (
    ABORT_FILE,
    CHECKPOINT_FILE,
    COMMITLOG_DIR,
    CONFIG_DIR,
    CONSUME_QUEUE_DIR,
    INDEX_DIR,
    Checkpoint,
)
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.holds import holds_file, load_holds
from cometmq.shm.state.identity import read_identity
from cometmq.shm.state.ledger_mark import LEDGER_FILE, read_mark
from cometmq.shm.state.tables import ConsumerOffsetTable, SubscriptionGroupTable, TopicTable

CONFIG_FILES: Final[dict[str, Any]] = {
    "topics.json": TopicTable,
    "subscriptionGroup.json": SubscriptionGroupTable,
    "consumerOffset.json": ConsumerOffsetTable,
}

SIZE_KEYS: Final = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue")
ROCKSDB_FILE: Final = "CURRENT"  # every RocksDB folder has it
ROCKSDB_CONFIGS: Final = {
    "topics": "topics.json",
    "subscriptionGroups": "subscriptionGroup.json",
    "consumerOffsets": "consumerOffset.json",
}
OFFSETS_FILE: Final = "consumerOffset.json"
#: Files that belong to a log, and have to be removed before a new log begins.
MADE_OF_THE_LOG: Final = (
    CHECKPOINT_FILE, CONSUME_QUEUE_DIR, INDEX_DIR, TIMER_LOG_DIR, WHEEL_FILE, ABORT_FILE,
    CONTROL_FILE, QUEUES_FILE, QUEUES_BEFORE_FILE, LEDGER_FILE, CONFIG_DIR,
)  # fmt: skip
NOT_OF_THE_LOG: Final = ("topics.json", "subscriptionGroup.json")
LOOKED_AT_MAX: Final = 1_000  # files


def check_store(files: StoreFiles, *, is_copy: bool = False) -> None:
    """Raise the error with which a broker would refuse the store: StoreNotOurs, StoreDamaged,
    OSError.

    Args:
        is_copy: the store belongs to a slave or to a replica of a group: its files in config/ may
            be ahead of its log.
    """
    store = files.store
    check_sizes(files)
    check_log_is_there(files, is_copy=is_copy)
    for key in list_served_queues(store):
        files_not_ours(files, *key)  # a file that was cut off is mended, and refuses nothing
    Checkpoint(store)
    read_identity(store)
    load_holds(store, holds_file(store))
    read_mark(store)
    for name, kind in CONFIG_FILES.items():
        ConfigFile[Any](store / CONFIG_DIR / name, kind).check()


def check_kind(store: Path) -> None:
    """Raise StoreNotOurs for a store that RocketMQ wrote in DLedger mode or with RocksDB: its log,
    queues or configuration are not in the files that CometMQ reads."""
    for folder in sorted(store.glob("dledger-*")):
        if folder.is_dir():
            raise StoreNotOurs(
                f"{folder}: a log of RocketMQ's DLedger mode, which CometMQ cannot read. Consume "
                "all its messages with RocketMQ, then start CometMQ with an empty folder. If "
                f"{store} is not used in DLedger mode any more, move {folder.name} away"
            )
    if (store / CONSUME_QUEUE_DIR / ROCKSDB_FILE).is_file():
        raise StoreNotOurs(
            f"{store / CONSUME_QUEUE_DIR} has the queues in RocksDB (storeType = defaultRocksDB), "
            f"which CometMQ cannot read. Move {CONSUME_QUEUE_DIR} away: the queues are then "
            "rebuilt from the log, with all messages that it has"
        )
    for folder_name, name in ROCKSDB_CONFIGS.items():
        folder = store / CONFIG_DIR / folder_name
        if (folder / ROCKSDB_FILE).is_file() and not (store / CONFIG_DIR / name).is_file():
            raise StoreNotOurs(
                f"{folder} has the content of {store / CONFIG_DIR / name} in RocksDB, which "
                "CometMQ cannot read: export it (mqadmin rocksDBConfigToJson) as that file, or "
                f"move {folder_name} away to begin without it"
            )


def check_log_is_there(files: StoreFiles, *, is_copy: bool = False) -> None:
    """Raise StoreDamaged if commitlog/ is empty or missing, but other files show that there was a
    log. Recovery would treat that as a log without records, and cut all other files to it."""
    store = files.store
    if files.log_starts() or (store / CUT_FILE).exists():
        return
    said = list(_traces_of_a_log(files, is_copy=is_copy))
    if said:
        raise StoreDamaged(
            f"{store / COMMITLOG_DIR} has no segment, but there was a log: {'; '.join(said)}. If "
            f"it is on another disk, mount that; if it is lost, restore a backup of all of {store}."
            f" To begin an empty log, without any message: move {', '.join(MADE_OF_THE_LOG)} away;"
            f" {' and '.join(NOT_OF_THE_LOG)} can be put back into {CONFIG_DIR}"
        )


def _traces_of_a_log(files: StoreFiles, *, is_copy: bool) -> Iterator[str]:
    store = files.store
    flushed_ms = Checkpoint(store).words["physic_msg_timestamp"]
    if flushed_ms > 0:
        yield f"{CHECKPOINT_FILE} says that messages were flushed until {flushed_ms} ms"
    for (topic, queue_id), end in find_ends(files).items():
        if end.next_index:
            yield f"queue {queue_id} of {topic} ends at {end.next_index}"
            break
    for name in list_index_files(store):
        header = read_header(store / INDEX_DIR / name)
        if header is not None and header.end_physical_offset > 0:
            yield f"{INDEX_DIR}/{name} ends at physical offset {header.end_physical_offset}"
            break
    if is_copy:
        return
    table = ConfigFile(store / CONFIG_DIR / OFFSETS_FILE, ConsumerOffsetTable).load()
    for key, offsets in (table or ConsumerOffsetTable()).offset_table.items():
        if any(offset > 0 for offset in offsets.values()):
            yield f"{OFFSETS_FILE} has {key} at {max(offsets.values())}"
            break


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
