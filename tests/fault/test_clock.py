"""A broker whose wall clock is stepped by a day, in either direction."""

from __future__ import annotations

import mmap
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest
from family import RunningBroker

from cometmq import PopConsumer, Producer

SOURCE: Final = Path(__file__).with_name("clock.c")
DAY_NS: Final = 86_400_000_000_000
INVISIBLE_S: Final = 5.0
LATE_S: Final = 20.0  # this machine may be busy; a day is not to be mistaken for that


class WallClock:
    """Of the processes that have `environ`."""

    def __init__(self, place: Path) -> None:
        library = place / "clock.so"
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        state = place / "clock.state"
        state.write_bytes(bytes(8))
        with state.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_STATE": str(state)}

    def set_ahead(self, ns: int) -> None:
        self._memory[:] = struct.pack("=q", ns)


def up_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.slow
@pytest.mark.parametrize("step_ns", [DAY_NS, -DAY_NS], ids=["forward", "backward"])
def test_popped_messages_stay_invisible_for_as_long_as_they_were_to(
    tmp_path: Path, step_ns: int
) -> None:
    clock = WallClock(tmp_path)
    with RunningBroker(tmp_path / "store", environ=clock.environ, program=True) as broker:
        server = broker.ready.name_server
        with Producer(server) as producer:
            before = producer.send("t", b"job", queue_id=0).store_timestamp_ms
        with PopConsumer(server, "g", "t", invisible_s=INVISIBLE_S) as consumer:
            began = up_s()
            (message,) = consumer.poll(timeout_s=30)
            popped = up_s()
            assert (message.body, message.reconsume_times) == (b"job", 0)
            clock.set_ahead(step_ns)
            (again,) = consumer.poll(timeout_s=INVISIBLE_S + LATE_S)
            came = up_s()
            assert (again.body, again.reconsume_times) == (b"job", 1)
            assert began + INVISIBLE_S <= came <= popped + INVISIBLE_S + LATE_S
            consumer.ack(again)
        assert f"the clock was stepped by {step_ns / 1e9:+.1f} s" in broker.log
        with Producer(server) as producer:  # the shim has stepped the log's clock as well
            after = producer.send("t", b"more", queue_id=0).store_timestamp_ms
    assert after - before >= (86_400_000 if step_ns > 0 else 0)
