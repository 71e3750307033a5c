"""Progress of a consumer that shares its queues with nobody: who keeps it, and where.

no group       the user
a group        the broker, as of any group
broadcasting   <folder>/<member>/<group>/offsets.json, as RocketMQ LocalFileOffsetStore has it
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from cometmq.client.routes import ASK_S, Routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    CommitOffsets,
    Done,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import ArgumentIllegal, StoreDamaged, StoreLocked
from cometmq.shm.os.durable import replace_file
from cometmq.shm.state.json_text import dumps

FOLDER: Final = ".rocketmq_offsets"  # at home
FILE_BYTES_MAX: Final = 64 << 20  # some 500,000 queues
FILE_EVERY_S: Final = 5.0  # RocketMQ persistConsumerOffsetInterval
UNKNOWN: Final = -1
_NAME = re.compile(r"[^/\0]{1,200}")
_ENTRY = re.compile(r"\{([^{}]*)\}\s*:\s*([0-9]{1,19})\s*(,?)\s*")
_TABLE = re.compile(r'\s*\{\s*"offsetTable"\s*:\s*\{\s*(.*?)\s*\}\s*\}\s*', re.DOTALL)


class Kept(Protocol):
    """Where the progress is. Called by one thread at a time."""

    every_s: float  # how often it is kept at most
    goes_back: bool  # a backup of the broker's store resets it, too
    saved_ms: int  # otherwise: time of the last save, since 1970; 0: not known

    def load(self, ends: BrokerEndpoints, keys: Sequence[QueueKey]) -> list[int]:
        """The offset of each; UNKNOWN where there is none."""

    def knows(self, ends: BrokerEndpoints, topic: str, count: int) -> bool:
        """Return whether any of the first `count` queues of a topic has progress."""

    def save(self, ends: BrokerEndpoints, offsets: Sequence[QueueOffset]) -> None: ...
    def close(self) -> None: ...


class KeptByUser:
    every_s = float("inf")
    goes_back = False
    saved_ms = 0

    def load(self, ends: BrokerEndpoints, keys: Sequence[QueueKey]) -> list[int]:
        return [UNKNOWN] * len(keys)

    def knows(self, ends: BrokerEndpoints, topic: str, count: int) -> bool:
        return False

    def save(self, ends: BrokerEndpoints, offsets: Sequence[QueueOffset]) -> None:
        raise ArgumentIllegal("there is no group that could keep progress: `position` says it")

    def close(self) -> None:
        pass


class KeptByBroker:
    every_s = 0.0
    goes_back = True
    saved_ms = 0

    def __init__(self, routes: Routes, group: str) -> None:
        self._routes = routes
        self._group = group

    def load(self, ends: BrokerEndpoints, keys: Sequence[QueueKey]) -> list[int]:
        command = FetchOffsets(self._group, list(keys))
        answer = self._routes.ask(ends.coordinator, command, GroupOffsets, ASK_S)
        return [each.queue_offset for each in answer.offsets]

    def knows(self, ends: BrokerEndpoints, topic: str, count: int) -> bool:
        found = self.load(ends, [QueueKey(topic, number) for number in range(count)])
        return any(offset >= 0 for offset in found)

    def save(self, ends: BrokerEndpoints, offsets: Sequence[QueueOffset]) -> None:
        command = CommitOffsets(self._group, list(offsets))
        self._routes.ask(ends.coordinator, command, Done, ASK_S)

    def close(self) -> None:
        pass


class _QueueName(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ MessageQueue."""

    broker_name: str
    queue_id: int
    topic: str


class _Offsets(msgspec.Struct, rename="camel"):
    """RocketMQ OffsetSerializeWrapper."""

    offset_table: dict[_QueueName, int]


class KeptInFile:
    """One consumer at a time has the file: its folder is locked as long as it does.

    Args:
        member: whose folder it is; None: this machine's address and DEFAULT, RocketMQ's client id.
        folder: None: `.rocketmq_offsets` at home.

    Raises StoreLocked, StoreDamaged, ArgumentIllegal, OSError.
    """

    every_s = FILE_EVERY_S
    goes_back = False

    def __init__(self, group: str, member: str | None, folder: Path | None) -> None:
        self.member = f"{own_address()}@DEFAULT" if member is None else member
        if not _NAME.fullmatch(self.member) or self.member in (".", ".."):
            raise ArgumentIllegal(f"member={self.member[:80]!r} is no name of a folder")
        place = (folder or Path.home() / FOLDER) / self.member / group
        place.mkdir(parents=True, exist_ok=True)
        self.path = place / "offsets.json"
        self._lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._take_lock()
            self.saved_ms = 0
            self._table = self._read()
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(
                f"{self.path.parent}: another consumer that is called {self.member} has it; "
                "give each on this machine a name, member="
            ) from None

    def _read(self) -> dict[_QueueName, int]:
        """The file, or the older one that RocketMQ leaves beside it while it writes."""
        for path in (self.path, self.path.with_name("offsets.json.bak")):
            try:
                with path.open("rb") as file:
                    self.saved_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
                    content = file.read(FILE_BYTES_MAX + 1)
            except FileNotFoundError:
                continue
            if content.strip():
                return parse_offsets(content, path)
        return {}

    def load(self, ends: BrokerEndpoints, keys: Sequence[QueueKey]) -> list[int]:
        names = (_QueueName(ends.broker, key.queue_id, key.topic) for key in keys)
        return [self._table.get(name, UNKNOWN) for name in names]

    def knows(self, ends: BrokerEndpoints, topic: str, count: int) -> bool:
        return any(name.topic == topic for name in list(self._table))  # at any broker

    def save(self, ends: BrokerEndpoints, offsets: Sequence[QueueOffset]) -> None:
        for each in offsets:
            self._table[_QueueName(ends.broker, each.queue_id, each.topic)] = each.queue_offset
        replace_file(self.path, dumps(_Offsets(self._table)).encode())

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def parse_offsets(content: bytes, path: Path) -> dict[_QueueName, int]:
    """What fastjson makes of a map whose keys are objects: no JSON. Raises StoreDamaged."""
    if len(content) > FILE_BYTES_MAX:
        raise StoreDamaged(f"{path}: more than {FILE_BYTES_MAX} bytes")
    try:
        table = _TABLE.fullmatch(content.decode())
        if table is None:
            raise ValueError("no offsetTable")
        text, at = table[1], 0
        found: dict[_QueueName, int] = {}
        while at < len(text):
            entry = _ENTRY.match(text, at)
            if entry is None or bool(entry[3]) == (entry.end() == len(text)):
                raise ValueError(f"no entry: {text[at : at + 40]!r}")
            name = msgspec.convert(json.loads("{" + entry[1] + "}"), _QueueName)
            found[name] = int(entry[2])
            at = entry.end()
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise StoreDamaged(
            f"{path} is no file of offsets: {error}; remove it to begin at `start`"
        ) from None
    return found


def own_address() -> str:
    """This machine's, as RocketMQ names its clients: IPv4, public or of a large network first."""
    import psutil  # here, as it is 10 ms of a start, which does not need it

    found = sorted(
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family.name == "AF_INET" and not address.address.startswith(("127.", "0."))
    )
    wide = [each for each in found if not each.startswith("192.168.")]
    return (wide or found or ["127.0.0.1"])[0]
