"""The family of processes as a whole: start, end, kills under load, refusals, waiting."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import reference
from family import (
    CHILDREN,
    Load,
    RunningBroker,
    Sent,
    encode_batch,
    left_behind,
    pull,
    send_batch,
)
from patience import patient
from ports import free_ports
from still import go_on, stop, stopped
from waiting import until

from cometmq.actors.writer.opening import SYNC_HERE_BYTES
from cometmq.protocol.commands import (
    DiskState,
    Finish,
    FoundOffset,
    GetMessageAt,
    GetQueueRange,
    PullMessages,
    PullResult,
    PullStatus,
    QueueRange,
    SearchOffset,
    Section,
    SendMessages,
    SendResult,
)
from cometmq.protocol.errors import (
    CometError,
    DiskFull,
    FlushDiskTimeout,
    MessageIllegal,
    MessageNotFound,
    MessageTooLarge,
    NameIllegal,
    NotConfirmed,
    NotReachable,
    ShuttingDown,
    StoreLocked,
    StoreNotOurs,
    TopicNotExist,
)
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Doorbell
from cometmq.shm.live.queue_table import QUEUES_FILE
from cometmq.shm.os.files import ABORT_FILE, STAGING_DIR, Checkpoint

START_MAX_S = 2.0
WAIT_S = patient(60)
TOO_MUCH_TO_SYNC = bytes(SYNC_HERE_BYTES)  # for the commitlog process: the flush process does


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[RunningBroker]:
    with RunningBroker(store) as running:
        yield running


def unix_sockets() -> str:
    return Path("/proc/net/unix").read_text()


def marks(store: Path) -> list[str]:
    """What an orderly end does not leave."""
    names = (ABORT_FILE, CONTROL_FILE, QUEUES_FILE, STAGING_DIR)
    return [name for name in names if (store / name).exists()]


# --- start and end --------------------------------------------------------------------------------


@pytest.mark.alone
def test_starts_quickly(tmp_path: Path) -> None:
    """One of three: how long a start takes says what else the machine does."""
    took = []
    while not took or (len(took) < 3 and took[-1] >= START_MAX_S):
        with RunningBroker(tmp_path / f"store{len(took)}", program=True) as broker:
            took.append(broker.start_s)
    assert min(took) < START_MAX_S, took


def test_its_processes(store: Path) -> None:
    with RunningBroker(store) as broker:
        pids = broker.pids()
        assert set(pids) == set(CHILDREN)
        assert all(pids.values())
        assert len(broker.processes()) == len(CHILDREN) + 2  # the supervisor and the zygote
        names = {psutil.Process(pid).name() for pid in pids.values()}
        assert names == {f"cmq-{role}"[:15] for role in CHILDREN}


def test_every_process_answers_for_itself(broker: RunningBroker) -> None:
    for role in (*CHILDREN, "broker"):
        assert isinstance(broker.statistics(role), dict), role


def test_an_orderly_end_leaves_nothing_behind(store: Path) -> None:
    broker = RunningBroker(store)
    token = broker.ready.token
    broker.create_topic("t")
    sent = [one for queue in range(4) for one in broker.send("t", queue, [b"x" * 9_000] * 100)]
    assert token in unix_sockets()
    until(lambda: len(list((store / "commitlog").iterdir())) > 4)  # those ready ahead among them
    assert sorted(marks(store)) == sorted([ABORT_FILE, CONTROL_FILE, QUEUES_FILE, STAGING_DIR])

    assert broker.close() == 0
    assert marks(store) == []
    assert token not in unix_sockets()
    assert reference.check_store(store) == []
    assert len(reference.messages(store)) == len(sent)
    used = -(-(len(sent) * 9_000) // (1 << 20))
    assert len(list((store / "commitlog").iterdir())) == used
    checkpoint = reference.read_checkpoint(store)
    last = reference.records(store)[-1].store_timestamp
    assert checkpoint.physic_msg_timestamp == last
    assert checkpoint.logics_msg_timestamp == last
    broker.until_logged("finished in order")


def test_an_empty_store_ends_in_order_too(store: Path) -> None:
    assert RunningBroker(store).close() == 0
    assert marks(store) == []
    assert list((store / "commitlog").iterdir()) == []
    assert reference.check_store(store) == []


def test_a_signal_ends_it_in_order(store: Path) -> None:
    """Each of three."""
    sent: list[Sent] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with RunningBroker(store) as broker:
            assert not sent or "after an orderly end" in broker.log
            broker.assert_stored(sent)
            broker.create_topic("t")
            sent += broker.send("t", 0, [b"a", b"b"])
            os.kill(broker.pid, number)
            assert broker.wait_ended() == 0, number
            assert marks(store) == [], number
    with RunningBroker(store) as broker:
        broker.until_logged("after an orderly end")
        broker.assert_stored(sent)


@pytest.mark.slow
def test_sending_while_it_ends(store: Path) -> None:
    """Whoever sends meanwhile is told so, or gets no answer; what was acknowledged is there."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        with Load(broker, "t") as load:
            load.wait_for_more(500)
            os.kill(broker.pid, signal.SIGTERM)
            assert broker.wait_ended() == 0
    assert reference.check_store(store) == []
    with RunningBroker(store) as broker:
        load.broker = broker
        load.check()


def test_a_second_start_goes_on(store: Path) -> None:
    sent = []
    for _ in range(3):
        with RunningBroker(store) as broker:
            broker.create_topic("t")
            sent += broker.send("t", 0, [b"one", b"two"])
            broker.assert_stored(sent)
    assert [one.queue_offset for one in sent] == list(range(6))


# --- kills under load -----------------------------------------------------------------------------


def end_under_load(
    store: Path,
    roles: list[str],
    seed: int,
    end: Callable[[RunningBroker, str], int] = RunningBroker.kill,
    **settings: object,
) -> None:
    """Each role in turn ends at a random moment; the others go on, and nothing is lost."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t")
        with Load(broker, "t", seed=seed) as load:
            for role in roles:
                load.wait_for_more(chance.randrange(1, 800))
                before = broker.pids()
                replaced = end(broker, role)
                after = broker.pids()
                assert after[role] == replaced
                assert {**before, role: replaced} == after, "others have ended as well"
            load.wait_for_more(100)
        load.check()
        assert broker.statistics()["restarts"] == len(roles)
        assert broker.close() == 0
    assert reference.check_store(store) == []


@pytest.mark.parametrize("seed", [pytest.param(1, id="seed1")])
@pytest.mark.slow
def test_a_child_is_killed_again_and_again_under_load(seed: int, store: Path) -> None:
    """Each of them, before it is the next one's turn."""
    end_under_load(store, [role for role in CHILDREN for _ in range(2)], seed)


@pytest.mark.parametrize("seed", [pytest.param(2, id="seed2")])
@pytest.mark.slow
def test_children_are_killed_in_any_order(seed: int, store: Path) -> None:
    roles = list(CHILDREN)
    random.Random(seed).shuffle(roles)
    end_under_load(store, roles, seed)


@pytest.mark.parametrize("seed", [pytest.param(3, id="seed3")])
@pytest.mark.slow
def test_children_are_killed_under_load_with_sync_flush(seed: int, store: Path) -> None:
    roles = ["commitlog", "flush", "dispatcher"] * 2
    end_under_load(store, roles, seed, flushDiskType="SYNC_FLUSH")


@pytest.mark.parametrize("seed", [pytest.param(4, id="seed4")])
@pytest.mark.slow
def test_children_that_finish_under_load_are_started_again(seed: int, store: Path) -> None:
    """An orderly end of one child alone takes nothing away that the others go on with."""
    roles = list(CHILDREN)
    random.Random(seed).shuffle(roles)
    end_under_load(store, roles, seed, RunningBroker.finish)


def test_a_signal_to_the_whole_group_ends_it_in_order(store: Path) -> None:
    with RunningBroker(store) as broker:
        os.killpg(broker.pid, signal.SIGTERM)
        assert broker.wait_ended() == 0
    assert marks(store) == []


def test_a_signal_to_a_child_is_the_supervisors_business(store: Path) -> None:
    """It may have gone to the whole group; the family ends in order when the supervisor says so."""
    with RunningBroker(store) as broker:
        before = broker.pids()
        broker.create_topic("t")
        with Load(broker, "t", seed=4) as load:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                for role in CHILDREN:
                    os.kill(before[role], number)
                load.wait_for_more(200)
                assert broker.pids() == before, number
        load.check()


def test_what_was_sent_in_front_of_the_end_is_kept(store: Path) -> None:
    """Messages and the order to finish, found in the socket together."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        before = broker.pids()["commitlog"]
        line = broker.channel(broker.address("commitlog"))
        with stopped(before):
            sent = line.request(
                SendMessages([Section("t", 0, 1)], 1_700_000_000_000),
                [encode_batch([b"last words"])],
            )
            line.tell(Finish())
        assert line.wait(sent, WAIT_S)
        answer, _ = sent.result()
        assert isinstance(answer, SendResult)
        assert [result.code for result in answer.results] == [0]
        broker.wait_serves("commitlog", not_pid=before)
        (message,) = broker.read_queue("t", 0, 1)
        assert message.body == b"last words"


@pytest.mark.parametrize("seed", [pytest.param(1, id="seed1")])
@pytest.mark.slow
def test_several_children_are_killed_at_once(seed: int, store: Path) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        with Load(broker, "t", seed=seed) as load:
            for _ in range(3):
                load.wait_for_more(chance.randrange(1, 500))
                before = broker.pids()
                victims = chance.sample(CHILDREN, 3)
                for role in victims:
                    os.kill(before[role], signal.SIGKILL)
                for role in victims:
                    broker.wait_serves(role, not_pid=before[role])
            load.wait_for_more(100)
        load.check()


@pytest.mark.parametrize("seed", [pytest.param(2, id="seed2")])
@pytest.mark.slow
def test_all_are_killed_at_once(seed: int, store: Path) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        with Load(broker, "t", seed=seed) as load:
            load.wait_for_more(chance.randrange(1, 1_500))
            broker.kill_all()
    assert (store / ABORT_FILE).exists()
    with RunningBroker(store) as broker:
        broker.until_logged("commitlog recovered after a bad end")
        load.broker = broker
        load.check()
        # And it goes on where it was.
        load.acknowledged += broker.send("t", 0, [b"0 0"])
        broker.assert_stored(load.acknowledged)
        assert broker.close() == 0
    assert reference.check_store(store) == []


@pytest.mark.slow
def test_killed_again_and_again(store: Path) -> None:
    """Every start recovers what the one before left, and adds to it."""
    sent = []
    for round_number in range(4):
        with RunningBroker(store) as broker:
            broker.create_topic("t")
            broker.assert_stored(sent)
            for queue in range(4):
                sent += broker.send("t", queue, [b"%d" % round_number * 5_000] * 20)
            broker.kill_all()
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)


@pytest.mark.slow
def test_the_supervisor_is_killed(store: Path) -> None:
    """The others notice and end by themselves; the next start recovers."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        with Load(broker, "t", seed=5) as load:
            load.wait_for_more(1_000)
            broker.kill_supervisor()
            broker.wait_gone(10)
        broker.wait_ended()
        assert broker.ready.token not in unix_sockets()
    with RunningBroker(store) as broker:
        broker.until_logged("after a bad end")
        load.broker = broker
        load.check()


@pytest.mark.slow
def test_the_zygote_is_killed(store: Path) -> None:
    """Nobody could start children any more: the broker ends, and says why."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        with Load(broker, "t", seed=6) as load:
            load.wait_for_more(500)
            os.kill(broker.zygote_pid(), signal.SIGKILL)
            broker.wait_gone()
        assert broker.wait_ended() != 0
        broker.until_logged("zygote")
    with RunningBroker(store) as broker:
        load.broker = broker
        load.check()


# After an orderly end or a kill of the broker before (odd), by SIGTERM (0, 5) or SIGKILL.
@pytest.mark.parametrize("seed", [0, 1, 2, 5])
@pytest.mark.slow
def test_killed_while_it_starts(seed: int, store: Path) -> None:
    """At any moment of its start: nothing is left running, and the next start is a good one."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        sent = [one for queue in range(4) for one in broker.send("t", queue, [b"x" * 3_000] * 50)]
        if seed % 2:
            broker.kill_all()
    chance = random.Random(seed)
    print(f"seed {seed}")
    broker = RunningBroker(store, wait=False)
    supervisor = psutil.Process(broker.pid)
    with contextlib.suppress(psutil.TimeoutExpired):
        supervisor.wait(chance.uniform(0.1, 0.5))  # the moment
    supervisor.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
    broker.wait_ended()
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)
        assert broker.close() == 0
    assert reference.check_store(store) == []


def test_a_wake_up_that_died_with_its_process(broker: RunningBroker) -> None:
    """Killed between moving a counter and waking who sleeps on it: the sleepers hear of it."""
    broker.create_topic("t")
    sent = broker.send("t", 0, [b"first"])
    broker.assert_stored(sent)
    control = ControlFile.open(broker.store / CONTROL_FILE, writable=True)
    lost = False
    for _ in range(200):  # until the dispatcher slept before its flag was taken away
        for doorbell in (Doorbell.DISPATCHER, Doorbell.FLUSH):
            control.sleep_on(Counter.WROTE, doorbell).disarm()
        sent += broker.send("t", 0, [b"unheard"])
        os.sched_yield()
        if control.read(Counter.DISPATCHED).value < control.read(Counter.WROTE).value:
            pull(broker.reader, PullMessages("t", 1, 0, suspend_ms=100))  # in vain, for that time
            lost = control.read(Counter.DISPATCHED).value < control.read(Counter.WROTE).value
        if lost:
            break
        broker.assert_stored(sent)
    assert lost
    broker.kill("commitlog")
    broker.assert_stored(sent)


@pytest.mark.slow
def test_a_child_that_dies_again_and_again_ends_the_broker(store: Path) -> None:
    with RunningBroker(store) as broker:
        pid = broker.pids()["cleaner"]
        broker.end(pid)
        while not broker.has_ended:
            with contextlib.suppress(NotConfirmed, NotReachable):  # the supervisor is about to end
                now = broker.statistics(timeout_s=2)["pid.cleaner"]
                if now not in (0, pid):
                    pid = int(now)
                    broker.end(pid)
        assert broker.wait_ended() == 1
        broker.until_logged("cleaner ended by SIGKILL")
        assert (store / ABORT_FILE).exists()
    with RunningBroker(store):
        pass


# --- what cannot start ----------------------------------------------------------------------------


def refused(store: Path, error: type[CometError], settings: dict[str, object] | None = None) -> str:
    """The text with which a start is refused. Nothing is left running."""
    with pytest.raises(error) as raised:
        RunningBroker(store, settings).close()
    assert left_behind() == []
    return str(raised.value)


def test_a_store_in_use_names_its_holder(store: Path) -> None:
    with RunningBroker(store, program=True) as broker:
        broker.create_topic("t")
        holder = f"process {broker.pid} .*cometmq.actors.launch.embedded"
        with pytest.raises(StoreLocked, match=holder):
            RunningBroker(store)
        assert len(left_behind()) == len(broker.processes())
        broker.assert_stored(broker.send("t", 0, [b"undisturbed"]))
        assert all(broker.pids().values())


HOLD_LOCK = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print(flush=True)
sys.stdin.read()
"""


def test_a_store_that_a_rocketmq_holds(store: Path) -> None:
    RunningBroker(store).close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(store / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        holder.stdout.readline()
        text = refused(store, StoreLocked)
        assert f"process {holder.pid}" in text
        assert str(store / "lock") in text
        holder.stdin.close()
    with RunningBroker(store):
        pass


def foreign_file(store: Path) -> str:
    (store / "commitlog" / "notes.txt").write_text("x")
    return "notes.txt"


def wrong_size(store: Path) -> str:
    (path,) = sorted((store / "commitlog").iterdir())
    os.truncate(path, 4096)
    return "mappedFileSizeCommitLog = 1048576, but the segments in"


def wrong_queue_size(store: Path) -> str:
    for path in (store / "consumequeue").glob("*/*/*"):  # a single one would be built again
        os.truncate(path, 4_000)
    return "mappedFileSizeConsumeQueue = 2000, but the segments in"


def damaged_checkpoint(store: Path) -> str:
    (store / "checkpoint").write_bytes(b"short")
    return "checkpoint: 5 bytes"


@pytest.mark.parametrize(
    "trouble", [foreign_file, wrong_size, wrong_queue_size, damaged_checkpoint]
)
def test_a_store_that_is_not_as_it_must_be(trouble: Callable[[Path], str], store: Path) -> None:
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        broker.send("t", 0, [b"x"])
    said = trouble(store)
    assert said in refused(store, CometError)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [foreign_file, wrong_size])
def test_a_refused_start_is_no_bad_end(trouble: Callable[[Path], str], store: Path) -> None:
    """Nothing was touched, so the next start need not recover."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        sent = broker.send("t", 0, [b"x"])
    (path,) = (store / "commitlog").iterdir()
    before = path.read_bytes()
    trouble(store)
    refused(store, StoreNotOurs)
    assert marks(store) == []
    for left in (store / "commitlog").iterdir():
        left.unlink()
    path.write_bytes(before)
    with RunningBroker(store) as broker:
        broker.until_logged("after an orderly end")
        broker.assert_stored(sent)


def test_a_folder_that_is_not_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    assert "thesis.tex" in refused(folder, StoreNotOurs)
    assert sorted(path.name for path in folder.iterdir()) == ["thesis.tex"]


def test_a_file_in_place_of_the_store(store: Path) -> None:
    store.write_text("x")
    assert "is a file" in refused(store, StoreNotOurs)


def test_fixed_ports(store: Path) -> None:
    base = free_ports(5)
    with RunningBroker(store, {"port": base}) as broker:
        assert broker.ready.name_server == f"tcp://127.0.0.1:{base}"
        assert broker.endpoints.commitlog == f"tcp://127.0.0.1:{base + 1}"
        assert broker.endpoints.coordinator == f"tcp://127.0.0.1:{base + 2}"
        assert broker.endpoints.readers == [f"tcp://127.0.0.1:{base + 3}"]
        broker.create_topic("t")
        sent = broker.send("t", 0, [b"x"])
        before = broker.endpoints.commitlog
        broker.kill("commitlog")
        del broker.endpoints
        assert broker.endpoints.commitlog == before
        broker.assert_stored(sent + broker.send("t", 0, [b"y"]))


@pytest.mark.parametrize("behind", range(4))
def test_a_taken_port(behind: int, store: Path) -> None:
    base = free_ports(5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + behind))
        taken.listen()
        text = refused(store, CometError, {"port": base})
    assert f"port {base + behind} is taken by process {os.getpid()}" in text
    with RunningBroker(store, {"port": base}):
        pass


# --- flushing -------------------------------------------------------------------------------------


def test_sync_flush_answers_when_it_is_on_the_disk(store: Path) -> None:
    with RunningBroker(store, {"flushDiskType": "SYNC_FLUSH"}) as broker:
        broker.create_topic("t")
        with broker.control() as control:
            flushed = control.read(Counter.FLUSHED)
            for number in range(200):
                (sent,) = broker.send("t", number % 4, [b"x" * number])
                assert flushed.value > sent.physical_offset + number
        broker.create_topic("t2", 8)
        before = broker.counter(Counter.FLUSHES) + broker.counter(Counter.SYNCS)
        with Load(broker, "t2", queues=8, threads=8) as load:
            load.wait_for_more(2_000)
        batches = len(load.acknowledged) // load.batch_count
        syncs = broker.counter(Counter.FLUSHES) + broker.counter(Counter.SYNCS) - before
        assert syncs < batches  # many by one
        load.check()


def test_sync_flush_of_little_is_the_commitlog_process_s_own(store: Path) -> None:
    """The flush process sleeps, but for its intervals, and its checkpoint follows all the same."""
    settings = {
        "flushDiskType": "SYNC_FLUSH",
        "syncFlushTimeout": 2_000,
        "flushIntervalConsumeQueue": 20,
        "flushConsumeQueueThoroughInterval": 40,
    }
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t")
        deadline = time.monotonic() + WAIT_S
        while (flushes := flushes_before_sending(broker, 50)) is None:
            assert time.monotonic() < deadline, "the disk is slow all the time"
        stored_at = broker.counter(Counter.WROTE_TIMESTAMP)
        deadline = time.monotonic() + WAIT_S
        while Checkpoint(store).words["physic_msg_timestamp"] < stored_at:
            assert time.monotonic() < deadline
            broker.statistics("flush")
        assert broker.counter(Counter.FLUSHES) == flushes


def flushes_before_sending(broker: RunningBroker, count: int) -> int | None:
    """How often the flush process had flushed before so many were sent without it. None where a
    sync took so long (SLOW_S), for others use the disk, that it was asked for the next one."""
    with stopped(broker.pids()["flush"]):
        flushes, syncs = broker.counter(Counter.FLUSHES), broker.counter(Counter.SYNCS)
        try:
            sent = [broker.send("t", 0, [b"%d" % number])[0] for number in range(count)]
        except FlushDiskTimeout:
            return None
        assert broker.counter(Counter.SYNCS) - syncs == count
        assert broker.counter(Counter.FLUSHED) == broker.counter(Counter.WROTE)
        broker.assert_stored(sent)
    return flushes


def test_what_a_killed_commitlog_process_did_not_ask_for_is_flushed(store: Path) -> None:
    """It has published `wrote`, and died before its sync: nobody but the next one can know."""
    settings = {"flushDiskType": "SYNC_FLUSH"}
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t")
        sent = broker.send("t", 0, [b"before"])  # there is a connection
        old = broker.pids()["commitlog"]
        with stopped(broker.pids()["flush"]):
            for body in (TOO_MUCH_TO_SYNC, b"waits behind it"):
                wrote = broker.counter(Counter.WROTE)
                with pytest.raises(NotConfirmed):
                    broker.send("t", 0, [body], timeout_s=0.1)
                until(lambda wrote=wrote: broker.counter(Counter.WROTE) > wrote)
            control = ControlFile.open(store / CONTROL_FILE, writable=True)
            control.own(Counter.SYNC_WANTED).reset(0)  # as if it had not come so far
            broker.end(old)
        broker.wait_serves("commitlog", not_pid=old)
        assert [m.body for m in broker.read_queue("t", 0, 3)][2] == b"waits behind it"
        sent += broker.send("t", 0, [b"after"])
        broker.assert_stored(sent)


@pytest.mark.slow
def test_sync_flush_that_is_late(store: Path) -> None:
    """FLUSH_DISK_TIMEOUT: stored, not shown, and shown once the disk has it."""
    settings = {"flushDiskType": "SYNC_FLUSH", "syncFlushTimeout": 3_000}
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t")
        sent = broker.send("t", 0, [b"before"])
        broker.assert_stored(sent)
        flush = broker.pids()["flush"]
        stop(flush)
        began = time.monotonic()
        with pytest.raises(FlushDiskTimeout, match="not flushed within 3000 ms"):
            broker.send("t", 0, [TOO_MUCH_TO_SYNC])
        assert time.monotonic() - began > 2.9
        assert broker.counter(Counter.FLUSHED) < broker.counter(Counter.WROTE)
        assert [m.body for m in broker.read_queue("t", 0)] == [b"before"]
        assert broker.statistics("commitlog")["waiting_for_flush"] == 0

        answers: list[object] = []
        sender = threading.Thread(target=lambda: answers.append(broker.send("t", 1, [b"just"])))
        sender.start()
        while not broker.statistics("commitlog")["waiting_for_flush"]:
            assert sender.is_alive()
        go_on(flush)
        sender.join(WAIT_S)
        assert answers
        sent += broker.send("t", 0, [b"after"])
        messages = broker.read_queue("t", 0, 3)
        assert [message.body for message in messages] == [b"before", TOO_MUCH_TO_SYNC, b"after"]


def test_async_flush_answers_at_once_and_flushes_soon(store: Path) -> None:
    with RunningBroker(store, {"flushIntervalCommitLog": 50}) as broker:
        broker.create_topic("t")
        with stopped(broker.pids()["flush"]):
            broker.send("t", 0, [b"x" * 100_000])
            wrote = broker.counter(Counter.WROTE)
        with broker.control() as control:
            flushed = control.read(Counter.FLUSHED)
            deadline = time.monotonic() + WAIT_S
            while flushed.value < wrote:
                assert time.monotonic() < deadline
                broker.statistics("flush")  # one round trip through its loop


# --- reading --------------------------------------------------------------------------------------


def held_pull(
    broker: RunningBroker, command: PullMessages
) -> tuple[list[PullResult], threading.Thread]:
    """A pull in a thread; returns once the reader holds it."""
    answers: list[PullResult] = []
    with broker.control():
        line = broker.channel(broker.endpoints.readers[0])
    thread = threading.Thread(target=lambda: answers.append(pull(line, command)[0]))
    thread.start()
    while not broker.statistics("reader-0")["held_pulls"]:
        assert thread.is_alive()
    return answers, thread


def test_a_held_pull_is_answered_when_a_message_comes(broker: RunningBroker) -> None:
    broker.create_topic("t")
    broker.read_queue("t", 0)  # lines are open
    answers, thread = held_pull(broker, PullMessages("t", 0, 0, suspend_ms=30_000))
    began = time.monotonic()
    broker.send("t", 0, [b"news"])
    thread.join(WAIT_S)
    assert time.monotonic() - began < patient(20)
    assert answers[0].status == PullStatus.FOUND
    assert answers[0].count == 1


def test_a_held_pull_hears_of_its_own_queue_and_tags_only(broker: RunningBroker) -> None:
    broker.create_topic("t")
    command = PullMessages("t", 0, 0, suspend_ms=30_000, tags="wanted")
    answers, thread = held_pull(broker, command)
    broker.assert_stored(broker.send("t", 1, [b"elsewhere"], tags="wanted"))
    broker.assert_stored(broker.send("t", 0, [b"other"], tags="other"))
    assert broker.statistics("reader-0")["held_pulls"] == 1
    assert answers == []
    broker.send("t", 0, [b"it"], tags="wanted")
    thread.join(WAIT_S)
    assert (answers[0].status, answers[0].count) == (PullStatus.FOUND, 1)
    assert answers[0].next_queue_offset == 2


def test_a_held_pull_is_answered_when_its_time_is_up(broker: RunningBroker) -> None:
    broker.create_topic("t")
    broker.assert_stored(broker.send("t", 0, [b"x"], tags="other"))
    for queue, tags, status in (
        (1, "*", PullStatus.NO_NEW_MESSAGE),
        (0, "wanted", PullStatus.NO_MATCHED_MESSAGE),
    ):
        began = time.monotonic()
        command = PullMessages("t", queue, 0, suspend_ms=200, tags=tags)
        answer, _ = pull(broker.reader, command)
        assert 0.19 < time.monotonic() - began < patient(20)
        assert answer.status in (status, PullStatus.NO_NEW_MESSAGE)
    assert broker.statistics("reader-0")["held_pulls"] == 0


def test_held_pulls_are_let_go_at_the_end(store: Path) -> None:
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        line = broker.channel(broker.endpoints.readers[0])
        pending = line.request(PullMessages("t", 0, 0, suspend_ms=30_000))
        while not broker.statistics("reader-0")["held_pulls"]:
            assert not line.wait(pending, 0.05, keep=True)  # sends it, once there is a connection
        began = time.monotonic()
        os.kill(broker.pid, signal.SIGTERM)
        assert line.wait(pending, WAIT_S)
        with pytest.raises(ShuttingDown):
            pending.result()
        assert time.monotonic() - began < patient(20)
        assert broker.wait_ended() == 0


def test_pulls_by_tags(broker: RunningBroker) -> None:
    broker.create_topic("t", 1)
    tags = ["Aa", "BB", "café", "标签😀"]  # the first two have one hash
    for number in range(400):
        broker.send("t", 0, [b"%d" % number], tags=tags[number % 4])
    broker.read_queue("t", 0, 400)
    for expression in ("Aa", "café", "标签😀 || café", "*", "nobody"):
        bodies, at = [], 0
        while True:
            answer, messages = pull(broker.reader, PullMessages("t", 0, at, 37, tags=expression))
            bodies += [(int(message.body), message.tags) for message in messages]
            at = answer.next_queue_offset
            if answer.status not in (PullStatus.FOUND,) and at >= 400:
                break
        wanted = [tag.strip() for tag in expression.split("||")]
        same_hash = {"Aa", "BB"}
        expected = [
            (number, tags[number % 4])
            for number in range(400)
            if expression == "*"
            or tags[number % 4] in wanted
            or (tags[number % 4] in same_hash and same_hash & set(wanted))
        ]
        assert bodies == expected, expression


def test_offsets_outside_a_queue(broker: RunningBroker) -> None:
    broker.create_topic("t")
    broker.assert_stored(broker.send("t", 0, [b"x"] * 5))
    for at, status, goes_on in (
        (5, PullStatus.NO_NEW_MESSAGE, 5),
        (6, PullStatus.OFFSET_MOVED, 5),
        (2**62, PullStatus.OFFSET_MOVED, 5),
        (-1, PullStatus.OFFSET_MOVED, 0),
    ):
        answer, _ = pull(broker.reader, PullMessages("t", 0, at))
        assert (answer.status, answer.next_queue_offset) == (status, goes_on), at
        assert (answer.min_queue_offset, answer.max_queue_offset) == (0, 5)
    answer, _ = pull(broker.reader, PullMessages("t", 3, 0))
    assert answer.status == PullStatus.NO_NEW_MESSAGE
    answer, _ = broker.reader.ask(GetQueueRange("t", 0))
    assert answer == QueueRange(0, 5)
    answer, _ = broker.reader.ask(GetQueueRange("nothing", 0))
    assert answer == QueueRange(0, 0)


def test_offsets_by_time(broker: RunningBroker) -> None:
    broker.create_topic("t", 1)
    for number in range(60):
        broker.send("t", 0, [b"%d" % number] * 3)
    messages = broker.read_queue("t", 0, 180)
    times = [message.store_timestamp_ms for message in messages]
    for moment in {0, times[0] - 1, *times, times[-1] + 1}:
        for upper in (False, True):
            answer, _ = broker.reader.ask(SearchOffset("t", 0, moment, upper))
            if upper:
                expected = max([at for at, time_ in enumerate(times) if time_ <= moment], default=0)
            else:
                expected = next((at for at, time_ in enumerate(times) if time_ >= moment), 180)
            assert answer == FoundOffset(expected), (moment - times[0], upper)


def test_a_record_by_its_place(broker: RunningBroker) -> None:
    broker.create_topic("t")
    (sent,) = broker.send("t", 0, [b"here"])
    command = GetMessageAt(sent.physical_offset)
    _, messages = pull(broker.reader, command)  # type: ignore[arg-type]
    assert [message.body for message in messages] == [b"here"]
    for nowhere in (sent.physical_offset + 1, -1, 2**62):
        with pytest.raises(MessageNotFound):
            broker.reader.ask(GetMessageAt(nowhere))


# --- refusals -------------------------------------------------------------------------------------


def test_what_is_not_taken(broker: RunningBroker) -> None:
    broker.create_topic("t", 2)
    line = broker.commitlog
    for topic, queue, body, error in (
        ("unknown", 0, b"x", TopicNotExist),
        ("../x", 0, b"x", NameIllegal),
        ("t", 2, b"x", MessageIllegal),
        ("t", -1, b"x", MessageIllegal),
        ("t", 0, b"x" * (256 * 1024 + 1), MessageTooLarge),
    ):
        with pytest.raises(error):
            send_batch(line, topic, queue, [body])
    sent = broker.send("t", 0, [b"x" * 256 * 1024])
    broker.assert_stored(sent)
    assert [one.queue_offset for one in sent] == [0]


def test_a_full_disk_as_the_cleaner_sees_it(broker: RunningBroker) -> None:
    broker.create_topic("t")
    sent = broker.send("t", 0, [b"x"])
    broker.ask("commitlog", DiskState(False, "the disk is 91.0 % full"))
    with pytest.raises(DiskFull, match=r"91\.0 % full"):
        broker.send("t", 0, [b"y"])
    broker.assert_stored(sent)
    broker.ask("commitlog", DiskState(True))
    broker.assert_stored(sent + broker.send("t", 0, [b"z"]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "cometmq-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        why_not = done.stderr.strip() if done.returncode else None
    except FileNotFoundError:
        why_not = "there is no mount(8)"
    if why_not:
        pytest.skip(f"a full disk, which needs a mount: {why_not}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    filler = disk / "filler"
    with filler.open("wb") as file:
        while True:
            status = os.statvfs(disk)
            try:
                os.posix_fallocate(
                    file.fileno(), 0, status.f_bavail * status.f_frsize - leave_bytes
                )
            except OSError:  # the allocator has taken some meanwhile
                file.truncate(0)
            else:
                return filler


def send_until_refused(broker: RunningBroker, sent: list[Sent]) -> None:
    for _ in range(100):
        sent += broker.send("t", 0, [b"y" * 50_000] * 4)


@pytest.mark.parametrize("left_bytes", [700 << 10, 64 << 10, 0])
def test_a_disk_that_is_full(left_bytes: int, small_disk: Path) -> None:
    """Writes are refused with DiskFull, reads go on, writes are taken again once there is room."""
    with RunningBroker(small_disk / "store") as broker:
        broker.create_topic("t")
        pids = broker.pids()
        sent = broker.send("t", 0, [b"x" * 50_000])
        broker.assert_stored(sent)
        filler = fill(small_disk, left_bytes)
        with pytest.raises(DiskFull):
            send_until_refused(broker, sent)
        assert len(sent) > 20  # what was reserved could be used
        first = broker.read_queue("t", 0)
        assert [message.queue_offset for message in first] == list(range(len(first)))
        assert len(first) >= 1
        with pytest.raises(DiskFull):
            broker.send("t", 0, [b"y" * 50_000] * 20)
        filler.unlink()
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                sent += broker.send("t", 0, [b"z" * 50_000] * 20)
                break
            except DiskFull:
                assert time.monotonic() < deadline
        broker.assert_stored(sent)
        assert broker.pids() == pids, "somebody died of it"
        assert broker.close() == 0
    assert reference.check_store(small_disk / "store") == []


@pytest.mark.slow
@pytest.mark.parametrize("role", ["dispatcher", "flush"])
def test_nothing_is_deleted_that_others_still_need(role: str, small_disk: Path) -> None:
    """Over the forced ratio the oldest segments go, but not before others are done with them."""
    settings = {
        "cleanResourceInterval": 50,
        "diskSpaceCleanForciblyRatio": 30,
        "diskSpaceWarningLevelRatio": 90,
        "flushIntervalCommitLog": 20,
        "flushCommitLogLeastPages": 0,
    }
    with RunningBroker(small_disk / "store", settings) as broker:
        broker.create_topic("t")
        broker.assert_stored(broker.send("t", 0, [b"first"]))
        slow = broker.pids()[role]
        stop(slow)
        for _ in range(5):  # what cannot be deleted must not fill the disk
            broker.send("t", 0, [b"x" * 200_000] * 4)
        last = broker.statistics("cleaner")["rounds"] + 10
        until(lambda: broker.statistics("cleaner")["rounds"] >= last)
        reached = Counter.DISPATCHED if role == "dispatcher" else Counter.FLUSHED
        assert broker.counter(Counter.MIN_OFFSET) <= broker.counter(reached)
        go_on(slow)
        until(lambda: broker.statistics("cleaner")["deleted_segments"])
        assert broker.counter(Counter.MIN_OFFSET) > 0
        assert broker.pids()[role] == slow
        (sent,) = broker.send("t", 0, [b"last"])
        from_zero = PullMessages("t", 0, 0)
        # A pull that meets a removal may skip what goes.
        until(lambda: pull(broker.reader, from_zero)[0].status == PullStatus.OFFSET_MOVED)
        answer, _ = pull(broker.reader, from_zero)
        assert 0 < answer.next_queue_offset <= sent.queue_offset
        assert broker.close() == 0
    assert reference.check_store(small_disk / "store") == []
