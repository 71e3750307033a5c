"""The orderly end asks every role, waits for what moves, and says what it waits for; what it could
not settle leaves `abort`, with the reason in the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import reference
import slow_launcher
from family import CHILDREN, RunningBroker, Sent
from paths import SEARCH
from patience import patient
from still import go_on, stop
from waiting import has_ended, until

from cometmq.actors.runtime.roles import ROLES, doorbell_of, port_of, roles_of
from cometmq.conf import BrokerSettings
from cometmq.shm.live.control import TWO_WRITERS, Counter, Phase
from cometmq.shm.os.files import ABORT_FILE, Checkpoint

SEEN_S = patient(60)
NEVER = 10 * 60_000
# So that nothing but an orderly end syncs queues and writes the checkpoint.
SETTINGS = {
    "flushConsumeQueueThoroughInterval": NEVER,
    "flushCommitLogThoroughInterval": NEVER,
    "flushIntervalCommitLog": NEVER,
    "flushIntervalConsumeQueue": NEVER,
}


class Slow:
    """A broker that takes its time where the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "slow"
        self.folder.mkdir()
        self.store = folder / "store"

    def set(self, name: str, rounds: int = 0) -> None:
        (self.folder / name).write_text(str(rounds))

    def unset(self, name: str) -> None:
        (self.folder / name).unlink()

    def start(self, *, wait: bool = True) -> RunningBroker:
        environ = {slow_launcher.SLOW: str(self.folder), "PYTHONPATH": SEARCH}
        return RunningBroker(
            self.store, SETTINGS, wait=wait, environ=environ, module=slow_launcher.__name__
        )


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


@pytest.fixture
def running(slow: Slow) -> Iterator[RunningBroker]:
    broker = slow.start()
    yield broker
    if not broker._closed:
        broker.kill_all()


def fill(broker: RunningBroker) -> list[Sent]:
    broker.create_topic("t")
    return broker.send("t", 0, [b"x" * 1_000] * 50)


def ask_to_end(broker: RunningBroker) -> None:
    """Without waiting for it."""
    assert broker._process.stdin is not None
    broker._process.stdin.close()


def assert_in_order(broker: RunningBroker, sent: list[Sent]) -> None:
    """Everything is where an orderly end has it, and the next start sees that."""
    assert_ended(broker)
    with RunningBroker(broker.store) as again:
        again.until_logged("after an orderly end")
        again.assert_stored(sent)


def assert_ended(broker: RunningBroker) -> None:
    store = broker.store
    broker.until_logged("finished in order")
    assert not (store / ABORT_FILE).exists()
    words = Checkpoint(store).words
    last = reference.records(store)[-1].store_timestamp
    assert (words["physic_msg_timestamp"], words["logics_msg_timestamp"]) == (last, last)
    assert reference.check_store(store) == []


def end_each_in_order(
    slow: Slow, roles: Sequence[str], end: Callable[[RunningBroker, str], None]
) -> None:
    """One life of the broker for each, which begins with what the one before has left.

    Args:
        end: of a broker, with something done to the role.
    """
    sent: list[Sent] = []
    for role in roles:
        broker = slow.start()
        try:
            assert not sent or "after an orderly end" in broker.log
            broker.assert_stored(sent)
            sent += fill(broker)
            end(broker, role)
            assert broker.wait_ended() == 0
            assert_ended(broker)
        except BaseException:
            print(role, broker.log)
            broker.kill_all()
            raise
    with RunningBroker(slow.store) as again:
        again.until_logged("after an orderly end")
        again.assert_stored(sent)


@pytest.mark.slow
def test_an_end_while_a_child_is_being_restarted(slow: Slow) -> None:
    """The one that is not there has work left: it is started, and asked like the others."""

    def end(broker: RunningBroker, role: str) -> None:
        slow.set("restart")
        broker.end(broker.pids()[role])
        until(lambda: "starting it again" in broker.log)
        ask_to_end(broker)
        until(lambda: f"the end waits for {role} (which is started again)" in broker.log)
        slow.unset("restart")

    end_each_in_order(slow, CHILDREN, end)


@pytest.mark.parametrize(
    ("moment", "roles"),
    [
        ("settle", ("commitlog", "dispatcher", "flush", "coordinator")),
        ("exit", ("commitlog", "dispatcher", "coordinator")),
    ],
)
@pytest.mark.slow
def test_a_child_that_is_killed_while_it_ends(
    moment: str, roles: Sequence[str], slow: Slow
) -> None:
    """Or after its answer: the one that takes its place is asked as well, though the first has
    answered."""

    def end(broker: RunningBroker, role: str) -> None:
        slow.set(f"{moment}-{role}", 60)
        pid = broker.pids()[role]
        ask_to_end(broker)
        until(lambda: f"the end waits for {role} (process {pid})" in broker.log)
        slow.unset(f"{moment}-{role}")
        broker.end(pid)
        ended = f"{role} (process {pid}) ended by SIGKILL: starting it again"
        until(lambda: ended in broker.log)

    end_each_in_order(slow, roles, end)


@pytest.mark.slow
def test_two_are_killed_while_a_third_ends(slow: Slow, running: RunningBroker) -> None:
    sent = fill(running)
    slow.set("settle-commitlog", 60)
    pids = running.pids()
    ask_to_end(running)
    until(lambda: "the end waits for commitlog" in running.log)
    slow.unset("settle-commitlog")
    for role in ("flush", "dispatcher", "commitlog"):
        running.end(pids[role])
    assert running.wait_ended() == 0
    assert_in_order(running, sent)


def test_a_child_that_died_and_nobody_to_start_it(slow: Slow, running: RunningBroker) -> None:
    """Then `abort` stays."""
    sent = fill(running)
    slow.set("settle-commitlog", 60)
    pids, zygote = running.pids(), running.zygote_pid()
    ask_to_end(running)
    until(lambda: "the end waits for commitlog" in running.log)
    stop(zygote)
    running.end(pids["flush"])
    running.end(zygote)
    running.wait_ended()
    running.until_logged("the zygote has ended")
    assert (slow.store / ABORT_FILE).exists()
    with RunningBroker(slow.store) as again:
        again.assert_stored(sent)


@pytest.mark.slow
def test_an_end_waits_for_what_moves(slow: Slow) -> None:
    """For longer than it waits for what does not, and says so."""

    def end(broker: RunningBroker, role: str) -> None:
        slow.set(f"settle-{role}", 20)  # 5 s, where 2 s of silence are too much
        ask_to_end(broker)
        broker.wait_ended()
        slow.unset(f"settle-{role}")
        assert broker.log.count(f"the end waits for {role} (process ") > 2

    end_each_in_order(slow, ("commitlog", "dispatcher", "flush", "coordinator"), end)


@pytest.mark.slow
def test_an_end_waits_for_who_was_stopped(slow: Slow) -> None:
    with RunningBroker(slow.store) as broker:
        sent = fill(broker)
        pid = broker.pids()["dispatcher"]
        stop(pid)
        timer = threading.Timer(3, go_on, (pid,))
        timer.start()
        assert broker.close() == 0
        timer.join()
        broker.until_logged("finished in order")
    with RunningBroker(slow.store) as again:
        again.assert_stored(sent)


@pytest.mark.slow
def test_who_does_not_move_is_given_up(slow: Slow, running: RunningBroker) -> None:
    """`abort` stays, and the log says who and why."""
    sent = fill(running)
    slow.set("idle-dispatcher", 100)
    ask_to_end(running)
    assert running.wait_ended() == 0
    assert (slow.store / ABORT_FILE).exists()
    assert (
        "not everything was settled (dispatcher did not finish, and nothing moved for 2 s): "
        "abort stays" in running.log
    )
    with RunningBroker(slow.store) as again:
        again.assert_stored(sent)


def test_who_cannot_settle_says_why(slow: Slow, running: RunningBroker) -> None:
    fill(running)
    slow.set("refuse-coordinator")
    assert running.close() == 0
    assert (slow.store / ABORT_FILE).exists()
    running.until_logged("coordinator could not be settled: as the test wants it")


def test_an_end_just_before_it_is_ready(slow: Slow) -> None:
    """Everybody serves, but the supervisor has not heard yet that the broker is registered."""
    slow.set("unready")
    broker = slow.start(wait=False)
    try:
        until(lambda: control_says(broker, Phase.SERVING))
        ask_to_end(broker)
        assert broker.wait_ended() == 0
    except BaseException:
        broker.kill_all()
        raise
    broker.until_logged("finished in order")
    assert not (slow.store / ABORT_FILE).exists()


def control_says(broker: RunningBroker, phase: int) -> bool:
    try:
        return broker.counter(Counter.PHASE) == phase
    except Exception:  # there is none yet, or not whole
        return False


@pytest.mark.slow
def test_an_end_in_the_middle_of_a_start(slow: Slow) -> None:
    """What cannot come to its start does not hold up the end."""
    slow.set("restart")
    broker = slow.start(wait=False)
    until((slow.store / ABORT_FILE).exists)
    zygote = psutil.Process(broker.pid).children()[0].pid
    ask_to_end(broker)
    until(lambda: "asked to end before it was ready" in broker.log)
    slow.unset("restart")
    broker.wait_ended()
    assert has_ended(zygote, 0)
    assert not (slow.store / ABORT_FILE).exists()  # nothing was touched


# --- the declarations -----------------------------------------------------------------------------


def test_every_counter_has_one_owner() -> None:
    firsts = [counter for role in ROLES for counter in role.owns]
    assert sorted(firsts) == sorted(Counter)
    assert sorted(c for role in ROLES for c in role.owns_second) == sorted(TWO_WRITERS)
    for role in ROLES:
        assert not role.owns & role.owns_second, role.name


def test_every_role_has_its_doorbell_and_its_port() -> None:
    settings = BrokerSettings.from_keys({"readerCount": 3})
    names = roles_of(settings)
    assert len({doorbell_of(name) for name in names}) == len(names)
    ports = [port for name in names if (port := port_of(name, 9876)) is not None]
    assert sorted(ports) == list(range(9876, 9876 + 6))
    assert [port_of(name, 0) for name in ("namesrv", "flush")] == [0, None]
    assert "namesrv" not in roles_of(BrokerSettings.from_keys({"namesrvAddr": "127.0.0.1:9876"}))


def test_a_counter_is_taken_by_its_owner_alone(running: RunningBroker) -> None:
    fill(running)
    for role in ROLES:
        assert role.load(BrokerSettings()).role == role.name


def test_a_log_that_is_gone_gives_no_queue_offset_twice(slow: Slow) -> None:
    """It was whole when the broker ended; the queues still say how far they were."""
    with RunningBroker(slow.store) as broker:
        sent = fill(broker)
    for segment in (slow.store / "commitlog").iterdir():  # a start without a segment is refused
        segment.write_bytes(bytes(segment.stat().st_size))
    slow.set("recover", 5)
    with slow.start() as broker:
        again = broker.send("t", 0, [b"later"])
        assert [each.queue_offset for each in again] == [len(sent)], broker.log
