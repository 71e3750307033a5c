"""The nth system call of the store fails, or is where the power is cut: some n here, every n with
python -m tests.fault nth-call."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from family import SMALL, RunningBroker
from fault.calls import Fault, Scenario, Shim
from fault.disk import Disk, need
from patience import patient

from cometmq.actors.launch.orderly_end import SILENCE_S
from cometmq.protocol.errors import CometError
from cometmq.shm.live.control import CONTROL_FILE, ControlFile
from cometmq.shm.log.last_run import LastRun

pytestmark = pytest.mark.slow

RUNS = 6


@pytest.fixture(autouse=True)
def compiler() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("failing system calls: no gcc to build the library that fails them")


def run_some(scenario: Scenario, fault: Fault, runs: int) -> None:
    """Spread over all of them, from another first one in each run."""
    count = scenario.count(fault)
    seed = int(os.environ.get("COMETMQ_SEED") or random.SystemRandom().randrange(1 << 32))
    step = count // runs
    print(f"COMETMQ_SEED={seed}")
    outcomes = [
        scenario.run(fault, n) for n in range(random.Random(seed).randrange(step), count, step)
    ]
    bad = [f"{outcome}: {outcome.complaints}" for outcome in outcomes if outcome.complaints]
    assert not bad, "\n".join(bad)
    hit = [outcome for outcome in outcomes if outcome.what]
    print(
        f"{fault}: {count} calls, {len(hit)} hit, of {len({o.what.split()[0] for o in hit})} kinds"
    )
    assert len(hit) >= len(outcomes) - 2  # the last calls of a run come later in another one


@pytest.mark.timeout(300)
def test_any_call_fails(tmp_path: Path) -> None:
    run_some(Scenario(tmp_path), Fault(errno.EIO), RUNS)


@pytest.mark.timeout(300)
def test_power_is_cut_at_any_call(tmp_path: Path) -> None:
    need("ext4", "power cuts at the nth call")
    with Disk(tmp_path, "ext4") as disk:
        run_some(Scenario(tmp_path, disk), Fault(0), RUNS)


@pytest.mark.timeout(300)
def test_from_some_call_on_there_is_no_room(tmp_path: Path) -> None:
    run_some(Scenario(tmp_path), Fault(errno.ENOSPC, forever=True), RUNS // 2)


@pytest.mark.parametrize("n", [1, 7, 23])
def test_power_is_cut_at_a_sync(tmp_path: Path, n: int) -> None:
    """Mostly in the commitlog process, between append and answer."""
    need("ext4", "power cuts at the nth sync")
    with Disk(tmp_path, "ext4") as disk:
        outcome = Scenario(tmp_path, disk).run(Fault(0, ("msync",)), n)
    assert outcome.what.startswith("msync")
    assert not outcome.complaints


@pytest.mark.parametrize("n", [1, 5, 20])
def test_a_flush_that_fails_takes_the_store_out_of_service(tmp_path: Path, n: int) -> None:
    """It is not tried again, and nothing that waited for it is acknowledged."""
    outcome = Scenario(tmp_path).run(Fault(errno.EIO, ("msync",)), n)
    assert outcome.what.startswith("msync")
    assert not outcome.complaints
    (text,) = [text for text in outcome.logs if "taken out of service" in text]
    assert "could not be flushed" in text


def test_a_sync_that_fails_in_the_commitlog_process_does_so_too(tmp_path: Path) -> None:
    store, shim = tmp_path / "store", Shim(tmp_path)
    shim.set(0)
    environ = shim.environ(store, Fault(errno.EIO, ("msync",)), None)
    settings = {"flushDiskType": "SYNC_FLUSH"}
    broker = RunningBroker(
        store, settings, environ=environ, module=Shim.MODULE, log_path=tmp_path / "failing.log"
    )
    broker.create_topic("t")
    sent = broker.send("t", 0, [b"kept"])
    shim.set(1)
    with pytest.raises(CometError):
        broker.send("t", 0, [b"never confirmed"], timeout_s=patient(5))
    assert broker.wait_ended()
    assert shim.what.startswith("msync")
    broker.until_logged("the CommitLog could not be flushed: Input/output error")
    broker.until_logged("commitlog took the store out of service")
    assert shim.hits == 1  # it was not tried again
    counters = ControlFile.open(store / CONTROL_FILE, writable=False).values()
    assert counters["flushed"] < counters["wrote"]
    assert LastRun.read(store, SMALL["mappedFileSizeCommitLog"]) is None
    with RunningBroker(store, settings) as again:
        again.until_logged("commitlog recovered after a bad end")
        again.assert_stored(sent)


@pytest.mark.timeout(200)
def test_an_end_that_cannot_be_settled_ends_all_the_same(tmp_path: Path) -> None:
    """A segment that was never used cannot be removed: the end is not in order, and not late."""
    began = time.monotonic()
    outcome = Scenario(tmp_path).run(Fault(errno.EIO, ("unlink",), place="/commitlog/"), 1)
    assert outcome.what.startswith("unlink /commitlog/")
    assert not outcome.complaints
    assert time.monotonic() - began < SILENCE_S
    assert any("abort stays" in text for text in outcome.logs)
