"""docs/formats.md shows real bytes: each example is written here by the code that the broker runs.

After a change of a format: `python tests/shm/test_formats_page.py`, and look at what has changed.
"""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from cometmq.actors.coordination.files import PoppedFile
from cometmq.actors.coordination.order_file import OrderFile
from cometmq.protocol.commands import Hold, Position
from cometmq.protocol.configs import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.derived import Mark as DerivedMark
from cometmq.protocol.derived import pack_mark
from cometmq.protocol.ledger import (
    Change,
    GroupPut,
    MemberJoined,
    MessagesPopped,
    OffsetSet,
    Place,
    PopsAcked,
    QueueOwned,
    QueueTaken,
    Subscribed,
    TopicPut,
    VersionGiven,
    entry_of,
    pack_change,
)
from cometmq.protocol.takes import Take
from cometmq.shm.derived.index_recovery import IndexedMark
from cometmq.shm.kernel import codec, live
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.kernel.live import Bell, OwnedCell, Sleeper
from cometmq.shm.kernel.store import LogAppender
from cometmq.shm.live.control import SLEEPERS_FILE, ControlFile, Counter
from cometmq.shm.live.queue_table import ENDS_AT, QueueRange, QueueTable
from cometmq.shm.os.files import Checkpoint
from cometmq.shm.state.holds import holds_file, holds_text
from cometmq.shm.state.identity import Identity
from cometmq.shm.state.ledger_mark import LEDGER_FILE, Mark, Marked, Snapshot, digest_of, write_mark
from cometmq.shm.state.staging import OpenStage, StagedHead

PAGE = Path(__file__).resolve().parents[2] / "docs/formats.md"
BLOCK = re.compile(r"```hexdump (\w+)\n(.*?)```", re.DOTALL)
STORED_MS = 1_700_000_000_000
PROPERTIES = b"TAGS\x01paid\x02"


def appended(body: bytes = b"hello") -> bytes:
    """A record of the topic `orders`, queue 3, the first of its log."""
    memory = memoryview(bytearray(4096))
    appender = LogAppender(bytes([10, 0, 0, 2, 0, 0, 42, 159]), 4 << 20, False)
    appender.attach(memory, 0, 0)
    cursor = live.QueueCursor("orders", 3, 7)
    born_host = bytes([10, 0, 0, 1, 0, 0, 18, 52])
    appender.append(cursor, body, PROPERTIES, 0, 0, STORED_MS - 5, born_host, STORED_MS)
    return bytes(memory[: appender.physical_offset])


def record(_store: Path) -> bytes:
    return appended()


def entry(_store: Path) -> bytes:
    tags_code = codec.java_hash("paid")
    size = len(appended())
    return CONSUME_QUEUE_UNIT.pack(physical_offset=0, size=size, tags_code=tags_code)


def checkpoint(store: Path) -> bytes:
    Checkpoint(store).store(physic_msg_timestamp=STORED_MS, logics_msg_timestamp=STORED_MS)
    return (store / "checkpoint").read_bytes()[:64]


def control(store: Path) -> bytes:
    path = store / "cometmq.control"
    made = ControlFile.create(path, {"version": "0.1.0", "pid": 4711})
    made.own(Counter.WROTE).advance(len(appended()))
    content = path.read_bytes()
    cell = 4096 + Counter.WROTE * live.COUNTER_BYTES
    return content[:128] + content[cell : cell + live.COUNTER_BYTES]


def queues(_store: Path) -> bytes:
    table, count = QueueTable.private()
    table.fill_slot(0, "orders", 3, QueueRange(0, 8))
    count.advance(1)
    return table.memory[:320]


def ends(_store: Path) -> bytes:
    table, _ = QueueTable.private()
    cells = [OwnedCell(mmap.mmap(-1, live.COUNTER_BYTES), 0) for _ in range(live.STRIPES)]
    table.tell(cells, -1).place(live.QueueCursor("orders", 3, 8), 0)
    return table.memory[ENDS_AT : ENDS_AT + 32]


def sleepers(store: Path) -> bytes:
    """One sleeps on `wrote`."""
    opened = ControlFile.create(store / "cometmq.control", {})
    Sleeper([opened.read(Counter.WROTE)], Bell()).sleep(0.001)
    return (store / SLEEPERS_FILE).read_bytes()


def identity(_store: Path) -> bytes:
    known = Identity(
        store_id="5d41402abc4b2a76b9719d911017c592",
        broker="alpha-store",
        segment_bytes=1 << 30,
        queue_segment_bytes=6_000_000,
    )
    return msgspec.json.encode(known)


def ledger(store: Path) -> bytes:
    snapshot = Snapshot(digest_of(b"{}"), 12, Place(STORED_MS, 12))
    write_mark(store, Mark(files={"consumerOffset.json": Marked(contents=[snapshot])}))
    return (store / LEDGER_FILE).read_bytes()


def changes(_store: Path) -> bytes:
    """One of each kind that is often seen."""
    made: list[Change] = [
        TopicPut(TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4)),
        GroupPut(SubscriptionGroupConfig(group_name="billing")),
        MemberJoined("billing", "m-1"),
        Subscribed("billing", "m-1", "orders", "*"),
        QueueOwned("billing", "orders", 3, "m-1", STORED_MS),
        VersionGiven("billing", STORED_MS),
        OffsetSet("billing", "orders", 3, 8),
    ]
    return entry_of(Place(STORED_MS, 13), [pack_change(change) for change in made])


def mark(_store: Path) -> bytes:
    before, after = Position(6, (1 << 63) - 1), Position(7, (1 << 63) - 1)
    return pack_mark(DerivedMark("sink.daily", before, after, 120, b""))


def holds(store: Path) -> bytes:
    file = holds_file(store)
    file.store_text(holds_text([Hold("backup", 1_073_741_824, STORED_MS)]), durable=True)
    return file.path.read_bytes()


def popped(store: Path) -> bytes:
    shown = PoppedFile(store)
    shown.book.apply(MessagesPopped("resize", "images", 0, 0, 3, 7, STORED_MS))
    shown.book.apply(PopsAcked("resize", "images", 0, 7, 0, 1))
    shown.book.apply(PopsAcked("resize", "images", 0, 7, 2, 3))
    return "".join(shown.pieces()).encode()


def order_info(store: Path) -> bytes:
    """Of four the second and the last are acknowledged, and the third was given back."""
    left = ((7, 1), (8, 0), (9, 0), (10, 0))
    take = Take(5, "f3a1", STORED_MS, STORED_MS + 60_000, left, 11, 11)
    take = take.without(8, 9).without(10, 11).given_back(9, STORED_MS + 1_000)
    shown = OrderFile(store)
    shown.book.apply(QueueTaken("driving", "trips", 0, take))
    return "".join(shown.pieces()).encode()


def indexed(store: Path) -> bytes:
    IndexedMark(store).write(len(appended()))
    return (store / IndexedMark.FILE).read_bytes()


def stage(store: Path) -> bytes:
    opened = OpenStage(store / "0.task-1.open")
    batch = codec.BatchEncoder(unique_keys=False)
    batch.add(b"hello", "paid")
    head = StagedHead("orders", 3, 1, 0, STORED_MS, bytes(8))
    opened.append(head, memoryview(batch.take()))
    opened.close()
    return (store / "0.task-1.open").read_bytes()


EXAMPLES: dict[str, Callable[[Path], bytes]] = {
    "record": record,
    "entry": entry,
    "checkpoint": checkpoint,
    "control": control,
    "queues": queues,
    "ends": ends,
    "sleepers": sleepers,
    "store": identity,
    "holds": holds,
    "popped": popped,
    "orderinfo": order_info,
    "ledger": ledger,
    "changes": changes,
    "mark": mark,
    "indexed": indexed,
    "stage": stage,
}


def hexdump(content: bytes) -> str:
    """As `hexdump -C` prints it: a run of equal lines is shown once, and then a star."""
    rows = [content[at : at + 16] for at in range(0, len(content), 16)]
    lines, at = [], 0
    for row, run in groupby(rows):
        shown = " ".join(f"{byte:02x}" for byte in row)
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {shown:<47}  |{text}|")
        count = len(list(run))
        if count > 1:
            lines.append("*")
        at += 16 * count
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_what_is_written(name: str, tmp_path: Path) -> None:
    shown = dict(BLOCK.findall(PAGE.read_text()))
    assert shown[name] == hexdump(EXAMPLES[name](tmp_path))


def test_the_page_shows_nothing_else() -> None:
    assert set(dict(BLOCK.findall(PAGE.read_text()))) == set(EXAMPLES)


def main() -> None:
    def printed(match: re.Match[str]) -> str:
        with tempfile.TemporaryDirectory() as store:
            return f"```hexdump {match[1]}\n{hexdump(EXAMPLES[match[1]](Path(store)))}```"

    PAGE.write_text(BLOCK.sub(printed, PAGE.read_text()))


if __name__ == "__main__":
    main()
