"""The log goes on in its next segment: under a sync, and where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import reference
from family import MARK, RUN, SMALL, RunningBroker, encode_batch
from paths import KIT
from patience import patient
from still import stopped

from cometmq import Broker
from cometmq.actors.launch.addresses import address_of
from cometmq.actors.writer.segments import SEGMENT_TIMEOUT_S
from cometmq.protocol.commands import (
    GetStatistics,
    Ping,
    Section,
    SendMessages,
    SendResult,
    Statistics,
)
from cometmq.protocol.errors import ServiceNotAvailable, SystemBusy
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.store import Appender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WAIT_S = patient(60)
SYNC = {
    "flushDiskType": "SYNC_FLUSH",
    "mappedFileSizeCommitLog": 96 << 10,
    "maxMessageSize": 16 << 10,
}
# The disk is slow, and whatever is to happen in a process during a sync does happen: the address is
# looked at when the time is over.
SLOW_MSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <unistd.h>
static volatile int fails, held, inside;
void msync_fails(void) { fails = 1; }
void msync_is_held(int on) { held = on; }
int msyncs_inside(void) { return inside; }
int msync(void *address, size_t count, int flags) {
    static int (*real)(void *, size_t, int);
    if (!real) real = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync");
    __sync_add_and_fetch(&inside, 1);
    do usleep(20000); while (held);
    __sync_sub_and_fetch(&inside, 1);
    if (fails) { errno = EIO; return -1; }
    return real(address, count, flags);
}
"""


def slow_msync(folder: Path) -> Path:
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(SLOW_MSYNC)
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def run_child(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(KIT / "roll_child.py"), *arguments]
    environ = {**os.environ, "LD_PRELOAD": str(slow_msync(folder)), MARK: f"{RUN}/roll"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=patient(150)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_is_synced_stays_mapped(tmp_path: Path) -> None:
    """Though another thread has rolled over and let it go; and no longer than that."""
    found = run_child(tmp_path, "log", str(tmp_path / "store"))
    assert "failed" not in found, found
    assert found["synced"] == found["wrote"]
    assert (found["mapped_meanwhile"], found["mapped_in_the_end"]) == (2, 1)


def test_a_service_rolls_over_while_other_threads_sync(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {**SMALL, **SYNC}
    found = run_child(tmp_path, "service", str(store), json.dumps(settings), "400", "holds")
    assert found["failed"] == []
    assert found["close_s"] < 45  # it does not wait for a silence of 60 s
    assert not (store / "abort").exists()
    assert reference.check_store(store) == []
    assert len(reference.messages(store)) == sum(found["appended"]) >= 400


@pytest.mark.parametrize("attempt", range(3))
def test_a_service_closes_while_its_disk_fails(attempt: int, tmp_path: Path) -> None:
    """The broker does not wait for a writer that has gone out of service; then `abort` stays."""
    store = tmp_path / "store"
    settings = json.dumps({**SMALL, **SYNC})
    found = run_child(tmp_path, "service", str(store), settings, "50", "fails")
    assert found["failed"], found
    for text in found["failed"]:
        assert text.startswith(("FlushDiskTimeout: ", "StoreError: ", "ShuttingDown: ")), text
    assert found["close_s"] < 45  # it does not wait for a silence of 60 s
    a_sync_failed = any("could not be flushed" in text for text in found["failed"])
    assert (store / "abort").exists() == a_sync_failed, found


# --- where there is no next segment ---


def test_a_missing_segment_is_waited_for_once(tmp_path: Path) -> None:
    """Whoever sends meanwhile is refused with the reason, and everything else is served."""
    with RunningBroker(tmp_path / "store", {"mappedFileSizeCommitLog": 400 << 10}) as broker:
        broker.create_topic("orders", 4)
        sent = broker.send("orders", 0, [b"before"])
        lines = [broker.channel(broker.endpoints.commitlog) for _ in range(8)]
        body = encode_batch([bytes(100_000)])
        with stopped(broker.pids()["allocator"]):
            began = time.monotonic()
            asked = [  # three segments are ready, with room for nine of these
                (line, line.request(SendMessages([Section("orders", queue, 1)], 0), [body]))
                for queue in range(4)
                for line in lines
            ]
            results = []
            for line, pending in asked:
                assert line.wait(pending, patient(30))
                answer, _ = pending.result()
                assert isinstance(answer, SendResult)
                results.append(answer.results[0])
            assert time.monotonic() - began < 4 * SEGMENT_TIMEOUT_S, (
                "more than one of them has waited"
            )
            refused = [result for result in results if result.code]
            assert len(refused) >= 16
            assert {result.code for result in refused} <= {
                ServiceNotAvailable.code,
                SystemBusy.code,
            }
            # which line was served first is not known; those after it may hear of the busy store
            assert any("is not ready after 5." in result.text for result in refused), refused
            pings = []
            for _ in range(20):
                began = time.monotonic()
                broker.ask("commitlog", Ping())
                pings.append(time.monotonic() - began)
            assert max(pings) < SEGMENT_TIMEOUT_S
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                sent += broker.send("orders", 1, [b"after"])
                break
            except ServiceNotAvailable:
                assert time.monotonic() < deadline, broker.log
        broker.assert_stored(sent)


def test_the_threads_of_a_service_wait_for_a_segment_once(tmp_path: Path) -> None:
    settings = {**SMALL, "mappedFileSizeCommitLog": 400 << 10}
    with Broker(tmp_path / "store", settings=settings, writer="here") as broker:
        refused: list[tuple[float, BaseException]] = []

        def append(appender: Appender) -> None:
            try:
                while True:
                    appender.append(bytes(20_000))
            except ServiceNotAvailable as error:
                refused.append((time.monotonic(), error))

        threads = [
            threading.Thread(target=append, args=(broker.appender("t", number),))
            for number in range(6)
        ]
        with stopped(pid_of(broker, "allocator")):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        times = [when for when, _ in refused]
        assert len(times) == len(threads)
        assert max(times) - min(times) < 2, refused
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                broker.appender("t", 0).append(b"after")
                break
            except ServiceNotAvailable:
                assert time.monotonic() < deadline
    assert reference.check_store(tmp_path / "store") == []


def pid_of(broker: Broker, role: str) -> int:
    with Channel(address_of(broker._ready.token, "broker"), "broker") as line:
        answer, _ = line.ask(GetStatistics(), timeout_s=WAIT_S)
    assert isinstance(answer, Statistics)
    return int(answer.values[f"pid.{role}"])
