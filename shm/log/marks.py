"""Marks of a run, which stand in a store while a broker has it open. RocketMQ's is `abort`."""

from __future__ import annotations

import shutil
from pathlib import Path

from cometmq.shm.live.control import CONTROL_FILE, SLEEPERS_FILE, end_run
from cometmq.shm.live.queue_table import forget_queues, keep_as_before
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import (
    ABORT_FILE,
    FILTER_MAPS_DIR,
    FILTERS_FILE,
    RETIRED_DIR,
    STAGING_DIR,
    remove_folder,
)


def remove_marks(store: Path) -> None:
    """Say that the store was left in order; everything in it has to be on the disk.

    `abort` goes last, and durably: killed at any line before, the next start recovers.
    """
    remove_folder(store / STAGING_DIR)
    remove_folder(store / RETIRED_DIR)
    end_run(store / CONTROL_FILE)
    shutil.rmtree(store / FILTER_MAPS_DIR, ignore_errors=True)
    for name in (CONTROL_FILE, SLEEPERS_FILE, FILTERS_FILE):
        (store / name).unlink(missing_ok=True)
    keep_as_before(store)
    sync_folder(store)
    (store / ABORT_FILE).unlink(missing_ok=True)
    sync_folder(store)


def forget_last_run(store: Path, *, clean: bool) -> None:
    """Remove the counters of CometMQ's last run, durably, because another program has opened the
    store since. Call this before the store notes that this broker has opened it.

    Args:
        clean: that program shut down in order. If not, the set of queues is unknown, and the queue
            table of the last run is removed as well: all queues are compared with the log.
    """
    end_run(store / CONTROL_FILE)
    (store / CONTROL_FILE).unlink(missing_ok=True)
    if not clean:
        forget_queues(store)
    sync_folder(store)
