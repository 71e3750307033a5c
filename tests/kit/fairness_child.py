"""A service that has its broker's writer inside and appends without a pause, for test_fairness.

    python fairness_child.py STORE

It tells the family's token once it appends, and goes on until it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from family import SMALL
from paths import SEARCH

from cometmq import Broker
from cometmq.shm.kernel.store import Appender

SETTINGS = {
    **SMALL,
    "mappedFileSizeCommitLog": 64 << 20,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "cleanResourceInterval": 500,
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),
}


def environment(more: dict[str, str]) -> dict[str, str]:
    """Such that it finds the tests' helpers."""
    return {**os.environ, "PYTHONPATH": SEARCH, **more}


def let_it_age(folder: Path) -> None:
    """What is full may be deleted at once, or the disk would not do for it."""
    while True:
        for segment in sorted(folder.iterdir())[:-3]:
            with contextlib.suppress(FileNotFoundError):
                os.utime(segment, (0, 0))
        time.sleep(0.2)


def append_for_ever(appender: Appender) -> None:
    bodies = [b"x" * 100] * 256
    while True:
        appender.append_many(bodies)


def main(store: str) -> None:
    broker = Broker(store, settings=json.loads(json.dumps(SETTINGS)), writer="here")
    for queue_id in range(2):
        appender = broker.appender("busy", queue_id)
        threading.Thread(target=append_for_ever, args=(appender,), daemon=True).start()
    folder = Path(store) / "commitlog"
    threading.Thread(target=let_it_age, args=(folder,), daemon=True).start()
    print(broker._ready.token, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
