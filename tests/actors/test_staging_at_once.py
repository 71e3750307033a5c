"""Commands of stages in one go, in any order, while a sync is under way: no descriptor of anybody
else is touched, the broker lives, and what was closed and not dropped can be committed."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import staging_child as child
from family import RunningBroker, encode_batch
from patience import patient

from cometmq.actors.writer.staging import OPEN_STAGES_MAX
from cometmq.protocol.commands import (
    CloseStage,
    Command,
    CommitStages,
    DropStages,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.errors import (
    CometError,
    MessageNotFound,
    OffsetIllegal,
    StoreError,
    SystemBusy,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.state.staging import STAGES_DIR

WORDS = ("stage", "stage", "close", "close", "drop", "commit", "others", "synced")
STAGES = ("a", "b")


class Slow:
    """An executor whose work is done when the test says so, as by a slow disk."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def step(self) -> None:
        if self.work:
            self.work.pop(0)()

    def shutdown(self) -> None:
        while self.work:
            self.step()


class Others:
    """Descriptors that belong to somebody else, taken while stages come and go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[int, tuple[int, int]] = {}

    def take(self) -> None:
        """One more, which gets the lowest number that is free: one that was closed too early."""
        path = self._folder / f"other-{len(self._held)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        self._held[descriptor] = found.st_dev, found.st_ino

    def check(self) -> None:
        for descriptor, wanted in self._held.items():
            found = os.fstat(descriptor)  # raises where somebody has closed it
            assert (found.st_dev, found.st_ino) == wanted, descriptor

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Others]:
    (tmp_path / "others").mkdir()
    found = Others(tmp_path / "others")
    yield found
    found.close()


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[child.Writer]:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: os.fstat(descriptor))  # it has to be open
    found = child.Writer(tmp_path / "store")
    found.staging._syncer = Slow()  # type: ignore[assignment]
    yield found
    found.close()


class Session:
    """What one client does, and what it may expect."""

    def __init__(self, writer: child.Writer) -> None:
        self.staging = writer.staging
        self.syncer: Slow = writer.staging._syncer  # type: ignore[assignment]
        self.epoch = 0
        self.batches: Counter[str] = Counter()
        self.told: list[str] = []  # what became of each CloseStage

    def stage(self, name: str) -> None:
        body = encode_batch([b"%d" % self.batches[name]])
        command = StageMessages(
            child.SINK, self.epoch, name, self.batches[name], [Section("t", 0, 1)], 1
        )
        self.staging.stage(command, [memoryview(body)], bytes(8))
        self.batches[name] += 1

    def close(self, name: str) -> None:
        def done(result: Callable[[], None]) -> None:
            try:
                result()
            except CometError as error:
                self.told.append(type(error).__name__)
            else:
                self.told.append("Done")

        command = CloseStage(child.SINK, self.epoch, name, self.batches[name])
        self.staging.close_stage(command, done)

    def drop(self, name: str) -> None:
        self.batches.pop(name, None)
        self.staging.drop(DropStages(child.SINK, self.epoch, [name]))

    def commit(self, name: str) -> StagesCommitted:
        done = self.staging.commit(CommitStages(child.SINK, self.epoch, [name]))
        self.epoch += 1
        self.batches.clear()
        return done

    def do(self, word: str, name: str) -> None:
        """One command; what may be refused is, with an error of ours."""
        try:
            getattr(self, word)(name)
        except (MessageNotFound, OffsetIllegal, SystemBusy):
            self.batches.pop(name, None)


def test_what_was_staged_while_its_name_was_being_closed_and_dropped(
    writer: child.Writer, others: Others
) -> None:
    """The four commands, in one go, before the disk has answered the second."""
    session = Session(writer)
    session.stage("a")
    session.close("a")
    session.drop("a")
    others.take()
    with pytest.raises(SystemBusy, match=r"stage a .* is being dropped"):
        session.stage("a")
    others.take()
    session.syncer.step()
    others.take()
    others.check()
    assert session.told == ["MessageNotFound"]
    session.stage("a")  # a new one, of that name
    session.close("a")
    session.syncer.step()
    others.check()
    assert session.told == ["MessageNotFound", "Done"]
    assert session.commit("a").messages == 1
    assert writer.staging.files.size == 0


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_commands_touches_nobody_else_s_descriptor(
    writer: child.Writer, others: Others, seed: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    session = Session(writer)
    for _ in range(80):
        word = chance.choice(WORDS)
        if word == "others":
            others.take()
        elif word == "synced":
            session.syncer.step()
        else:
            session.do(word, chance.choice(STAGES))
        others.check()
    session.syncer.shutdown()
    others.check()
    for name in STAGES:
        session.drop(name)
    assert writer.staging.files.open_count == 0
    assert writer.staging.files.size == 0
    assert not list((writer.store / STAGES_DIR / child.SINK).glob("*.*"))
    assert len(writer.messages()) == writer.staging.committed


def test_a_stage_that_could_not_be_synced_is_gone(
    writer: child.Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have dropped its pages: a second try must not report success."""
    session = Session(writer)
    session.stage("a")
    session.close("a")

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    session.syncer.step()
    monkeypatch.undo()
    assert session.told == [StoreError.__name__]
    with pytest.raises(OffsetIllegal, match="stage a has 0 batches, not 1"):
        session.close("a")
    assert writer.staging.files.size == writer.staging.files.open_count == 0


def test_to_close_what_is_not_there_opens_nothing(writer: child.Writer) -> None:
    session = Session(writer)
    for number in range(5):
        with pytest.raises(OffsetIllegal, match="has 0 batches, not 1"):
            writer.staging.close_stage(
                CloseStage(child.SINK, 0, f"none-{number}", 1), lambda _result: None
            )
    assert session.staging.files.open_count == 0
    assert not (writer.store / STAGES_DIR / child.SINK).exists()


def test_a_stage_without_messages_is_closed_too(writer: child.Writer) -> None:
    """A task that had none; as many at a time as stages may be open."""
    session = Session(writer)
    session.close("a")
    session.syncer.step()
    assert session.told == ["Done"]
    assert session.commit("a") == StagesCommitted(already=False, messages=0)
    for number in range(OPEN_STAGES_MAX):
        session.close(f"empty-{number}")
    with pytest.raises(SystemBusy, match="512 stages are open"):
        session.close("one-more")
    session.syncer.shutdown()
    assert writer.staging.files.open_count == 0


def test_commands_in_one_go_do_not_end_the_commitlog_process(tmp_path: Path) -> None:
    """By a socket, again and again: the same process still serves."""
    body = encode_batch([b"x"])
    seed = int.from_bytes(os.urandom(3))
    print(f"seed {seed}")
    chance = random.Random(seed)
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        pid = broker.pids()["commitlog"]
        with Channel(broker.endpoints.commitlog) as channel:
            for number in range(60):
                sink = f"s-{number % 3}"
                whole: list[Command] = [
                    StageMessages(sink, number, "a", 0, [Section("t", 0, 1)], 1),
                    CloseStage(sink, number, "a", 1),
                    DropStages(sink, number, ["a"]),
                    StageMessages(sink, number, "a", 0, [Section("t", 0, 1)], 1),
                    CommitStages(sink, number, ["a"]),
                ]
                if number % 2:
                    chance.shuffle(whole)
                ask_at_once(channel, whole, body)
        assert broker.pids()["commitlog"] == pid
        assert broker.statistics()["restarts"] == 0
        assert "Traceback" not in broker.log


def ask_at_once(channel: Channel, commands: list[Command], body: bytes) -> None:
    """All sent before the first is answered; each is answered."""
    answered = threading.Event()
    left = [len(commands)]

    def one_more(_pending: object) -> None:
        left[0] -= 1
        if not left[0]:
            answered.set()

    for command in commands:
        payload = [body] if isinstance(command, StageMessages) else []
        channel.request(command, payload, on_done=one_more)
    assert answered.wait(patient(30)), left
