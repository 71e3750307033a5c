"""What a client does wrong again and again is logged some times, and then summed up."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import pytest
from family import RunningBroker
from patience import patient
from waiting import until
from zmtp import RawClient, frame

from cometmq.actors.runtime.logs import BURST, Repeats
from cometmq.protocol.commands import Ping
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def logger_with(period_s: float) -> tuple[logging.Logger, Kept, Repeats]:
    kept = Kept()
    repeats = Repeats(kept, burst=3, period_s=period_s)
    kept.addFilter(repeats)
    logger = logging.Logger("flood")
    logger.addHandler(kept)
    return logger, kept, repeats


def test_repeats_are_counted() -> None:
    logger, kept, repeats = logger_with(3600)
    for number in range(1_000):
        logger.warning("refused %d", number)
        if number % 500 == 0:
            logger.error("another kind, %d", number)
    assert kept.lines == [
        "WARNING refused 0", "ERROR another kind, 0", "WARNING refused 1", "WARNING refused 2",
        "ERROR another kind, 500",
    ]  # fmt: skip
    repeats.sum_up()
    assert kept.lines[5:] == ["WARNING 997 more like this in 3600 s: refused 3"]
    logger.warning("refused %d", 5)  # from another place: another kind
    assert kept.lines[-1] == "WARNING refused 5"


def test_they_are_summed_up_by_themselves_and_begin_anew() -> None:
    logger, kept, _ = logger_with(0.05)
    deadline = time.monotonic() + WAIT_S
    while sum("more like this" in line for line in kept.lines) < 3:
        assert time.monotonic() < deadline
        logger.warning("refused")
    counts = [int(line.split()[1]) for line in kept.lines if "more like this" in line]
    assert all(count > 0 for count in counts)


def test_what_is_critical_is_never_left_out() -> None:
    logger, kept, _ = logger_with(3600)
    for _ in range(100):
        logger.critical("the end")
    assert len(kept.lines) == 100


@pytest.mark.parametrize("role", ["commitlog", "reader-0", "coordinator", "namesrv"])
def test_refused_frames_do_not_fill_the_log(tmp_path: Path, role: str) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        ends = broker.endpoints
        endpoint = {
            "commitlog": ends.commitlog,
            "reader-0": ends.readers[0],
            "coordinator": ends.coordinator,
            "namesrv": broker.ready.name_server,
        }[role]
        before = len(broker.log)
        with RawClient(endpoint) as client, Channel(endpoint) as other:
            rubbish = frame(b"rubbish") * 1_000
            client.socket.settimeout(0.2)  # what it is answered is not read
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(30):
                    client.socket.sendall(rubbish)
            # Fault 39: a request on another connection may be answered before this one is read.
            until(
                lambda: broker.log[before:].count("refused a message") >= BURST,
                says=lambda: broker.log[before:],
            )
            other.ask(Ping(), timeout_s=WAIT_S)
        logged = broker.log[before:]
        assert logged.count("refused a message") == BURST, logged[-2000:]
        assert len(logged) < 20_000
