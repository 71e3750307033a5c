"""Stages: all of an epoch, once, whatever dies where; and what is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import staging_child as child
from dying import DIED, Line, some_of, traced
from family import RunningBroker, encode_batch
from patience import patient

from cometmq.actors.replication.core.settings import Settings as CoreSettings
from cometmq.actors.replication.group.log_view import GroupLog
from cometmq.actors.replication.peers.peers import content_bytes_max
from cometmq.client.sending.staging import SinkLine, StageWriter
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import (
    CloseStage,
    CommitStages,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.errors import (
    BadRequest,
    MessageIllegal,
    MessageNotFound,
    NameIllegal,
    OffsetIllegal,
    SystemBusy,
    TopicNotExist,
)
from cometmq.protocol.names import TOPIC_MAX
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchEncoder
from cometmq.shm.live.control import Counter
from cometmq.shm.state.staging import STAGES_DIR, QueueProgress, StageFiles, tail_of

WAIT_S = patient(90)
EXPECTED = sorted(
    body for number in (0, 1) for _, bodies in child.content(number) for body in bodies
)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("staging") / "before"
    child.before(store)
    return store


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill takes no page of a file, so nothing here depends on the disk."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _descriptor: None)


def check(writer: child.Writer, *, others: bool = True) -> None:
    """Everything once, in the order of each task's batches; queues without holes."""
    messages = writer.messages()
    ours = [each for each in messages if not each.body.startswith(b"before")]
    assert sorted(each.body for each in ours) == EXPECTED
    for queue_id in (0, 1, 2):
        queue = [each for each in messages if each.queue_id == queue_id]
        assert [each.queue_offset for each in queue] == list(range(len(queue)))
        for number in (b"0.", b"1."):
            bodies = [each.body for each in queue if each.body.startswith(number)]
            assert bodies == sorted(bodies)
    if others:
        assert len(messages) - len(ours) == 9
    assert writer.commit(["first-0", "first-1"]) == StagesCommitted(already=True)
    left = [path.name for path in (writer.store / STAGES_DIR / child.SINK).iterdir()]
    assert left in ([], ["record"])
    assert writer.blocked is None
    assert not writer.staging.is_unfinished


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick")
def test_killed_at_any_line(before: Path, tmp_path: Path) -> None:
    """Staging, closing, deciding, appending, recording: the driver asks again, and it is there."""
    store = tmp_path / "store"
    shutil.copytree(before, store)
    passed = child.lines_of_an_epoch(store)
    writer = child.again(store)
    check(writer)
    writer.close()
    assert len(passed) > 150
    for place, (line, count) in some_of(enumerate(passed.items()), 25):
        nth = count if place % 2 else 1  # the first time that it is passed, or the last
        shutil.rmtree(store)
        shutil.copytree(before, store)
        assert child.die_at(store, line, nth) == DIED, (line, nth)
        writer = child.again(store)
        check(writer)
        writer.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick")
def test_killed_again_while_it_is_finished(before: Path, tmp_path: Path) -> None:
    """With half of it in the log, killed at each line of what the next process does."""
    half = tmp_path / "half"
    shutil.copytree(before, half)
    appended = child.lines_of_an_epoch(tmp_path / "measure")
    published = next(
        (file, number) for file, number in appended
        if file == child.__file__ and "append_inner(" in line_of(file, number)
    )  # fmt: skip
    assert child.die_at(half, published, 20) == DIED
    finish_killed_at_each_line(half, tmp_path / "store")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("done", [0, 11, 24])
def test_what_an_older_release_has_decided(before: Path, tmp_path: Path, done: int) -> None:
    """Without marks, the ends of the queues say how much is there; killed at each line, too."""
    half = tmp_path / "half"
    shutil.copytree(before, half)
    child.before_marks(half, done)
    writer = child.again(half)
    check(writer)
    assert writer.staging.files.record(child.SINK).epoch == child.EPOCH
    writer.close()
    shutil.rmtree(half)
    shutil.copytree(before, half)
    child.before_marks(half, done)
    finish_killed_at_each_line(half, tmp_path / "store")


def finish_killed_at_each_line(half: Path, store: Path) -> None:
    shutil.copytree(half, store)
    lines: set[Line] = set()
    with traced(lines.add, child.WATCHED):
        child.again(store)
    for line in some_of(sorted(lines), 15):
        shutil.rmtree(store)
        shutil.copytree(half, store)
        assert child.die_at(store, line, 1, child.again) == DIED
        writer = child.again(store)
        check(writer)
        writer.close()


def line_of(file: str, number: int) -> str:
    return Path(file).read_text().splitlines()[number - 1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick")
def test_killed_by_a_power_cut(before: Path, tmp_path: Path) -> None:
    """The log loses its end, the stages do not: what is decided is finished, what is not is asked
    for again."""
    store = tmp_path / "store"
    shutil.copytree(before, store)
    passed = child.lines_of_an_epoch(store)
    shorter = 0
    for seed, (line, count) in some_of(enumerate(passed.items()), 40):
        nth = 1 if seed % 4 < 2 else count
        shutil.rmtree(store)
        shutil.copytree(before, store)
        child.die_at(store, line, nth)
        shorter += child.cut_power(store, seed)
        if seed % 2:  # and once more, in the middle of what is done about it
            child.die_at(store, line, nth, child.again)
            child.cut_power(store, seed + 1)
        writer = child.again(store)
        check(writer, others=False)
        writer.close()
    print(f"{shorter} logs were shorter")
    assert shorter > 4


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(24))
def test_a_power_cut_of_what_an_older_release_has_decided(
    before: Path, tmp_path: Path, seed: int
) -> None:
    store = tmp_path / "store"
    shutil.copytree(before, store)
    child.before_marks(store, seed)
    child.cut_power(store, seed)
    writer = child.again(store)
    check(writer, others=False)
    writer.close()


def test_how_much_an_older_release_has_written() -> None:
    queue = QueueProgress("t", 0, 2, 100)
    assert [queue.there(end, 10) for end in (50, 98, 99, 100, 104, 108, 120)] == [
        0, 0, 1, 2, 6, 10, 10,
    ]  # fmt: skip


def test_the_tail_of_a_batch() -> None:
    whole = encode_batch([b"a", b"bb", b"ccc"])
    assert tail_of(memoryview(whole), 0) == whole
    assert bytes(tail_of(memoryview(whole), 2)).count(b"ccc") == 1
    assert b"bb" not in bytes(tail_of(memoryview(whole), 2))


@pytest.mark.usefixtures("quick")
def test_a_torn_end_is_cut(tmp_path: Path) -> None:
    """At any byte: the whole batches stay, and the next goes behind them."""
    writer = child.Writer(tmp_path / "store")
    command = StageMessages(child.SINK, 0, "a", 0, [Section("t", 0, 1)], 1)
    batch = memoryview(encode_batch([b"one"]))
    writer.staging.stage(command, [batch], bytes(8))
    path = tmp_path / "store" / STAGES_DIR / child.SINK / "0.a.open"
    size = path.stat().st_size
    writer.staging.stage(
        StageMessages(child.SINK, 0, "a", 1, command.sections, 1), [batch], bytes(8)
    )
    writer.close()
    content = path.read_bytes()
    for cut in range(size, len(content) + 1):
        path.write_bytes(content[:cut])
        opened = StageFiles(tmp_path / "store").open(child.SINK, 0, "a")
        assert (opened.batches, opened.size) == (
            (2, len(content)) if cut == len(content) else (1, size)
        )
        assert path.stat().st_size == opened.size
        opened.close()
    for at in range(size, len(content)):  # and whatever is turned over
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
        opened = StageFiles(tmp_path / "store").open(child.SINK, 0, "a")
        assert opened.batches == 1
        opened.close()


def test_damage_is_no_message(tmp_path: Path) -> None:
    """A stage whose bytes have changed since it was closed: refused, nothing of it is stored."""
    writer = child.Writer(tmp_path / "store")
    writer.task("first-0", 0)
    path = next((tmp_path / "store" / STAGES_DIR / child.SINK).glob("*.closed"))
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Exception, match=r"what lies at .* does not hold"):
        writer.commit(["first-0"])
    assert writer.messages() == []
    writer.close()


# --- with a broker ---


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("staged")
    settings = {"flushDiskType": request.param, "maxStagedBytes": 4 << 20}
    with RunningBroker(folder / "store", settings) as running:
        running.create_topic("t", 2)
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def line(broker: RunningBroker) -> Iterator[SinkLine]:
    sink = f"s-{os.urandom(4).hex()}"
    with SinkLine(broker.ready.name_server, sink, timeout_s=WAIT_S) as found:
        yield found


def fill(line: SinkLine, stage: str, bodies: list[bytes], epoch: int = 0, topic: str = "t") -> None:
    writer = StageWriter(line, epoch, stage)
    writer.queues(topic)
    for at in range(0, len(bodies), 10):
        some = bodies[at : at + 10]
        writer.send(topic, 0, encode_batch(some), len(some))
    writer.finish()


def staged(broker: RunningBroker, line: SinkLine) -> list[str]:
    folder = broker.store / STAGES_DIR / line.sink
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


def test_nothing_is_seen_before_the_commit(broker: RunningBroker, line: SinkLine) -> None:
    count = len(broker.read_queue("t", 0))
    fill(line, "a", [b"%d" % n for n in range(100)])
    fill(line, "speculated", [b"%d" % n for n in range(100)])
    assert len(broker.read_queue("t", 0)) == count
    once = CommitStages(line.sink, 0, ["a"])  # by the line it would be said again after some time
    answer, _ = broker.commitlog.ask(once, timeout_s=WAIT_S)
    assert answer == StagesCommitted(already=False, messages=100)
    queue = broker.read_queue("t", 0, count + 100)
    assert [each.body for each in queue[count:]] == [b"%d" % n for n in range(100)]
    assert line.commit(0, ["a"]).already
    assert line.commit(0, ["speculated"]).already
    assert staged(broker, line) == []
    assert broker.statistics("commitlog")["staged_bytes"] == 0


def test_a_lost_answer_to_each_command(broker: RunningBroker, line: SinkLine) -> None:
    """Every command twice: once for nothing."""
    count = len(broker.read_queue("t", 1))
    section = Section("t", 1, 1)
    with Channel(broker.endpoints.commitlog) as channel:
        for number in range(5):
            for _ in range(2):
                command = StageMessages(line.sink, 7, "a", number, [section], 1)
                channel.ask(command, [encode_batch([b"%d" % number])], timeout_s=patient(30))
        for _ in range(2):
            channel.ask(CloseStage(line.sink, 7, "a", 5), timeout_s=patient(30))
        first, _ = channel.ask(CommitStages(line.sink, 7, ["a"]), timeout_s=patient(30))
        second, _ = channel.ask(CommitStages(line.sink, 7, ["a"]), timeout_s=patient(30))
    assert (first, second) == (StagesCommitted(False, 5), StagesCommitted(True))
    queue = broker.read_queue("t", 1, count + 5)[count:]
    assert [each.body for each in queue] == [b"%d" % number for number in range(5)]


def test_kills_while_epochs_are_committed(broker: RunningBroker, line: SinkLine) -> None:
    """The commitlog, dispatcher and flush processes are killed all the time; nothing is twice."""
    broker.create_topic("killed", 2)
    over = threading.Event()

    def kill() -> None:
        for role in ("commitlog", "dispatcher", "commitlog", "flush", "commitlog"):
            if not over.is_set():
                broker.kill(role)

    killer = threading.Thread(target=kill)
    killer.start()
    wanted: list[bytes] = []
    epoch = 0
    while killer.is_alive() or epoch < 5:
        bodies = [b"%d.%d " % (epoch, n) + b"x" * 9000 for n in range(60)]
        fill(line, "a", bodies, epoch, "killed")
        line.commit(epoch, ["a"])
        wanted += bodies
        epoch += 1
    over.set()
    killer.join()
    queue = broker.read_queue("killed", 0, len(wanted))
    assert [each.body for each in queue] == wanted


def test_the_whole_broker_is_killed(tmp_path: Path) -> None:
    """Between closing and committing; and after it, before anybody was told."""
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("t", 2)
        with SinkLine(broker.ready.name_server, "s") as line:
            fill(line, "a", [b"%d" % n for n in range(50)])
            fill(line, "b", [b"%d" % n for n in range(50, 99)], epoch=1)
        broker.kill_all()
    with RunningBroker(store) as broker, SinkLine(broker.ready.name_server, "s") as line:
        line.queues("t")
        assert line.commit(0, ["a"]).messages == 50
        broker.kill_all()
    with RunningBroker(store) as broker, SinkLine(broker.ready.name_server, "s") as line:
        line.queues("t")
        assert line.commit(0, ["a"]).already
        assert line.commit(1, ["b"]).messages == 49
        queue = broker.read_queue("t", 0, 99)
        assert [each.body for each in queue] == [b"%d" % n for n in range(99)]


def test_what_nobody_commits_is_dropped(tmp_path: Path) -> None:
    """By its lease; the commit that comes too late is told so, and so is whoever adds too late."""
    with RunningBroker(tmp_path / "store", {"stagedLease": 100}) as broker:
        broker.create_topic("t", 2)
        with SinkLine(broker.ready.name_server, "s", timeout_s=WAIT_S) as line:
            with contextlib.suppress(OffsetIllegal):  # it has run out already
                fill(line, "late", [b"x"])
            deadline = time.monotonic() + WAIT_S
            while staged(broker, line):
                assert time.monotonic() < deadline
                time.sleep(0.02)  # a file that goes is no event
            with pytest.raises(MessageNotFound, match=r"stage late .* its lease ran out"):
                line.commit(0, ["late"])


def test_what_is_given_up_is_dropped(broker: RunningBroker, line: SinkLine) -> None:
    fill(line, "aborted", [b"x"], epoch=1)
    assert staged(broker, line) == ["1.aborted.closed"]
    line.drop(1, ["aborted", "never-there"])
    assert staged(broker, line) == []


def test_what_is_refused(broker: RunningBroker, line: SinkLine) -> None:
    good = encode_batch([b"x"])
    for command, payload, error, text in (
        (stage(line, "t", 9), [good], MessageIllegal, "queue 9 of t, which has 2 queues"),
        (stage(line, "nowhere", 0), [good], TopicNotExist, "nowhere"),
        (stage(line, "t", 0, name="../x"), [good], NameIllegal, "stage name '../x'"),
        (stage(line, "t", 0, sink="a/b"), [good], NameIllegal, "sink name 'a/b'"),
        (stage(line, "t", 0, sink=""), [good], NameIllegal, "sink name ''"),
        (stage(line, "t", 0, epoch=-1), [good], BadRequest, "epoch -1"),
        (stage(line, "t", 0, first=3), [good], OffsetIllegal, "has 0 batches"),
        (stage(line, "t", 0, first=-1), [good], OffsetIllegal, "has 0 batches"),
        (stage(line, "t", 0, count=2), [good], MessageIllegal, "1 elements, 2 announced"),
        (stage(line, "t", 0), [], BadRequest, "1 sections, 0 payload frames"),
        (stage(line, "t", 0), [good[:-1]], MessageIllegal, "element 0"),
        (CommitStages(line.sink, 0, ["a", "a"]), [], BadRequest, "named twice"),
        (CommitStages(line.sink, 0, ["x/y"]), [], NameIllegal, "x/y"),
        (CommitStages(line.sink, 0, ["none"]), [], MessageNotFound, "stage none"),
        (CloseStage(line.sink, 0, "a", 5), [], OffsetIllegal, "not 5"),
    ):
        with Channel(broker.endpoints.commitlog) as channel, pytest.raises(error, match=text):
            channel.ask(command, payload, timeout_s=patient(30))
    assert "Traceback" not in broker.log


def stage(
    line: SinkLine, topic: str, queue_id: int, *, name: str = "a", sink: str | None = None,
    epoch: int = 0, first: int = 0, count: int = 1,
) -> StageMessages:  # fmt: skip
    sections = [Section(topic, queue_id, count)]
    return StageMessages(line.sink if sink is None else sink, epoch, name, first, sections, 1)


def test_sizes_are_bounded(broker: RunningBroker, line: SinkLine) -> None:
    body = encode_batch([bytes(200_000)])
    writer = StageWriter(line, 0, "big")
    writer.queues("t")
    with Channel(broker.endpoints.commitlog) as channel:
        for number in range(20):
            channel.ask(
                stage(line, "t", 0, name="big", first=number), [body], timeout_s=patient(30)
            )
        with pytest.raises(SystemBusy, match="maxStagedBytes"):
            channel.ask(stage(line, "t", 0, name="big", first=20), [body], timeout_s=patient(30))
    line.drop(0, ["big"])
    assert staged(broker, line) == []


def test_the_largest_write_of_an_epoch_fits_into_a_frame_of_replicas(tmp_path: Path) -> None:
    """It is not cut. The records of small messages have several times what was staged."""
    topic, settings = "t" * TOPIC_MAX, BrokerSettings()
    core = CoreSettings(group="g", replica="n0", address="")
    segment = 64 << 20  # of which a write takes as much as of a larger one
    shape = {"enabledAppendPropCRC": True, "mappedFileSizeCommitLog": segment}
    with RunningBroker(tmp_path / "store", shape) as broker:
        broker.create_topic(topic, 1)
        with SinkLine(broker.ready.name_server, "small") as line:
            writer = StageWriter(line, 0, "a")
            writer.queues(topic)
            for _ in range(100):
                encoder = BatchEncoder(unique_keys=False)
                encoder.add_many([b"x"] * 1_000)
                writer.send(topic, 0, encoder.take(), 1_000)
            writer.finish()
            assert line.commit(0, ["a"]).messages == 100_000
        end = broker.counter(Counter.WROTE)
    view = GroupLog(tmp_path / "store", segment)
    at, largest = view.begins_at(), 0
    while at < end:
        to = view.whole_records(at, end, core.frame_bytes)
        at, largest = to, max(largest, to - at)
    view.close()
    assert settings.stored_record_bytes_max < largest < content_bytes_max(settings)
