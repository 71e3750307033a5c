"""What the processes of an embedded broker log goes through the logging of the service."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import patient

from cometmq.actors.runtime.service_log import PACKET_MAX, ServiceHandler, ServiceLog
from cometmq.broker import Broker
from cometmq.client import Admin

pytestmark = pytest.mark.timeout(120)

NAME = "cometmq.actors.someone"


class Records(logging.Handler):
    """Keeps what it is given; `heard` is notified of each. Cleared, `open` makes it block."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.heard = threading.Condition()
        self.open = threading.Event()
        self.open.set()

    def emit(self, record: logging.LogRecord) -> None:
        assert self.open.wait(patient(60))
        with self.heard:
            self.records.append(record)
            self.heard.notify_all()

    def wait_for(self, wanted: Callable[[logging.LogRecord], bool]) -> logging.LogRecord:
        with self.heard:
            assert self.heard.wait_for(lambda: any(map(wanted, self.records)), patient(60))
            return next(filter(wanted, self.records))


@pytest.fixture
def records() -> Iterator[Records]:
    logger, handler = logging.getLogger("cometmq"), Records()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    handler.open.set()
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_a_broker_logs_by_the_service(
    tmp_path: Path, records: Records, capfd: pytest.CaptureFixture[str]
) -> None:
    of_others = set(threading.enumerate())
    with (
        Broker(tmp_path / "store", settings={"logLevel": "INFO"}) as broker,
        Admin(broker.name_server) as admin,
    ):
        admin.create_topic("told")
        found = records.wait_for(lambda record: "topic told is created" in record.getMessage())
        supervisor = records.wait_for(
            lambda record: record.name == "cometmq.actors.launch.supervisor"
        )
        assert supervisor.process == broker.pid
    assert (found.name, found.levelno) == ("cometmq.actors.coordination.topics", logging.INFO)
    assert found.__dict__["role"] == "coordinator"
    assert found.getMessage().startswith("coordinator: ")
    assert found.process not in (None, os.getpid(), broker.pid)
    assert abs(found.created - time.time()) < 60
    assert "told" not in capfd.readouterr().err
    for thread in set(threading.enumerate()) - of_others:
        if thread.name == "cometmq broker log":
            thread.join(patient(60))  # it was asked to end, and may not have run since
            assert not thread.is_alive()


def test_a_level_that_the_service_does_not_want_is_not_made(
    tmp_path: Path, records: Records
) -> None:
    logging.getLogger("cometmq.actors.coordination.coordinator").setLevel(logging.ERROR)
    try:
        settings = {"logLevel": "INFO"}
        with (
            Broker(tmp_path / "store", settings=settings) as broker,
            Admin(broker.name_server) as admin,
        ):
            admin.create_topic("untold")
        assert records.records  # of the others
        assert not [each for each in records.records if each.name.endswith("coordinator")]
    finally:
        logging.getLogger("cometmq.actors.coordination.coordinator").setLevel(logging.NOTSET)


class Narrow(ServiceLog):
    """Has room for a few lines only."""

    def __init__(self) -> None:
        super().__init__()
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def test_a_broker_goes_on_beside_a_service_that_does_not_read(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not fit is counted, and told when the service reads again."""
    monkeypatch.setattr("cometmq.broker.ServiceLog", Narrow)
    with (
        Broker(tmp_path / "store", settings={"logLevel": "INFO"}) as broker,
        Admin(broker.name_server, timeout_s=patient(30)) as admin,
    ):
        records.open.clear()
        for number in range(15):  # each is a line of the coordinator's log
            admin.create_topic(f"topic-{number}", queues=1)
        records.open.set()
        complaint = None
        deadline = time.monotonic() + patient(60)
        while complaint is None:  # it is told with the next line
            assert time.monotonic() < deadline
            admin.reset_offsets(
                f"group-{time.monotonic_ns()}", "topic-0", "earliest"
            )  # makes a group
            time.sleep(0.05)
            with records.heard:
                complaint = next(filter(is_complaint, records.records), None)
    assert complaint.levelno == logging.WARNING
    assert complaint.__dict__["role"] == "coordinator"


def is_complaint(record: logging.LogRecord) -> bool:
    return "were dropped" in record.getMessage()


# --- the two ends ---------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[ServiceLog, socket.socket]]:
    """The service's end, and a process's."""
    log = ServiceLog()
    with socket.socket(fileno=os.dup(log.fileno())) as line:
        yield log, line
    log.close()


def record_of(text: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord(NAME, level, "", 0, text, args, None)


def test_no_record_is_lost_without_being_counted(
    ends: tuple[ServiceLog, socket.socket], records: Records
) -> None:
    log, line = ends
    handler = ServiceHandler("flush", line)
    for number in range(5_000):
        handler.handle(record_of("line %d", number))
    dropped = handler.dropped
    assert 0 < dropped < 5_000
    log.start()
    kept = records.wait_for(lambda record: record.getMessage() == f"flush: line {4_999 - dropped}")
    assert kept.process == os.getpid()
    handler.handle(record_of("at last"))
    records.wait_for(lambda record: record.getMessage() == "flush: at last")
    assert [each.getMessage() for each in records.records[-2:]] == [
        f"flush: {dropped} lines of this process's log were dropped: nobody read them",
        "flush: at last",
    ]
    assert len(records.records) == 5_000 - dropped + 2


def test_tracebacks_and_long_texts(
    ends: tuple[ServiceLog, socket.socket], records: Records
) -> None:
    log, line = ends
    log.start()
    handler = ServiceHandler("reader-1", line)
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError as error:
        failed = record_of("it failed: %s", "ü\ud800", level=logging.ERROR)
        failed.exc_info = (type(error), error, error.__traceback__)
    handler.handle(failed)
    handler.handle(record_of("\x00" * (2 * PACKET_MAX)))
    found = records.wait_for(lambda record: record.levelno == logging.ERROR)
    assert found.getMessage().startswith("reader-1: it failed: ü")
    assert "ZeroDivisionError: by nothing" in (found.exc_text or "")
    long = records.wait_for(lambda record: record.getMessage().endswith(" ..."))
    assert len(long.getMessage()) > 1_000


def test_a_handler_that_raises_does_not_end_the_thread(
    ends: tuple[ServiceLog, socket.socket], records: Records
) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError(record.getMessage())

    log, line = ends
    log.start()
    broken = Broken()
    logging.getLogger(NAME).addHandler(broken)
    try:
        handler = ServiceHandler("flush", line)
        handler.handle(record_of("first"))
        line.send(b"rubbish")
        logging.getLogger("cometmq").debug("not by this way")
        handler.handle(
            logging.LogRecord("cometmq.other", logging.WARNING, "", 0, "second", (), None)
        )
        records.wait_for(lambda record: record.getMessage() == "flush: second")
    finally:
        logging.getLogger(NAME).removeHandler(broken)


def test_without_a_service_it_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        ServiceHandler("flush", theirs).handle(record_of("is anybody there"))
    assert "WARNING flush: is anybody there" in capfd.readouterr().err
