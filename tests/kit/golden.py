"""The golden sets: stores that RocketMQ itself wrote, with what RocketMQ says is in them."""

from __future__ import annotations

import gzip
import json
import tarfile
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from shared_data import data_path

# Closed in good order, 20-byte queue entries only: nothing about them is wrong.
CLEAN = ("loghub-clean", "special", "special-crc")
# The process was halted; the archive is the state before recovery, the listing the one after.
ABORT = ("loghub-abort", "damaged-base")
# Copies of damaged-base with damage done on purpose. Archive before, listing after recovery.
DAMAGED = (
    "damaged-bitflip",
    "damaged-bitflip-early",
    "damaged-tail",
    "damaged-tail-stale",
    "damaged-nocq",
    "damaged-nocq-all",
    "damaged-nocq-nocheckpoint",
)
# Closed in good order, but its queues are BatchConsumeQueues of 46-byte entries.
BATCH_QUEUES = ("special-batchcq",)
ALL = CLEAN + ABORT + DAMAGED + BATCH_QUEUES

_FOLDER = "rocketmq-stores"
BROKERS = "rocketmq-brokers"  # stores of whole brokers, and what these did when they started again


def unpack(name: str, tmp_path: Path, sets: str = _FOLDER) -> Path:
    """A fresh copy of the set's store below `tmp_path`, modification times kept."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    with tarfile.open(data_path(sets, f"{name}.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    return folder / "store"


def meta(name: str, sets: str = _FOLDER) -> dict[str, Any]:
    """Settings, state on disk, state after opening, queries with their answers."""
    loaded = json.loads(data_path(sets, f"{name}.meta.json").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def expected(name: str) -> dict[str, Any]:
    """What the broker did that left this set behind, when it was started again."""
    with gzip.open(data_path(BROKERS, f"{name}.expected.json.gz"), "rt", encoding="utf-8") as text:
        loaded = json.load(text)
    assert isinstance(loaded, dict)
    return loaded


def listing(name: str) -> list[dict[str, Any]]:
    """RocketMQ's own account of every record, in CommitLog order."""
    with gzip.open(data_path(_FOLDER, f"{name}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def host(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """`10.0.0.1:80` or `[::1]:80`, as an address: one IPv6 address has many spellings."""
    address, _, port = text.rpartition(":")
    return ip_address(address.removeprefix("[").removesuffix("]")), int(port)
