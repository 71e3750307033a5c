"""Epochs of sinks: none bars those that follow (Fault 17)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from family import RunningBroker, encode_batch
from patience import patient

from cometmq.actors.tables.producers import AHEAD_MAX_MS
from cometmq.actors.tables.sinks import (
    COUNT_MAX,
    REPEATS_MAX,
    check_epoch,
    epoch_max,
    is_begun_anew,
)
from cometmq.client.sending.staging import SinkLine, StageWriter
from cometmq.protocol.commands import (
    AppendRecords,
    CloseStage,
    Command,
    CommitStages,
    Derivation,
    Position,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.errors import BadRequest, MessageNotFound
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.state.staging import STAGES_DIR

WAIT_S = patient(90)
NOW_MS = 1_764_028_800_000
FAR = [(1 << 63) - 1, (1 << 62) - 1, 1 << 53, 10**15, 10**13]
ONE = StagesCommitted(already=False, messages=1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("sinks") / "store") as running:
        running.create_topic("t", 2)
        yield running


@pytest.fixture
def line(broker: RunningBroker) -> Iterator[SinkLine]:
    with SinkLine(broker.ready.name_server, f"s-{os.urandom(4).hex()}", timeout_s=WAIT_S) as found:
        found.queues("t")
        yield found


def fill(line: SinkLine, stage: str, epoch: int) -> list[str]:
    """Close a stage with one message."""
    writer = StageWriter(line, epoch, stage)
    writer.queues("t")
    writer.send("t", 0, encode_batch([b"%d" % epoch]), 1)
    writer.finish()
    return [stage]


def ask(broker: RunningBroker, command: Command, *payload: bytes) -> None:
    with Channel(broker.address("commitlog")) as channel:
        channel.ask(command, payload, timeout_s=WAIT_S)


@pytest.mark.parametrize("claimed", FAR)
@pytest.mark.parametrize("last", [None, 0, 41])
def test_epoch_that_no_sink_comes_to_is_refused(
    broker: RunningBroker, line: SinkLine, claimed: int, last: int | None
) -> None:
    if last is not None:
        assert line.commit(last, fill(line, "a", last)) == ONE
    refused = f"epoch {claimed}: 0 to [0-9]+ are allowed"
    staged = StageMessages(line.sink, claimed, "far", 0, [Section("t", 0, 1)], 1)
    with pytest.raises(BadRequest, match=refused):
        ask(broker, staged, encode_batch([b"x"]))
    with pytest.raises(BadRequest, match=refused):
        ask(broker, CloseStage(line.sink, claimed, "far", 0))
    with pytest.raises(BadRequest, match=refused):
        ask(broker, CommitStages(line.sink, claimed, []))
    line.drop(claimed, ["far"])  # one that an older release took
    following = 0 if last is None else last + 1
    stages = fill(line, "b", following)
    assert line.commit(following, stages) == ONE
    assert line.commit(following, stages).already


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_empty", [False, True])
def test_highest_epoch_bars_no_sink(
    broker: RunningBroker, line: SinkLine, is_empty: bool, is_known: bool
) -> None:
    """It may be committed, and the sink's own epochs are stored behind it, once."""
    if is_known:
        assert line.commit(6, fill(line, "first", 6)) == ONE
    far = epoch_max(int(time.time() * 1000))
    assert not line.commit(far, [] if is_empty else fill(line, "foreign", far)).already
    assert line.commit(7, []).already  # without messages nothing is lost
    with pytest.raises(MessageNotFound, match="stage none"):
        line.commit(7, ["none"])
    assert line.commit(far, ["none"]).already  # it is as it was
    for epoch in (7, 8):
        stages = fill(line, "a", epoch)
        assert line.commit(epoch, stages) == ONE
        assert line.commit(epoch, stages).already
    assert line.commit(6, fill(line, "again", 6)).already
    assert f"sink {line.sink} begins anew with epoch 7" in broker.log


def test_restarted_broker_knows_that_a_sink_began_anew(
    broker: RunningBroker, line: SinkLine
) -> None:
    assert line.commit(2_000_000, fill(line, "foreign", 2_000_000)) == ONE
    assert line.commit(7, fill(line, "a", 7)) == ONE
    broker.kill("commitlog")
    assert line.commit(7, ["a"]).already
    assert line.commit(8, fill(line, "b", 8)) == ONE


@pytest.mark.parametrize("is_recorded", [False, True])
def test_sink_that_an_older_release_barred_commits_again(
    broker: RunningBroker, line: SinkLine, is_recorded: bool
) -> None:
    """By its position in the log, or by its record of a release before 0.2.0."""
    far = (1 << 63) - 1
    if is_recorded:
        folder = broker.store / STAGES_DIR / line.sink
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record").write_text(f'{{"epoch": {far}, "decision": null}}')
    else:
        barred = Derivation(f"sink.{line.sink}", Position(), Position(far, far))
        with Channel(broker.address("commitlog")) as channel:
            channel.ask(AppendRecords([], 0, derived=barred), [b""], timeout_s=WAIT_S)
        broker.kill("commitlog")
    for epoch in (42, 43):
        stages = fill(line, "a", epoch)
        assert line.commit(epoch, stages) == ONE
        assert line.commit(epoch, stages).already
    broker.kill("commitlog")  # more kills at once, and the broker starts no more of them
    assert line.commit(43, ["a"]).already


def test_bounds_of_epochs() -> None:
    most = NOW_MS + AHEAD_MAX_MS
    for epoch in (0, 1, 10**10, NOW_MS, most):
        check_epoch("s", epoch, NOW_MS)
    for epoch in (-1, most + 1, *FAR):
        with pytest.raises(BadRequest, match=f"sink s: epoch {epoch}: 0 to {most} are allowed"):
            check_epoch("s", epoch, NOW_MS)


def test_what_is_a_repeat() -> None:
    for epoch, last in (
        (5, 5), (0, 0), (4, 5), (0, REPEATS_MAX), (3_000_000, 3_000_000 + REPEATS_MAX),
        (NOW_MS, NOW_MS), (NOW_MS - 86_400_000, NOW_MS), (COUNT_MAX + 1, NOW_MS),
    ):  # fmt: skip
        assert not is_begun_anew(epoch, last, NOW_MS), (epoch, last)
    for epoch, last in (
        (0, REPEATS_MAX + 1), (41, NOW_MS), (41, NOW_MS + AHEAD_MAX_MS), (41, (1 << 63) - 1),
        (NOW_MS, (1 << 62) - 1),
    ):  # fmt: skip
        assert is_begun_anew(epoch, last, NOW_MS), (epoch, last)
    assert not is_begun_anew(6, 5, NOW_MS)
    assert not is_begun_anew(0, -1, NOW_MS)  # of a sink that has committed nothing
