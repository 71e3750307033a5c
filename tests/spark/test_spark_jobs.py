"""The jobs on stores that RocketMQ wrote, on damage made on purpose, and on a broker that runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_process
import golden
import msgspec
import pytest
from family import RunningBroker
from old_segments import ALL_HOURS, FAST, MIB, log_begins, make_old, write_segments
from patience import patient
from pyspark.errors import PythonException
from pyspark.sql import Row, SparkSession
from shared_data import data_path

from cometmq.client import Admin, Producer
from cometmq.protocol.commands import GetQueueRange, QueueRange
from cometmq.protocol.errors import StoreError
from cometmq.protocol.names import UNKEPT_PROPERTIES
from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.kernel.codec import Message
from cometmq.shm.kernel.columns import ARCHIVE_NAMES, RECORD_FIELDS, put_records
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.positions import file_sizes
from cometmq.shm.state.holds import ARCHIVE_HOLD
from cometmq.shm.tools.verify import verify_store
from cometmq.spark.jobs import archived, compact, ingest, lag, manifest, replay, stats
from cometmq.spark.jobs.archive import ArchiveTask, archive, archive_segment, plan_archive
from cometmq.spark.jobs.audit import _Merging, audit, rebuild_queues
from cometmq.spark.jobs.findings import Lane, SegmentAudit
from cometmq.spark.jobs.manifest import ArchiveError
from cometmq.spark.jobs.running import JobFailed, log_bounds
from cometmq.spark.schema import COLUMNS
from cometmq.spark.source import CometDataSource
from cometmq.spark.streams import finished

pytestmark = pytest.mark.slow

UNIT = CONSUME_QUEUE_UNIT.size
WAIT_S = patient(240)  # for a stream, beside other tests


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.unpack("loghub-clean", tmp_path_factory.mktemp("jobs"))


def kinds(found: Any) -> list[tuple[str, int, int]]:
    return [(each.kind, each.queue_id, each.queue_offset) for each in found.findings]


# --- audit ---


@pytest.mark.parametrize("name", golden.CLEAN)
def test_audit_of_what_rocketmq_wrote(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Nothing is wrong, and the queues made from the log are RocketMQ's, byte for byte."""
    store = golden.unpack(name, tmp_path)
    steps: list[tuple[int, int]] = []
    found = audit(spark, store, progress=lambda done, total: steps.append((done, total)))
    assert found.findings == []
    assert found.records == len(golden.listing(name))
    assert all(each.checksum_log == each.checksum_cq for each in found.queues)
    assert steps[-1] == (found.segments, found.segments)
    rebuild_queues(store, tmp_path / "cq")
    assert files_of(tmp_path / "cq" / "consumequeue") == files_of(store / "consumequeue")
    with pytest.raises(StoreError, match="empty or a new"):
        rebuild_queues(store, tmp_path / "cq")
    with pytest.raises(StoreError, match="outside the store"):
        rebuild_queues(store, store / "new")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def change(path: Path, at: int, content: bytes) -> bytes:
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(len(content))
        file.seek(at)
        file.write(content)
    return before


def test_audit_names_each_fault_once(spark: SparkSession, tmp_path: Path) -> None:
    store = golden.unpack("loghub-clean", tmp_path)
    before = audit(spark, store)
    queue = next(each for each in before.queues if each.log_count > 100)
    sizes = verify_store(store)
    files = QueueFiles(store, queue.topic, queue.queue_id, sizes.queue_segment_bytes)

    def entry(index: int) -> tuple[Path, int]:
        start = index // files.per_segment * files.segment_bytes
        return files.path(start), index * UNIT - start

    def put(index: int, **fields: int) -> dict[str, int]:
        unit = files.entry(index)
        assert unit is not None
        change(*entry(index), CONSUME_QUEUE_UNIT.pack(**(unit | fields)))
        return unit

    put(3, tags_code=77)
    put(5, size=99)
    put(7, physical_offset=1)
    change(*entry(9), bytes(UNIT))
    end = queue.max_offset + 1
    unit = files.entry(11)
    assert unit is not None
    change(*entry(end), CONSUME_QUEUE_UNIT.pack(**unit))
    damaged = files.entry(20)
    assert damaged is not None
    segment = damaged["physical_offset"] // sizes.segment_bytes * sizes.segment_bytes
    log = store / "commitlog" / f"{segment:020d}"
    change(log, damaged["physical_offset"] - segment + 4, b"\0\0\0\0")  # the magic
    headless = files.entry(30)
    assert headless is not None
    segment = headless["physical_offset"] // sizes.segment_bytes * sizes.segment_bytes
    log = store / "commitlog" / f"{segment:020d}"
    change(log, headless["physical_offset"] - segment + headless["size"] // 2, b"\0\xff\0\xff")
    found = audit(spark, store)
    number = queue.queue_id
    assert sorted(kinds(found)) == sorted([
        ("CQ_TAGS", number, 3), ("CQ_SIZE", number, 5), ("CQ_PHY", number, 7),
        ("CQ_MISSING", number, 9), ("CQ_EXTRA", number, end), ("BAD_MAGIC", -1, -1),
        ("BODY_CRC", number, 30),
    ])  # fmt: skip
    assert found.records == before.records - 1
    changed = next(
        each for each in found.queues
        if (each.topic, each.queue_id) == (queue.topic, queue.queue_id)
    )  # fmt: skip
    assert (changed.log_count, changed.gaps) == (queue.log_count - 1, 1)
    assert changed.checksum_log != changed.checksum_cq
    files.path(0).unlink()
    gone = audit(spark, store)
    missing = [each for each in gone.findings if each.kind == "CQ_MISSING"]
    assert len({each.segment for each in missing}) == len(missing)  # one for a file and segment


def test_audit_of_damage_and_bad_ends(spark: SparkSession, tmp_path: Path) -> None:
    store = golden.unpack("damaged-tail", tmp_path)
    assert [each.kind for each in audit(spark, store).findings] == ["DIRTY_TAIL"]
    store = golden.unpack("damaged-nocq-all", tmp_path)
    assert {each.kind for each in audit(spark, store).findings} == {"CQ_MISSING"}
    store = golden.unpack("special-batchcq", tmp_path)
    with pytest.raises(JobFailed, match="BatchConsumeQueues"):
        audit(spark, store)
    store = golden.unpack("loghub-clean", tmp_path)
    second = sorted((store / "commitlog").iterdir())[1]
    second.unlink()
    found = audit(spark, store)
    assert [each.kind for each in found.findings if each.kind != "CQ_EXTRA"] == ["SEGMENT_GAP"]


def test_what_only_shows_between_segments(clean: Path) -> None:
    bounds = log_bounds(clean)

    def lane(offsets: tuple[int, int], places: tuple[int, int], ms: tuple[int, int]) -> Lane:
        count = offsets[1] - offsets[0] + 1
        return Lane("other", 0, count, 100 * count, *offsets, *places, *ms, 0, 0, 0)

    begin, size = bounds.begin, bounds.segment_bytes
    parts = [
        SegmentAudit(begin, lanes=[lane((0, 9), (begin, begin + 900), (50, 60))]),
        SegmentAudit(begin + size),  # all of it is a blank
        SegmentAudit(
            begin + 2 * size,
            lanes=[lane((9, 12), (begin + 2 * size, begin + 2 * size + 300), (59, 70))],
        ),
    ]
    found = _Merging(bounds, parts).audited(0).findings
    mine = [
        (each.kind, each.queue_offset, each.physical_offset, each.expected, each.actual)
        for each in found
        if each.topic == "other"
    ]
    at = begin + 2 * size
    assert mine == [
        ("TIME_BACKWARD", 9, at, "stored at 60 ms or later", "59 ms"),
        ("OFFSET_DUP", 9, at, "queue offset 10 or higher", "9"),
    ]


# --- archive, verify, replay to a store ---


def segments_of(store: Path, count: int) -> dict[str, bytes]:
    names = sorted(path.name for path in (store / "commitlog").iterdir() if path.is_file())
    return {name: (store / "commitlog" / name).read_bytes() for name in names[:count]}


@pytest.mark.parametrize(
    "name", ["loghub-clean", "special", "special-crc", "damaged-bitflip-early"]
)
def test_a_store_comes_back_byte_by_byte(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Transactions, both host kinds, long topics, compressed bodies, damage: all as it was."""
    store = golden.unpack(name, tmp_path)
    root = tmp_path / "archive"
    damaged = name.startswith("damaged")
    if damaged:
        with pytest.raises(Exception, match=r"wrong body CRC .*--keep-going"):
            archive(spark, store, root)
    done = archive(spark, store, f"file://{root}", verify=True, keep_going=damaged)
    assert (done.segments > 0, done.damaged) == (name != "special-crc", int(damaged))
    if not done.segments:
        return
    again = archive(spark, store, root)
    assert (again.segments, again.skipped) == (0, done.sealed)
    checked = archived.verify_archive(spark, root)
    assert (checked.wrong, checked.segments) == ([], done.sealed)
    assert archived.archive_table(spark, root).count() == checked.records
    replayed = replay.replay_to_store(spark, root, tmp_path / "back")
    assert replayed.messages == checked.records
    assert segments_of(tmp_path / "back", done.sealed) == segments_of(store, done.sealed)
    found = verify_store(tmp_path / "back")
    assert [each.kind for each in found.findings] == ["damaged"] * damaged


def test_archived_rows_are_what_the_source_reads(
    spark: SparkSession, clean: Path, tmp_path: Path
) -> None:
    archive(spark, clean, tmp_path / "archive")
    table = archived.archive_table(spark, tmp_path / "archive", topics=["loghub_Spark"])
    names = ["queue_id", "queue_offset", "store_ts", "born_ts", "keys", "tags", "body", "flag"]
    end = table.agg({"physical_offset": "max"}).first()[0]
    source = spark.read.format("cometmq").schema(
        ", ".join(f"{name} {COLUMNS[name][0]}" for name in [*names, "physical_offset"])
    )
    read = source.options(store=str(clean), subscribe="loghub_Spark").load()
    read = read.where(f"physical_offset <= {end}")
    order = ("queue_id", "queue_offset")
    assert table.count() > 500
    assert table.select(names).sort(*order).collect() == read.select(names).sort(*order).collect()


def test_an_archive_that_does_not_hold(spark: SparkSession, clean: Path, tmp_path: Path) -> None:
    root = tmp_path / "archive"
    archive(spark, clean, root)
    entry = manifest.entries(root)[1]
    victim = root / entry.files[0].path
    kept = victim.read_bytes()
    victim.write_bytes(kept[:-100] + b"x" + kept[-99:])
    assert "SHA-256" in archived.verify_archive(spark, root).wrong[0]
    victim.unlink()
    assert "it is not there" in archived.verify_archive(spark, root).wrong[0]
    victim.write_bytes(kept)
    path = manifest.entry_path(root, entry.broker, entry.begin)
    content = json.loads(path.read_text())
    content["crc32"] ^= 1
    path.write_text(json.dumps(content))
    assert "came out" in archived.verify_archive(spark, root).wrong[0]
    content["files"][0]["path"] = "v1/../../etc/passwd"
    path.write_text(json.dumps(content))
    assert "names the file" in archived.verify_archive(spark, root).wrong[0]
    path.unlink()
    with pytest.raises(ArchiveError, match=r"lacks the segments"):
        replay.replay_to_store(spark, root, tmp_path / "back")


def test_a_segment_gets_in_once(clean: Path, tmp_path: Path) -> None:
    """Whatever a killed job left, and whoever else works at the same segment."""
    root = tmp_path / "archive"
    plan = plan_archive(clean, root)
    task = ArchiveTask(plan.bounds, str(root), plan.waiting[0], False, False, "zstd")
    first = archive_segment(task)
    path = manifest.entry_path(root, plan.bounds.broker, task.start)
    written = path.read_bytes()
    second = archive_segment(task)  # a task that Spark ran twice
    assert msgspec.json.decode(first) == msgspec.json.decode(second)
    assert path.read_bytes() == written
    assert not list(root.rglob(f"*{manifest.TMP}"))
    assert plan_archive(clean, root).waiting == plan.waiting[1:]
    with manifest.locked(root), pytest.raises(ArchiveError, match="another job"):
        archive(None, clean, root)  # type: ignore[arg-type]
    with pytest.raises(ArchiveError, match="object stores"):
        plan_archive(clean, "s3://bucket/archive")
    other = shutil.copytree(clean, tmp_path / "other")
    (other / "cometmq.store").write_text('{"store_id": "abc", "broker": "broker"}')
    with pytest.raises(ArchiveError, match="from store -"):
        plan_archive(other, root)


KILLED = """
import os, sys
from pathlib import Path
from cometmq.spark.jobs import archive, manifest
step, store, root = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
def die(*_, **__): os._exit(9)
if step == "files": archive._writer = die
elif step == "rename": os.replace = die
elif step == "manifest": manifest.commit = die
else: os.link = die
plan = archive.plan_archive(store, root)
for start in plan.waiting:
    archive.archive_segment(archive.ArchiveTask(plan.bounds, str(root), start, False, True, "zstd"))
"""


@pytest.mark.parametrize("step", ["files", "rename", "manifest", "link"])
def test_killed_while_archiving(
    spark: SparkSession, clean: Path, tmp_path: Path, step: str
) -> None:
    root = tmp_path / "archive"
    arguments = [sys.executable, "-c", KILLED, step, str(clean), str(root)]
    assert (
        subprocess.run(arguments, timeout=patient(240), check=False, cwd=tmp_path).returncode == 9
    )
    assert manifest.entries(root) == []
    done = archive(spark, clean, root)
    assert done.segments == done.sealed
    assert archived.verify_archive(spark, root).wrong == []
    assert archived.archive_table(spark, root).count() == done.records


def test_names_in_an_archive() -> None:
    names = ["a", "a/b", "a%2Fb", "..", "_small", "small", "ü" * 200, "ü" * 201, "_" * 300]
    made = [manifest.escaped(name) for name in names]
    assert len(set(made)) == len(names)
    assert all(0 < len(each) < 200 and "/" not in each for each in made)
    assert not any(each.startswith("_") for each in made)


def test_columns_that_are_no_records() -> None:
    """An archive is somebody's file: what does not fit is refused before memory is touched."""
    segment = bytearray(4096)
    text = (0, None, bytes(8), b"")
    columns: list[Any] = [
        text if name in ("topic", "body_raw", "properties_raw", "born_host_raw", "store_host_raw",
                         "record_raw") else (0, None, None, bytes(8))
        for name in RECORD_FIELDS
    ]  # fmt: skip
    with pytest.raises(ValueError, match="row 0 was no record"):
        put_records(segment, 0, 1, columns)
    with pytest.raises(ValueError, match="too short"):
        put_records(segment, 0, 9, columns)
    with pytest.raises(ValueError, match="columns"):
        put_records(segment, 0, 1, columns[:3])
    whole = RECORD_FIELDS.index("record_raw")
    columns[whole] = (0, None, (0).to_bytes(4, "little") + (5000).to_bytes(4, "little"), bytes(10))
    with pytest.raises(ValueError, match="row 0"):
        put_records(segment, 0, 1, columns)
    assert set(ARCHIVE_NAMES) <= set(RECORD_FIELDS)
    assert segment == bytearray(4096)


# --- from a broker that runs ---


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("jobs-broker")
    settings = {"brokerName": "broker-a", "flushDiskType": "SYNC_FLUSH"}
    with RunningBroker(folder / "store", settings) as running:
        yield running
    shutil.rmtree(folder)


LOGS = ("HDFS", "Spark", "Apache")


@pytest.fixture(scope="module")
def lines(broker: RunningBroker) -> dict[str, list[bytes]]:
    """Real log lines, sent; and enough behind them for their segments to be sealed."""
    found = {}
    for name in LOGS:
        found[name] = data_path("loghub", f"{name}.log").read_bytes().splitlines()
        broker.create_topic(name, 2)
        for queue_id in (0, 1):
            mine = found[name][queue_id::2]
            for at in range(0, len(mine), 200):
                broker.send(name, queue_id, mine[at : at + 200], tags=name)
    broker.create_topic("filler", 1)
    for _ in range(20):
        broker.send("filler", 0, [b"f" * 100_000])
    broker.read_queue("filler", 0, 20)
    return found


def both(lines: list[bytes]) -> dict[tuple[int, int], bytes]:
    return {(number % 2, number // 2): line for number, line in enumerate(lines)}


def test_log_files_through_broker_stream_archive_and_replay(
    spark: SparkSession, broker: RunningBroker, lines: dict[str, list[bytes]], tmp_path: Path
) -> None:
    assert audit(spark, broker.store).findings == []  # while it is served
    done = ingest.ingest(
        spark, tmp_path / "table", store=str(broker.store), subscribe=",".join(LOGS),
        maxBytesPerTrigger="400000",
    )  # fmt: skip
    table = spark.read.parquet(str(tmp_path / "table"))
    assert (done.rows, done.batches > 3) == (sum(map(len, lines.values())), True)
    archive(spark, broker.store, tmp_path / "archive", verify=True)
    cold = archived.archive_table(spark, tmp_path / "archive", topics=LOGS)
    replay.replay_to_store(spark, tmp_path / "archive", tmp_path / "back")
    back = spark.read.format("cometmq").options(store=tmp_path / "back", subscribe=",".join(LOGS))
    for frame in (table, cold, back.load()):
        rows = frame.select("topic", "queue_id", "queue_offset", "body").collect()
        for name in LOGS:
            mine = {(r.queue_id, r.queue_offset): bytes(r.body) for r in rows if r.topic == name}
            assert mine == both(lines[name])
    sealed = len(manifest.entries(tmp_path / "archive"))
    assert segments_of(tmp_path / "back", sealed) == segments_of(broker.store, sealed)
    with RunningBroker(tmp_path / "back", {"brokerName": "broker-b"}) as again:
        assert [m.body for m in again.read_queue("HDFS", 0)] == lines["HDFS"][0::2]


def test_the_cleaner_waits_for_the_archive(spark: SparkSession, tmp_path: Path) -> None:
    """Each segment that is deleted is in the archive; what was not is said."""
    settings = FAST | {"deleteWhen": ALL_HOURS, "archiveHold": True}
    root = tmp_path / "archive"
    with RunningBroker(tmp_path / "store", settings) as broker:
        name_server = broker.ready.name_server
        broker.create_topic("t")
        write_segments(broker, 3)
        make_old(broker, 3)
        with pytest.raises(ArchiveError, match="nobody said at which name server"):
            archive(spark, broker.store, root)
        assert len(manifest.entries(root)) == 3
        assert broker.counter(Counter.MIN_OFFSET) == 0
        done = archive(spark, broker.store, root, name_server=name_server)
        assert (done.segments, done.skipped) == (0, 3)
        assert (done.told, done.lost_bytes) == (3 * MIB, 0)
        log_begins(broker, 3 * MIB)
        write_segments(broker, 6)
        make_old(broker, 3, 3)
        with Admin(name_server) as admin:
            admin.place_hold(ARCHIVE_HOLD, 4 * MIB)  # somebody has no patience
        log_begins(broker, 4 * MIB)
        after = archive(spark, broker.store, root, name_server=name_server)
        assert (after.told, after.lost_bytes) == (6 * MIB, MIB)
        log_begins(broker, 6 * MIB)
    assert [entry.begin // MIB for entry in manifest.entries(root)] == [0, 1, 2, 4, 5]


def test_replay_to_a_topic(
    spark: SparkSession, broker: RunningBroker, lines: dict[str, list[bytes]], tmp_path: Path
) -> None:
    """Once, however often it is run; under another name once more."""
    root = tmp_path / "archive"
    archive(spark, broker.store, root)
    broker.create_topic("again", 2)
    choice = replay.Choice("Spark")
    name_server = broker.ready.name_server
    for _ in range(2):
        done = replay.replay_to_topic(spark, root, choice, name_server, "again")
        assert done.messages == len(lines["Spark"])
    for queue_id in (0, 1):
        mine = lines["Spark"][queue_id::2]
        found = broker.read_queue("again", queue_id, len(mine))
        assert [message.body for message in found] == mine
        assert {message.tags for message in found} == {"Spark"}
        assert [message.properties["REPLAY_FROM"] for message in found] == [
            f"broker-a/Spark/{queue_id}/{number}" for number in range(len(mine))
        ]
    assert len(broker_queue(broker, "again", 0)) == len(lines["Spark"][0::2])
    replay.replay_to_topic(spark, root, choice, name_server, "again", run="once more")
    twice = [message.body for message in broker_queue(broker, "again", 0)]
    assert twice == 2 * lines["Spark"][0::2]
    nothing = replay.Choice("Spark", begin_ms=1 << 60)
    with pytest.raises(ArchiveError, match="no message of topic Spark"):
        replay.replay_to_topic(spark, root, nothing, name_server, "again")


def in_ms(row: Row) -> int:
    return int(row.store_ts.timestamp() * 1000)


def seal(store: Path) -> None:
    """Have another segment behind the last."""
    segment_bytes, queue_segment_bytes = file_sizes(store)
    settings = {
        "mappedFileSizeCommitLog": segment_bytes, "mappedFileSizeConsumeQueue": queue_segment_bytes,
        "maxMessageSize": 100_000,
    }  # fmt: skip
    with RunningBroker(store, settings) as broker:
        broker.create_topic("filler", 1)
        count = segment_bytes // 50_000 + 1
        for _ in range(count):
            broker.send("filler", 0, [b"f" * 50_000])
        broker.read_queue("filler", 0, count)
        assert broker.close() == 0


def broker_queue(broker: RunningBroker, topic: str, queue_id: int) -> list[Message]:
    """All that it has now."""
    answer, _ = broker.reader.ask(GetQueueRange(topic, queue_id))
    assert isinstance(answer, QueueRange)
    return broker.read_queue(topic, queue_id, answer.max_queue_offset)


@pytest.mark.parametrize("at_least_once", [False, True])
def test_replay_keeps_what_a_message_has(
    spark: SparkSession, broker: RunningBroker, tmp_path: Path, at_least_once: bool
) -> None:
    """Every message of RocketMQ's own store with all its kinds: flags, properties, compressed."""
    store = golden.unpack("special-crc", tmp_path)
    seal(store)
    root = tmp_path / "archive"
    archive(spark, store, root)
    topic = f"special-{at_least_once}"
    broker.create_topic(topic, 1)
    name_server = broker.ready.name_server
    sealed = manifest.entries(root)[-1].end
    read = spark.read.format("cometmq").options(store=str(store), subscribePattern="sp_.*")
    read = read.option("onCorrupt", "null-body")
    named = (
        "broker", "topic", "queue_id", "queue_offset", "store_ts", "physical_offset", "sys_flag",
        "flag", "keys", "tags", "body", "properties",
    )  # fmt: skip
    schema = ", ".join(f"{name} {COLUMNS[name][0]}" for name in named)
    rows = [row for row in read.schema(schema).load().collect() if row.physical_offset < sealed]
    (bad,) = (row for row in rows if row.body is None)
    place = f"{bad.topic}/{bad.queue_id}/{bad.queue_offset}"
    with pytest.raises(PythonException, match=f"{place}: it is not ZLIB, as its flags say"):
        replay.replay_to_topic(spark, root, replay.Choice(bad.topic), name_server, topic)
    rows = [row for row in rows if row.topic != bad.topic or row.store_ts < bad.store_ts]
    empty = 0
    for name in sorted({row.topic for row in rows}):
        choice = replay.Choice(name, end_ms=in_ms(bad) if name == bad.topic else 1 << 60)
        empty += replay.replay_to_topic(
            spark, root, choice, name_server, topic, rate=50_000, at_least_once=at_least_once
        ).left_out
    assert empty == sum(not row.body for row in rows) > 0
    rows = [row for row in rows if row.body]
    found = {each.properties["REPLAY_FROM"]: each for each in broker_queue(broker, topic, 0)}
    assert len(found) == len(rows)
    assert any(row.sys_flag & 1 for row in rows), "none is compressed"
    for row in rows:
        place = f"{row.broker}/{row.topic}/{row.queue_id}/{row.queue_offset}"
        message = found[place]
        assert message.body == bytes(row.body)
        assert (message.flag, message.keys, message.tags) == (row.flag, row.keys, row.tags)
        # Of its maker, or a promise of delivery that was kept long ago.
        own = {"UNIQ_KEY", "__CRC32#", "WAIT", *UNKEPT_PROPERTIES}
        kept = {name: text for name, text in row.properties.items() if name not in own}
        came = {name: text for name, text in message.properties.items() if name not in own}
        assert came == kept | {"REPLAY_FROM": place}


def test_lag(broker: RunningBroker, lines: dict[str, list[bytes]]) -> None:
    from cometmq.client import Consumer

    name_server = broker.ready.name_server
    with Consumer(name_server, "billing", "Apache") as consumer:
        taken = consumer.poll(10, patient(30))
        assert taken
        consumer.commit()
    sampler = lag.LagSampler(name_server, ["billing"])
    try:
        first = {row.queue_id: row for row in sampler.sample() if row.topic == "Apache"}
        second = {row.queue_id: row for row in sampler.sample() if row.topic == "Apache"}
    finally:
        sampler.close()
    for queue_id, row in first.items():
        assert row.rate_out is None
        count = len(lines["Apache"][queue_id::2])
        assert row.max_offset == count
        if row.committed is None:
            assert (row.state, row.lag_messages) == ("never", count)
        else:
            assert row.lag_messages == count - row.committed
            assert bool(row.lag_bytes) == bool(row.lag_ms) == bool(row.lag_messages)
            assert second[queue_id].state == ("stalled" if row.lag_messages else "ok")
            assert second[queue_id].rate_out == 0


# --- stats, ingest, compact ---


def test_stats(spark: SparkSession, clean: Path, tmp_path: Path) -> None:
    found = stats.stats(spark, store=str(clean), subscribePattern=".*")
    listing = golden.listing("loghub-clean")
    assert found.messages == len(listing) == sum(row.messages for row in found.rows)
    assert {row.topic for row in found.rows} == {each["topic"] for each in listing}
    for row in found.rows:
        assert row.missing == 0
        assert row.size_p50 <= row.size_p95 <= row.size_p99 <= row.size_max
        assert row.hour.endswith(":00Z")
    hostile = [msgspec.structs.replace(found.rows[0], topic="<script>")]
    stats.write_plot(msgspec.structs.replace(found, rows=hostile + found.rows), tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == found.topics + 1
    assert "<script>" not in page


def test_ingest_puts_bad_rows_aside(
    spark: SparkSession, broker: RunningBroker, tmp_path: Path
) -> None:
    broker.create_topic("rows", 1)
    good = [b'{"id": %d, "name": "n"}' % number for number in range(50)]
    broker.send("rows", 0, [*good, b"{broken", b'{"id": "text"}'])
    broker.read_queue("rows", 0, 52)
    given: dict[str, Any] = {
        "schema": "id bigint, name string", "store": str(broker.store), "subscribe": "rows",
    }  # fmt: skip
    table = tmp_path / "t"
    done = ingest.ingest(spark, table, **given)
    assert (done.rows, done.bad) == (50, 2)
    assert ingest.ingest(spark, table, **given).rows == 0
    with Producer(broker.ready.name_server) as producer:
        producer.send("rows", b'{"id": 50}', keys="k", properties={"who": "me"})
    broker.read_queue("rows", 0, 53)
    told: list[tuple[int, int]] = []
    done = ingest.ingest(spark, table, progress=lambda *each: told.append(each), **given)
    assert (done.rows, told) == (1, [(1, 0)])
    rows = spark.read.parquet(str(table)).collect()
    assert sorted(row.id for row in rows) == list(range(51))
    (keyed,) = (row for row in rows if row.id == 50)
    assert (keyed._keys, keyed._properties["KEYS"], keyed._properties["who"]) == ("k", "k", "me")
    assert keyed._unique_key == keyed._properties.get("UNIQ_KEY")
    bad = spark.read.parquet(str(tmp_path / "t__dlq")).collect()
    assert {(row._queue_offset, bytes(row._body)) for row in bad} == {
        (50, b"{broken"), (51, b'{"id": "text"}'),
    }  # fmt: skip
    with pytest.raises(JobFailed, match="belongs to the checkpoint"):
        ingest.ingest(spark, table, checkpoint=tmp_path / "other", **given)
    shutil.rmtree(tmp_path / "t__checkpoint")
    with pytest.raises(JobFailed, match="is gone"):
        ingest.ingest(spark, table, **given)
    with pytest.raises(Exception, match="rows/0 offset 50 is no row"):
        ingest.ingest(spark, tmp_path / "u", on_bad="suspend", **given)


def test_a_table_of_an_older_version_keeps_its_columns(
    spark: SparkSession, broker: RunningBroker, tmp_path: Path
) -> None:
    """All files of a table have the same columns, or Spark would take those of any one of them."""
    broker.create_topic("old", 1)
    broker.send("old", 0, [b"x"])
    broker.read_queue("old", 0, 1)
    given = {"store": str(broker.store), "subscribe": "old"}
    for name, more in (("new", True), ("old", False)):
        table = tmp_path / name
        if not more:
            table.mkdir()
            known = {"checkpoint": str(tmp_path / "old__checkpoint")}
            (table / ingest.MARK).write_text(json.dumps(known))
        ingest.ingest(spark, table, **given)
        columns = set(spark.read.parquet(str(table)).columns) - {"batch"}
        assert columns == {*ingest.RAW, *(ingest.MORE if more else ())}


def test_a_batch_that_is_begun_again(
    spark: SparkSession, broker: RunningBroker, lines: dict[str, list[bytes]], tmp_path: Path
) -> None:
    """Written, but not yet in the checkpoint: what a crash between the two leaves."""
    given = {"store": str(broker.store), "subscribe": "Apache", "maxBytesPerTrigger": "100000"}
    ingest.ingest(spark, tmp_path / "t", **given)
    last = max((tmp_path / "t__checkpoint" / "commits").glob("[0-9]*"), key=lambda p: int(p.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink()
    assert ingest.ingest(spark, tmp_path / "t", **given).batches >= 1
    rows = spark.read.parquet(str(tmp_path / "t")).collect()
    assert {(r.queue_id, r.queue_offset): bytes(r.body) for r in rows} == both(lines["Apache"])
    assert len(rows) == len(lines["Apache"])


SLOW_ONCE = """#!/bin/sh
case "$*" in *python_streaming_source_runner*)
  [ -e '{mark}' ] || { : > '{mark}'; exit 1; };;
esac
exec '{python}' "$@"
"""


def test_a_source_that_spark_does_not_wait_for(
    spark: SparkSession,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its process has ten seconds to start, which a busy machine does not give it."""

    class SlowOnce(CometDataSource):
        @classmethod
        def name(cls) -> str:
            return "slow"

    python, mark = tmp_path / "python", tmp_path / "mark"
    python.write_text(SLOW_ONCE.replace("{mark}", str(mark)).replace("{python}", sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    spark.dataSource.register(SlowOnce)
    reader = spark.readStream.format("slow").options(store=str(clean), startingOffsets="earliest")
    rows = reader.option("subscribe", "loghub_Apache").load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "at"))
    query = finished(writer.trigger(availableNow=True).start, WAIT_S)
    assert mark.exists()
    assert [each.message for each in caplog.records if "started again" in each.message]
    count = sum(each["topic"] == "loghub_Apache" for each in golden.listing("loghub-clean"))
    assert sum(each.numInputRows for each in query.recentProgress) == count
    with pytest.raises(TimeoutError, match="has not ended after 1 s"):
        finished(writer.queryName("late").trigger(processingTime="1 second").start, 1)
    assert "late" not in [each.name for each in spark.streams.active]


def test_compact(spark: SparkSession, broker: RunningBroker, tmp_path: Path) -> None:
    broker.create_topic("keyed", 1)
    for number in range(10):
        broker.send("keyed", 0, [b"a%d" % number], keys="a")
        broker.send("keyed", 0, [b"b%d" % number], keys="b")
    broker.send("keyed", 0, [b"nobody's"])
    broker.read_queue("keyed", 0, 21)
    given = {"store": str(broker.store), "subscribe": "keyed"}
    assert compact.compact(spark, tmp_path / "t", **given).keys == 2
    rows = spark.read.parquet(str(tmp_path / "t")).collect()
    assert {row["keys"]: bytes(row.body) for row in rows} == {"a": b"a9", "b": b"b9"}
    with pytest.raises(StoreError, match="not empty"):
        compact.compact(spark, tmp_path / "t", **given)


# --- the command line ---


def test_commands_that_only_plan(clean: Path, tmp_path: Path) -> None:
    plan = cli_process.json_of("spark", "audit", "--store", str(clean), "--dry-run")
    assert (plan["dry_run"], plan["segments"]) == (True, 6)
    root = str(tmp_path / "archive")
    plan = cli_process.json_of(
        "spark", "archive", "--store", str(clean), "--archive", root, "--dry-run"
    )
    assert len(plan["waiting"]) == plan["sealed"] == 5
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["dlq"], 2, "say what to read"),
        (["stats"], 2, "say what to read"),
        (["replay", "--archive", "x"], 2, "say where to"),
        (["replay", "--archive", "x", "--to-topic", "t"], 2, "needs the archived"),
        (["archive", "--archive", "x"], 2, "say what to archive"),
        (["archive", "--archive", "s3://x", "--store", "."], 3, "object stores"),
        (["stats", "--store", ".", "--plot", "x.png"], 2, "HTML"),
        (["audit", "--store", "."], 3, "is no store"),
    ],
)
def test_commands_that_are_refused(
    tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    done = cli_process.run("spark", *arguments, cwd=tmp_path)
    assert (done.returncode, text in done.stderr.decode()) == (code, True), done.stderr


def test_help_needs_no_spark(tmp_path: Path) -> None:
    """Nor does it load it; without it a command says what to install."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text(
        "raise ModuleNotFoundError('No module named pyspark', name='pyspark')"
    )
    hidden = {"PYTHONPATH": str(tmp_path)}
    for command in ((), ("audit",), ("archive",), ("lag",)):
        done = cli_process.run("spark", *command, "--help", **hidden)
        assert done.returncode == 0, done.stderr
    store = golden.unpack("damaged-base", tmp_path)
    done = cli_process.run("spark", "audit", "--store", str(store), **hidden)
    assert done.returncode == 3
    assert b"pip install '.[spark]'" in done.stderr


def test_audit_as_a_command(tmp_path: Path) -> None:
    store = golden.unpack("damaged-bitflip", tmp_path)
    done = cli_process.run(
        "spark", "audit", "--store", str(store), "--master", "local[1]", "-o", "json",
        "--driver-memory", "512m", "--rebuild", str(tmp_path / "cq"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [each["kind"] for each in found["findings"]] == ["BODY_CRC"]
    assert (tmp_path / "cq" / "consumequeue").is_dir()
    *said, last = done.stderr.decode().splitlines()
    assert last.startswith("4 queues written to ")
    assert [line for line in said if not line.startswith("audit: ")] == []  # nothing of Spark


def test_a_job_that_fails(tmp_path: Path) -> None:
    """One sentence, and nothing of Spark before or after it."""
    store = golden.unpack("damaged-bitflip", tmp_path)
    done = cli_process.run(
        "spark", "stats", "--store", str(store), "--master", "local[1]",
        "--driver-memory", "512m", cwd=tmp_path,
    )  # fmt: skip
    said = done.stderr.decode().splitlines()
    said = [line for line in said if not line.startswith("stats: ")]
    assert (done.returncode, done.stdout, len(said)) == (3, b"", 1), said
    assert "wrong body CRC" in said[0]
    assert said[0].startswith("Error: ")


NEVER_STOPPED = """
import atexit, sys
from cometmq.spark import messages, session

def ended():
    print(spark.sparkContext._jsc is None)

atexit.register(ended)  # the first one is the last to run
spark = session("local[1]", conf={"spark.ui.enabled": "false", "spark.driver.memory": "512m"})
print(messages(spark, store=sys.argv[1], subscribePattern=".*").count())
print(spark.conf.get("spark.sql.shuffle.partitions"))
"""


def test_a_session_that_nobody_stops(clean: Path, tmp_path: Path) -> None:
    """It is stopped before its JVM: workers that outlive that complain with a traceback.

    Not of every one can that be asked: Spark itself ends a session without its workers' last word.
    """
    done = subprocess.run(
        [sys.executable, "-c", NEVER_STOPPED, clean], cwd=tmp_path, capture_output=True,
        text=True, timeout=cli_process.TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Not Spark's 200 tasks for whatever is counted on a laptop.
    assert done.stdout.split() == [str(len(golden.listing("loghub-clean"))), "1", "True"]
    assert "replaced" not in done.stderr, "it was found, and is registered once more"


END_OF_A_STREAM = """
import sys
from pyspark.sql.types import StructType
from cometmq.spark import CometDataSource

source = CometDataSource({"store": sys.argv[1], "subscribe": "orders"})
reader = source.streamReader(StructType())
reader.stop()
print("goes on", flush=True)
try:
    try:
        raise EOFError("Spark has closed its end")
    finally:
        reader.stop()
except EOFError:
    print("tells Spark of it")
"""


def test_the_process_of_a_stream_ends_without_a_word(clean: Path) -> None:
    """pyspark would tell Spark, which has gone, and fail, with a traceback for its users."""
    done = subprocess.run(
        [sys.executable, "-c", END_OF_A_STREAM, clean], capture_output=True,
        text=True, timeout=cli_process.TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
