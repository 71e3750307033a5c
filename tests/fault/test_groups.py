"""The short form of the campaigns of groups; the long one is `python -m tests.fault groups`.

And the judge itself: each of its findings is made.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_servers import eventually
from etcd_servers import trouble as etcd_trouble
from fault import disk, network
from fault.campaigns import Tally
from fault.engine_faults import THREE_SERVERS
from fault.ensemble import Ensemble
from fault.fail_over import NAME, plot
from fault.group_faults import FAULTS, flip_a_bit, full_disk
from fault.group_judge import SEGMENT_BYTES, Peeker, deaths, differences, doubled_epochs, gone
from fault.group_replica import GROUP
from fault.groups import HEAL_S, NAMES, ONE_DISK, GroupRig, Shape
from fault.history import History, Op
from fault.network import HOST, Network
from fault.rig import Outcome
from patience import patient

from cometmq.actors.replication.engines.etcd import EtcdEngine
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.cluster.looking import Looker
from cometmq.cluster.place import GroupPlace
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20_261_125


def tried(folder: Path, shape: Shape, *faults: tuple[str, str], sync: bool = False) -> Outcome:
    """One group, and these faults."""
    with GroupRig(folder, SEED, sync, shape) as rig:
        for name, target in faults:
            FAULTS[name].do(rig, target)
            rig.wait_healed(f"{name} of {target}")
        outcome = rig.finish()
    assert outcome.ok, f"seed {SEED}\n{outcome.verdict}"
    assert outcome.verdict.counts["acknowledged"] > 0
    assert len(outcome.faults) == len(faults)
    return outcome


def test_a_master_is_killed_a_store_replaced_and_a_bit_flipped(tmp_path: Path) -> None:
    """A master that meets damage ends before it hands anything out, and another one serves."""
    faults = ("kill", "master"), ("replace", "follower"), ("damage", "master")
    tried(tmp_path / "rig", ONE_DISK, *faults)


def test_the_power_of_all_is_cut(tmp_path: Path) -> None:
    if why := disk.trouble("ext4"):
        pytest.skip(f"power cuts of groups: {why}")
    tried(tmp_path / "rig", Shape("ext4"), ("power-cut", "all"), sync=True)


def test_without_a_flush_a_cut_of_all_leaves_no_master_rather_than_a_wrong_one(
    tmp_path: Path,
) -> None:
    """Nobody surely has everything then: the last one to have been in the set says so, and ends."""
    if why := disk.trouble("ext4"):
        pytest.skip(f"power cuts of groups: {why}")
    with GroupRig(tmp_path / "rig", SEED, False, Shape("ext4")) as rig:
        for each in rig.replicas:
            each.cut_power()
        for each in rig.replicas:
            each.power_on()
        before = rig.record()
        assert before is not None
        for each in rig.replicas:
            each.start()
        deadline = time.monotonic() + HEAL_S
        while not (ended := [each for each in rig.replicas if not each.runs]):
            assert time.monotonic() < deadline, rig.state()
            assert rig.serving() is None
            time.sleep(0.05)
        for each in ended:
            assert "lost power while messages were acknowledged" in each.log, each.log
        record = rig.record()
        assert record is not None
        assert {*record.iss, *record.elr} == {each.name for each in ended}
        assert (record.epoch, record.master) in ((before.epoch, ""), (before.epoch, before.master))


def test_a_master_is_cut_off_and_stopped(tmp_path: Path) -> None:
    if why := network.trouble():
        pytest.skip(f"partitions of groups: {why}")
    shape = Shape(apart=True)
    tried(tmp_path / "rig", shape, ("partition", "from-master"), ("stop", "master"))


def test_a_master_is_with_the_minority_of_the_engine_and_servers_are_killed_and_hang(
    tmp_path: Path,
) -> None:
    """The engine has three servers, each on the machine of a replica."""
    if why := network.trouble() or etcd_trouble():
        pytest.skip(f"engines of three servers: {why}")
    faults = ("engine-minority", "both"), ("engine-node", "leader"), ("engine-hang", "leader")
    tried(tmp_path / "rig", THREE_SERVERS, *faults)


def test_a_master_that_reaches_no_follower_gives_up(tmp_path: Path) -> None:
    """All of them reach the engine; messages are stored by others while the master is cut off."""
    if why := network.trouble():
        pytest.skip(f"partitions of groups: {why}")
    with GroupRig(tmp_path / "rig", SEED, False, Shape(apart=True)) as rig:
        assert rig.network is not None
        for ways in ("both", "from-master"):
            (master,) = rig.pick("master")
            for name in {*NAMES} - {master.name}:
                rig.network.cut(master.name, name)
                if ways == "both":
                    rig.network.cut(name, master.name)
            rig.fault("partition", ways)
            rig.wait_served(without=master)
            rig.wait_resumed("another one was elected")
            rig.network.heal()
            rig.wait_healed(f"the links came back, {ways}")
        outcome = rig.finish()
    assert outcome.ok, f"seed {SEED}\n{outcome.verdict}"


def test_a_replica_whose_disk_is_full_stays_and_goes_on(tmp_path: Path) -> None:
    """A follower, then a master: it is left out, says why, and joins again by itself; the others go
    on without it."""
    if why := disk.trouble("ext4"):
        pytest.skip(f"full disks of groups: {why}")
    with GroupRig(tmp_path / "rig", SEED, False, Shape("ext4")) as rig:
        for target in ("follower", "master"):
            fill_up(rig, target)
        outcome = rig.finish()
    assert outcome.ok, f"seed {SEED}\n{outcome.verdict}"


def fill_up(rig: GroupRig, target: str) -> None:
    """And that it is made good when there is room again."""
    (victim,) = rig.pick(target)
    stores = {each.name: each.store for each in rig.replicas if each is not victim}
    place = GroupPlace(group=GROUP, engine=rig.engine_url, stores=stores)
    rig.fault("disk-full", target)

    def told(looker: Looker) -> bool:
        status = looker.look()
        found = status.replica(victim.name)
        assert found is not None
        return status.serves and not found.in_sync and "its disk is full" in found.why

    def said() -> int:
        return victim.log.count("away from its group until there is room")

    before = said()
    with Looker(place, rig.engine) as elsewhere:
        with full_disk(victim):
            for looker in (rig.looker, elsewhere):
                rig.until(lambda at=looker: told(at), f"{victim.name} is out, and says why")
            rig.wait_served(without=victim)
            rig.wait_resumed("the disk was full")
            victim.kill()  # and a start on a full disk
            victim.start()
            rig.until(lambda: said() == before + 2, f"{victim.name} starts, and is away again")
            for looker in (rig.looker, elsewhere):
                rig.until(lambda at=looker: told(at), f"{victim.name} is out again, and says why")
        rig.wait_healed("there is room again")
    assert said() == before + 2


def test_a_master_whose_disk_is_full_stays_where_nobody_could_follow(tmp_path: Path) -> None:
    """Two of three disks are full: the one that is left could confirm nothing either."""
    if why := disk.trouble("ext4"):
        pytest.skip(f"full disks of groups: {why}")
    with GroupRig(tmp_path / "rig", SEED, False, Shape("ext4")) as rig, ExitStack() as stack:
        (master,), (victim,) = rig.pick("master"), rig.pick("follower")
        rig.fault("disk-full", "two")
        stack.enter_context(full_disk(victim))

        def is_out() -> bool:
            found = rig.looker.look().replica(victim.name)
            return found is not None and not found.in_sync and "its disk is full" in found.why

        rig.until(is_out, f"{victim.name} is out")
        stack.enter_context(full_disk(master))
        said = f"the master {master.name}: its disk is full"
        rig.until(lambda: said in rig.looker.look().why, "the master says why it takes nothing")
        record = rig.record()
        assert record is not None
        assert (record.master, record.epoch) == (master.name, 1)
        stack.close()
        rig.wait_healed("there is room again")  # another may be elected: who sees it first is back
        outcome = rig.finish()
    assert outcome.ok, f"seed {SEED}\n{outcome.verdict}"


def test_a_replica_is_added_and_another_one_removed(tmp_path: Path) -> None:
    """Twice: the one that was removed comes back, with an empty store."""
    tried(tmp_path / "rig", ONE_DISK, ("add-remove", "master"), ("add-remove", "dead"))


@pytest.mark.parametrize("target", ["follower", "master"])
def test_damage_that_nobody_reads_is_found_and_not_elected(target: str, tmp_path: Path) -> None:
    """A bit of a segment that is full, whose replica is killed: its start does not look there."""
    with GroupRig(tmp_path / "rig", SEED) as rig:
        (victim,) = rig.pick(target)
        rig.until(lambda: victim.counter(Counter.REPLICATED) > SEGMENT_BYTES, "a segment is full")
        rig.fault("flip", target, "sealed")
        victim.kill()
        flip_a_bit(rig, victim, victim.counter(Counter.REPLICATED), "sealed")
        for _ in range(2):  # and not once more either
            victim.start()
            rig.until_ended(victim)
            victim.why_ended()
            # Or by a consumer, where one has not read on: the reader's word for it.
            assert "damaged at" in victim.log or "damaged and is not delivered" in victim.log
            found = rig.looker.look().replica(victim.name)
            assert found is not None
            assert "its store is damaged" in found.why
        rig.wait_served(without=victim)
        rig.wait_resumed("the damage")
        victim.empty()
        victim.start()
        rig.wait_healed("an empty store came in its place")
        outcome = rig.finish()
    assert outcome.ok, f"seed {SEED}\n{outcome.verdict}"


@pytest.mark.parametrize("work", ["timed", "consuming"])
def test_a_master_is_killed_and_all_restart_under_other_work(work: str, tmp_path: Path) -> None:
    """Timers, transactions, names and keys; or handlers, order, pops and broadcasting."""
    faults = ("kill", "master"), ("rolling", "all")
    outcome = tried(tmp_path / "rig", Shape(work=work), *faults)
    wanted = {
        "timed": ("schedule", "half", "end", "open", "keyed", "send"),
        "consuming": ("handlers done", "steppers done", "poppers done", "poppers popped"),
    }
    for name in wanted[work]:
        assert outcome.verdict.counts[name], outcome.verdict.counts


# --- the judge ------------------------------------------------------------------------------------


def store_with(folder: Path, *segments: bytes) -> Path:
    (folder / COMMITLOG_DIR).mkdir(parents=True)
    for number, content in enumerate(segments):
        path = folder / COMMITLOG_DIR / segment_name(number * SEGMENT_BYTES)
        path.write_bytes(content.ljust(SEGMENT_BYTES, b"\0"))
    return folder


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("at", [0, 99, SEGMENT_BYTES - 1])
def test_logs_that_differ_are_found(at: int, tmp_path: Path) -> None:
    first, second = bytes(range(256)) * 4096, b"second" * 100
    same = {name: store_with(tmp_path / name, first, second) for name in NAMES}
    end = SEGMENT_BYTES + 600
    assert list(differences(same, end)) == []
    other = store_with(tmp_path / "other", flipped(first, at), second)
    (found,) = differences({**same, "other": other}, end)
    assert found == f"the logs of n0 and other differ at {at}, below {end}"


def test_what_lies_above_the_smallest_confirm_offset_may_differ(tmp_path: Path) -> None:
    stores = {name: store_with(tmp_path / name, b"confirmed" + name.encode()) for name in NAMES}
    assert list(differences(stores, 9)) == []
    assert list(differences(stores, 11)) != []


def test_a_log_that_is_too_short_or_gone_is_found(tmp_path: Path) -> None:
    stores = {name: store_with(tmp_path / name, b"a" * SEGMENT_BYTES, b"b") for name in NAMES}
    (stores["n2"] / COMMITLOG_DIR / segment_name(SEGMENT_BYTES)).unlink()
    (found,) = differences(stores, SEGMENT_BYTES + 1)
    assert found.startswith("the logs of n0 and n2 differ")
    shutil.rmtree(stores["n2"] / COMMITLOG_DIR)
    assert list(differences(stores, SEGMENT_BYTES + 1)) != []


def test_an_epoch_with_two_masters_is_found() -> None:
    text = "WARNING ha: this replica is the master of epoch {}, from 0\n".format
    assert list(doubled_epochs({"n0": text(1) + text(3), "n1": text(2)})) == []
    (found,) = doubled_epochs({"n0": text(1) + text(2), "n1": text(2)})
    assert found == "epoch 2 has had 2 masters: n0, n1"


def test_a_death_is_found() -> None:
    entry = "2026-11-25 04:34:02.502+0000 CRITICAL ha: ha dies of an exception\nTraceback\n{}\n"
    quiet = "2026-11-25 04:34:02.600+0000 INFO    ha: OSError: [Errno 5]\n"
    (found,) = deaths({"n0": quiet + entry.format("KeyError: 0") + quiet, "n1": quiet})
    assert found.startswith("n0: 2026-11-25 04:34:02.502")
    assert found.endswith("KeyError: 0")
    assert not list(deaths({"n0": entry.format("OSError: [Errno 5] Input/output error")}))


def test_what_was_read_and_is_gone_is_found(tmp_path: Path) -> None:
    """Of a store without messages everything."""
    (tmp_path / COMMITLOG_DIR).mkdir()
    read = Op("peeker", "ok", "read", 1, "timed", 0, 7, "1-1-00000000")
    (found,) = gone([read, Op("peeker", "ok", "poll", 2, "timed", 0, 8, "1-2-00000000")], tmp_path)
    assert found == "peeker read 1-1-00000000 at timed/0/7, where None is"


def test_a_peeker_that_finds_something_says_so(tmp_path: Path) -> None:
    class Broken:
        name, store, log = "n0", tmp_path, ""

        def control(self) -> None:
            raise AssertionError("a planted fault")

    history = History.create(tmp_path / "peeker.jsonl", "peeker")
    with Peeker([Broken()], {"alpha": 1}, history, SEED) as peeker:
        peeker._thread.join()
        with pytest.raises(AssertionError, match="a planted fault"):
            peeker.check()


def test_a_link_is_cut_one_way_and_heals() -> None:
    if why := network.trouble():
        pytest.skip(f"partitions of groups: {why}")
    with Network(("n0", "n1")) as net:
        assert carries(net, "n0", "n1")
        assert carries(net, "n1", "n0")
        net.cut("n0", "n1")
        assert not carries(net, "n0", "n1", 1.0)
        assert carries(net, "n1", "n0")
        assert carries(net, "n0", HOST)
        net.heal()
        assert carries(net, "n0", "n1")


def test_a_server_that_is_cut_off_while_it_is_asked_is_left(tmp_path: Path) -> None:
    """Requests are made all the while, and its machine confirms none of them."""
    if why := network.trouble() or etcd_trouble():
        pytest.skip(f"engines of three servers: {why}")
    place = tmp_path / "etcd"
    with (
        Network(NAMES) as net,
        Ensemble(place, NAMES, net) as servers,
        open_engine(servers.url, 0.3) as engine,
    ):
        eventually(lambda: engine.get("g") is None)
        assert isinstance(engine, EtcdEngine)
        host, _ = engine._gateway.endpoint
        net.cut(next(name for name in NAMES if net.address(name) == host), HOST)
        eventually(lambda: engine.get("g") is None, patient(30.0))


def carries(net: Network, sender: str, receiver: str, timeout_s: float = patient(30.0)) -> bool:
    """Whether one of the datagrams that are sent meanwhile arrives."""
    with socket_in(net, receiver) as listener, socket_in(net, sender) as speaker:
        listener.bind((net.address(receiver), 0))
        listener.settimeout(0.1)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            speaker.sendto(b"x", listener.getsockname())
            with contextlib.suppress(TimeoutError):
                return listener.recv(10) == b"x"
    return False


def socket_in(net: Network, name: str) -> socket.socket:
    """One of that namespace: a socket stays in the one that it was made in."""
    if name == HOST:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return net.within(name, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))


def test_fail_overs_are_drawn(tmp_path: Path) -> None:
    line = Tally(
        campaign=NAME, seed=1, commit="x", date="x", fault="kill", target="idle",
        recover_ms=[2_000.0, 3_000.0, 2_500.0],
    )  # fmt: skip
    plot([line], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
