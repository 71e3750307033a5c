"""Topics whose queues are not plain ones: RocketMQ's BatchCQ and COMPACTION topics.

A BatchCQ topic has entries of 46 bytes in batchconsumequeue/, each for several queue offsets.
RocketMQ does not start if such a topic also has a folder in consumequeue/. For a COMPACTION topic,
RocketMQ keeps a separate log in compaction/. CometMQ does not serve these topics, and writes
nothing for them: no entries, no deletions, no records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.protocol.configs import why_not_served
from cometmq.shm.derived.consume_queue import list_queues
from cometmq.shm.os.files import CONFIG_DIR
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import TopicTable

BATCH_QUEUE_DIR: Final = "batchconsumequeue"
TOPICS_FILE: Final = "topics.json"


def topics_not_served(store: Path) -> dict[str, str]:
    """Return topics that are not served, each with the reason: those that topics.json declares, and
    those that only have a folder in batchconsumequeue/. Raises ConfigFileDamaged, OSError."""
    table = ConfigFile(store / CONFIG_DIR / TOPICS_FILE, TopicTable).load() or TopicTable()
    found = {}
    for topic, config in table.topic_config_table.items():
        why = why_not_served(config)
        if why:
            found[topic] = why
    try:
        folders = [entry.name for entry in os.scandir(store / BATCH_QUEUE_DIR) if entry.is_dir()]
    except FileNotFoundError:
        folders = []
    for topic in folders:
        if topic not in table.topic_config_table:
            found[topic] = f"its queues are in {BATCH_QUEUE_DIR}/"
    return found


def list_served_queues(store: Path) -> Iterator[tuple[str, int]]:
    """Return all queues that have a folder, without those of topics that are not served."""
    others = topics_not_served(store)
    return (key for key in list_queues(store) if key[0] not in others)


class OtherTopics:
    """Lookup of single topics that are not served. Follows changes of topics.json, as a slave gets
    them. Not thread-safe."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._looks: tuple[int, int] | None = None
        self._found: dict[str, str] = {}

    def why(self, topic: str) -> str:
        """Return why the topic is not served; empty: it is served."""
        why = self._found.get(topic)
        if why is None and (looks := self._look()) != self._looks:
            self._found, self._looks = topics_not_served(self._store), looks
            why = self._found.get(topic)
        return why or ""

    def _look(self) -> tuple[int, int]:
        try:
            status = (self._store / CONFIG_DIR / TOPICS_FILE).stat()
        except FileNotFoundError:
            return (0, 0)
        return status.st_mtime_ns, status.st_ino
