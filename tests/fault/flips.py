"""Damage to the files of a closed store: a bit, a page, or the end of a file gone.

A store is copied, one file of the copy damaged, and then opened again as a start does it. Whatever
the damage: a changed body is never served, no message is served in the place of another, and those
whose records were not hit are all there. What RocketMQ's CRC does not cover, everything in a record
but its body, may come back changed; `Judgement.changed` says which fields did.

Small damage to a file that can be made anew from the log (ConsumeQueues, index files, checkpoint,
cometmq.queues.before) must not cost a message; entries wrong in the middle of a queue segment are
the exception, which `store verify` finds (docs/recovery.md). A config file without a whole `.bak`
may be refused, and so may a segment that is too short: then the text names the file.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from family import EndedEarly, RunningBroker, pull

from cometmq.protocol.commands import PullMessages, PullStatus, QueryMessages, QueryResult
from cometmq.protocol.errors import CometError
from cometmq.protocol.names import HIDDEN_TOPICS
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.os.files import ABORT_FILE, COMMITLOG_DIR, CONSUME_QUEUE_DIR, INDEX_DIR
from cometmq.shm.reading.positions import file_sizes
from cometmq.shm.reading.store_reader import GetStatus, ReadLimits, StoreReader
from cometmq.shm.tools.repair import recover_store
from cometmq.shm.tools.verify import verify_store

PAGE: Final = 4096
KINDS: Final = ("bit", "page", "cut")
#: The classes of files, and how often each is drawn.
TARGETS: Final = {
    "sealed": 4, "tail": 4, "queue": 3, "index": 1, "checkpoint": 1, "config": 2, "before": 1,
}  # fmt: skip
FIELDS: Final = (
    "flag", "sys_flag", "born_timestamp_ms", "store_timestamp_ms", "born_host", "store_host",
    "reconsume_times", "prepared_transaction_offset", "properties", "topic", "queue_id",
)  # fmt: skip
Place = tuple[str, int, int]  # topic, queue, queue offset


@dataclass(frozen=True)
class Damage:
    """What was done to one file."""

    target: str
    kind: str
    file: str  # below the store
    begin: int  # in the file
    end: int  # exclusive
    physical: tuple[int, int] = (0, 0)  # for the log: the same as physical offsets

    def __str__(self) -> str:
        return f"{self.kind} of {self.file} ({self.target}) at {self.begin}..{self.end}"


@dataclass
class Judgement:
    damage: Damage
    refused: str = ""  # what the start said, if it would not
    missing: int = 0
    changed: Counter[str] = field(default_factory=Counter)  # fields of served records that differ
    complaints: list[str] = field(default_factory=list)


class Victim:
    """A whole store, of which copies are damaged.

    Args:
        settings: RocketMQ's keys for a broker on it.
    """

    def __init__(self, store: Path, settings: dict[str, object] | None = None) -> None:
        self.store = store
        self.segment_bytes, self.queue_bytes = file_sizes(store)
        self.settings = {
            "mappedFileSizeCommitLog": self.segment_bytes,
            "mappedFileSizeConsumeQueue": self.queue_bytes,
            **(settings or {}),
        }
        self.messages = self._read_whole()
        self.log_end = max(m.physical_offset + m.size for m in self.messages.values())

    def _read_whole(self) -> dict[Place, Message]:
        """What a start that finds no damage serves."""
        copy = self.store.with_name("whole")
        shutil.copytree(self.store, copy)
        recover_store(copy, self.segment_bytes, self.queue_bytes)
        found = read_closed(copy)
        shutil.rmtree(copy)
        return found

    def damaged_copy(self, chance: random.Random, target: str | None = None) -> tuple[Path, Damage]:
        copy = self.store.with_name("damaged")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.store, copy)
        while True:
            wanted = target or chance.choices(list(TARGETS), list(TARGETS.values()))[0]
            files = self._files_of(copy, wanted)
            if files or target:
                break
        return copy, self._damage(copy, chance.choice(files), wanted, chance)

    def _files_of(self, store: Path, target: str) -> list[Path]:
        logs = sorted((store / COMMITLOG_DIR).iterdir())
        last = self.log_end // self.segment_bytes
        match target:
            case "sealed":
                found = [path for path in logs if int(path.name) // self.segment_bytes < last]
            case "tail":
                found = [path for path in logs if int(path.name) // self.segment_bytes == last]
            case "queue":
                found = sorted((store / CONSUME_QUEUE_DIR).glob("*/*/*"))
            case "index":
                found = sorted((store / INDEX_DIR).glob("*"))
            case "config":
                found = sorted((store / "config").glob("*.json"))
            case "checkpoint":
                found = [store / "checkpoint"]
            case _:
                found = [store / "cometmq.queues.before"]
        return [path for path in found if path.is_file() and path.stat().st_size]

    def _damage(self, store: Path, path: Path, target: str, chance: random.Random) -> Damage:
        size = path.stat().st_size
        used = size
        if target == "tail":
            used = self.log_end - int(path.name)
        elif target == "queue":
            used = max(1, len(path.read_bytes().rstrip(b"\0")))
        kind = chance.choice(KINDS)
        at = chance.randrange(used)
        with path.open("r+b") as file:
            if kind == "cut":
                file.truncate(at)
                begin, end = at, size
            elif kind == "page":
                begin = at // PAGE * PAGE
                end = min(begin + PAGE, size)
                file.seek(begin)
                # After a bad end zeros are what a power cut leaves, and the log ends there.
                lost = not (store / ABORT_FILE).exists() and chance.random() < 0.5
                file.write(bytes(end - begin) if lost else chance.randbytes(end - begin))
            else:
                begin, end = at, at + 1
                file.seek(at)
                byte = file.read(1)[0] ^ 1 << chance.randrange(8)
                file.seek(at)
                file.write(bytes([byte]))
        physical = (0, 0)
        if target in ("sealed", "tail"):
            physical = int(path.name) + begin, int(path.name) + end
        return Damage(target, kind, str(path.relative_to(store)), begin, end, physical)

    # --- judging ---

    def judge_closed(self, copy: Path, damage: Damage) -> Judgement:
        """As a start recovers it and a reader reads it, in this process: for the log and queues."""
        verdict = Judgement(damage)
        try:
            recover_store(copy, self.segment_bytes, self.queue_bytes)
            served = read_closed(copy)
        except CometError as error:
            self._judge_refusal(verdict, str(error))
            return verdict
        self._compare(verdict, served)
        if verdict.missing and not verify_store(copy).findings:
            verdict.complaints.append("messages are missing, and verify finds nothing wrong")
        return verdict

    def judge_served(self, copy: Path, damage: Damage) -> Judgement:
        """By a broker: everything it hands out, and what a few keys find."""
        verdict = Judgement(damage)
        broker = None
        try:
            broker = RunningBroker(copy, self.settings)
            with broker:
                self._compare(verdict, read_served(broker, self.messages))
                self._query(verdict, broker)
        except EndedEarly as error:
            verdict.complaints.append(f"ended without a word: {error}"[:2000])
        except CometError as error:
            self._judge_refusal(verdict, str(error))
        log_path = copy.parent / f"{copy.name}.log"
        text = log_path.read_text(errors="replace")
        log_path.unlink()
        if "Traceback" in text:
            verdict.complaints.append("a traceback: " + text[text.index("Traceback") :][:2500])
        return verdict

    def _judge_refusal(self, verdict: Judgement, text: str) -> None:
        damage = verdict.damage
        verdict.refused = text
        if Path(damage.file).name not in text:
            verdict.complaints.append(f"refused without naming the file: {text}")
        may_be = damage.target == "config" or (
            damage.kind == "cut" and damage.target in ("sealed", "tail", "queue")
        )
        if not may_be:
            verdict.complaints.append(f"refused, though it could be made anew: {text}")

    def _compare(self, verdict: Judgement, served: dict[Place, Message]) -> None:
        damage = verdict.damage
        bodies = {(m.topic, m.body) for m in self.messages.values()}
        for place, message in served.items():
            whole = self.messages.get(place)
            if message.body != (whole.body if whole else None):
                known = (message.topic, message.body) in bodies
                if whole is None and self._was_hit(message, damage):
                    verdict.changed["place"] += 1  # of one whose header was hit
                    continue
                what = "another message" if known else "a changed body"
                verdict.complaints.append(f"{place}: {what} is served, {message}"[:600])
            elif whole is not None and self._was_hit(whole, damage):
                for name in FIELDS:
                    if getattr(message, name) != getattr(whole, name):
                        verdict.changed[name] += 1
            elif whole is not None and message.physical_offset != whole.physical_offset:
                verdict.complaints.append(f"{place}: from {message.physical_offset}")
        for place, whole in self.messages.items():
            if place in served or self._was_hit(whole, damage):
                continue
            verdict.missing += 1
            if damage.target not in ("queue",) and verdict.missing == 1:
                verdict.complaints.append(f"{place}, which was not hit, is missing")

    @staticmethod
    def _was_hit(message: Message, damage: Damage) -> bool:
        begin, end = damage.physical
        return message.physical_offset < end and begin < message.physical_offset + message.size

    def _query(self, verdict: Judgement, broker: RunningBroker) -> None:
        """Whatever a key finds has that key."""
        keyed = [
            m for m in self.messages.values() if m.keys and not self._was_hit(m, verdict.damage)
        ]
        for message in keyed[:: max(1, len(keyed) // 10)]:
            answer, payload = broker.reader.ask(QueryMessages(message.topic, message.keys))
            assert isinstance(answer, QueryResult)
            found = decode(payload[0].buffer) if payload else []
            if any(message.keys not in one.keys.split() for one in found):
                verdict.complaints.append(f"{message.keys} finds another message")
            if answer.indexed_physical_offset == answer.end_physical_offset and not found:
                verdict.missing += 1


# --- reading --------------------------------------------------------------------------------------


def read_closed(store: Path) -> dict[Place, Message]:
    """Everything of clients in a store that nobody writes to, queue by queue."""
    limits = ReadLimits(
        hot_bytes=1 << 30, hot_count=1 << 20, cold_bytes=1 << 30, cold_count=1 << 20,
        skip_removed=False,
    )  # fmt: skip
    reader = StoreReader.open_closed(store, limits, real_minimum=True)
    found: dict[Place, Message] = {}
    try:
        for topic, queue_id in list(reader.positions.queues()):  # type: ignore[attr-defined]
            at = 0
            while topic not in HIDDEN_TOPICS:
                result = reader.get_message(topic, queue_id, at, 1 << 20)
                for message in decode(result.payload) if result.payload else []:
                    found[topic, queue_id, message.queue_offset] = message
                if result.status in ENDS or result.next_queue_offset <= at:
                    break
                at = result.next_queue_offset
    finally:
        reader.close()
    return found


ENDS: Final = (
    GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.NO_MESSAGE_IN_QUEUE,
    GetStatus.NO_MATCHED_LOGIC_QUEUE,
)  # fmt: skip


def read_served(broker: RunningBroker, wanted: dict[Place, Message]) -> dict[Place, Message]:
    """Everything in these queues, as a client gets it."""
    found: dict[Place, Message] = {}
    for topic, queue_id in sorted({place[:2] for place in wanted}):
        at = 0
        while True:
            command = PullMessages(topic, queue_id, at, 10_000, 1 << 20, 0)
            answer, messages = pull(broker.reader, command)
            for message in messages:
                found[topic, queue_id, message.queue_offset] = message
            if answer.status == PullStatus.NO_NEW_MESSAGE or answer.next_queue_offset <= at:
                break
            at = answer.next_queue_offset
    return found


# --- stores ---------------------------------------------------------------------------------------


def make_store(store: Path, *, clean: bool, seed: int) -> dict[str, object]:
    """A store of our own: some segments, topics, keys, tags, committed offsets; its settings."""
    chance = random.Random(seed)
    settings: dict[str, object] = {
        "mappedFileSizeCommitLog": 96 << 10,
        "maxMessageSize": 16 << 10,
        "maxHashSlotNum": 100,
        "maxIndexNum": 400,
        "flushIntervalConsumeQueue": 20,
        "flushConsumeQueueThoroughInterval": 40,
    }
    with RunningBroker(store, settings) as broker:
        for topic in ("flips-a", "flips-b"):
            broker.create_topic(topic, 2)
        for number in range(150):
            topic, queue_id = chance.choice(["flips-a", "flips-b"]), chance.randrange(2)
            bodies = [
                chance.randbytes(chance.randrange(2_000)) for _ in range(chance.randint(1, 3))
            ]
            broker.send(topic, queue_id, bodies, keys=f"k{number}", tags=f"t{number % 3}")
        if not clean:
            broker.kill_all()
    assert (store / ABORT_FILE).exists() != clean
    return settings


def flip(victim: Victim, chance: random.Random, *, served: bool, target: str = "") -> Judgement:
    """One damage, judged. served: by a whole broker."""
    copy, damage = victim.damaged_copy(chance, target or None)
    judge = victim.judge_served if served else victim.judge_closed
    return judge(copy, damage)
