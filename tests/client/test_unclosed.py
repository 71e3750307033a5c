"""What is left open is closed: when nobody has it any more, and at the interpreter's end."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from family import SMALL, RunningBroker
from patience import patient
from waiting import until

from cometmq import Admin, Consumer, Producer
from cometmq.client.receiving.membership import Membership
from cometmq.protocol.commands import JoinGroup

WAIT_S = patient(30)
SESSION_S = patient(60)  # longer than any wait of a test


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    settings = {**SMALL, "consumerSessionTimeout": SESSION_S * 1000}
    with RunningBroker(tmp_path_factory.mktemp("unclosed") / "store", settings) as running:
        running.create_topic("t", 4)
        for queue_id in range(4):
            running.send("t", queue_id, [b"x"])
        yield running


def members(broker: RunningBroker, group: str) -> list[str]:
    with Admin(broker.ready.name_server) as admin:
        return next((list(each.members) for each in admin.groups() if each.group == group), [])


def until_alone(broker: RunningBroker, group: str, *wanted: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while members(broker, group) != list(wanted):
        assert time.monotonic() < deadline, members(broker, group)
        time.sleep(0.02)


def drop(make: Any) -> None:
    """Make one, use it, and let go of it."""
    opened = make()
    if isinstance(opened, Consumer):
        assert opened.poll(timeout_s=WAIT_S)
    else:
        opened.send("t", b"left", queue_id=0)
    del opened
    gc.collect()


def test_a_consumer_that_nobody_has_any_more_leaves_its_group(broker: RunningBroker) -> None:
    with pytest.warns(ResourceWarning, match="the consumer .* of group gone was not closed"):
        drop(lambda: Consumer(broker.ready.name_server, "gone", "t"))
    until_alone(broker, "gone")


def test_a_producer_that_nobody_has_any_more_sends_what_lingers(broker: RunningBroker) -> None:
    with pytest.warns(ResourceWarning, match="a producer was not closed"):
        drop(lambda: Producer(broker.ready.name_server, linger_ms=50))
    deadline = time.monotonic() + WAIT_S
    while b"left" not in [each.body for each in broker.read_queue("t", 0)]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_that_was_closed_says_nothing(
    broker: RunningBroker, recwarn: pytest.WarningsRecorder
) -> None:
    for make in (
        lambda: Consumer(broker.ready.name_server, "tidy", "t"),
        lambda: Producer(broker.ready.name_server),
    ):
        opened = make()
        opened.close()
        opened.close()
        del opened
        gc.collect()
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]


def test_one_that_leaves_while_it_asks_has_left(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has asked last does not come to the coordinator behind its farewell, by another way:
    it would be a member again, whose queues nobody gets before its session is over."""
    send_join = Membership._send_join

    def leave_at_once(self: Membership, command: JoinGroup) -> None:
        if command.wait_ms:
            until(lambda: self._channel._shortcut.line is not None)
            self._closed = True
        send_join(self, command)

    monkeypatch.setattr(Membership, "_send_join", leave_at_once)
    for number in range(20):
        group = f"leaves-{number}"
        with Consumer(broker.ready.name_server, group, "t") as consumer:
            (place,) = consumer._member._places.values()
            until(lambda place=place: place._has_left)
        assert members(broker, group) == []


# Before the end whatever Python this is becomes as strict as 3.12.0, which starts no thread there.
PROGRAM = f"""
import atexit, os, sys, threading
from cometmq import Consumer, Producer

def no_thread(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

consumer = Consumer(sys.argv[1], sys.argv[2], "t")
producer = Producer(sys.argv[1], linger_ms=60_000)
messages = consumer.poll(timeout_s={patient(30)})
consumer.ack(messages)
producer.send("t", b"lingers", queue_id=1)
print(consumer.member, flush=True)
atexit.register(setattr, threading.Thread, "start", no_thread)
if sys.argv[3] == "forks" and os.fork() == 0:
    sys.exit()  # nothing here is the child's
"""


@pytest.mark.parametrize("how", ["plain", "forks"])
def test_the_interpreter_s_end_closes_them(how: str, broker: RunningBroker) -> None:
    group = f"end-{how}"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM]
    done = subprocess.run(
        [*command, broker.ready.name_server, group, how],
        capture_output=True, text=True, timeout=patient(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.findall(r"ResourceWarning: (.*) was not closed: use it in a `with`", done.stderr)
    assert sorted(said) == ["a producer", f"the consumer {done.stdout.split()[0]} of group {group}"]
    assert "Traceback" not in done.stderr
    assert members(broker, group) == []
    assert b"lingers" in [each.body for each in broker.read_queue("t", 1)]
    with Consumer(broker.ready.name_server, group, "t") as consumer:
        found = consumer.poll(timeout_s=WAIT_S)  # the four went before, and were committed
        assert b"lingers" in [each.body for each in found], found


STAYS = f"""
import sys, threading
from cometmq import Consumer
consumer = Consumer(sys.argv[1], sys.argv[2], "t")
consumer.poll(timeout_s={patient(30)})
print(consumer.member, flush=True)
threading.Event().wait()
"""


def test_one_that_was_killed_keeps_nobody_waiting(broker: RunningBroker) -> None:
    """Its next self is served at once, not when the old one has been silent for the session."""
    command = [sys.executable, "-c", STAYS, broker.ready.name_server, "killed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        old = process.stdout.readline().strip()
        assert members(broker, "killed") == [old]
        process.kill()
        began = time.monotonic()
        with Consumer(broker.ready.name_server, "killed", "t") as consumer:
            assert consumer.poll(timeout_s=WAIT_S)
            until_alone(broker, "killed", consumer.member)
            assert time.monotonic() - began < SESSION_S / 2


def test_one_that_lives_is_left_in_peace(broker: RunningBroker) -> None:
    with (
        Consumer(broker.ready.name_server, "two", "t") as one,
        Consumer(broker.ready.name_server, "two", "t") as other,
    ):
        wanted = sorted([one.member, other.member])
        until_alone(broker, "two", *wanted)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert members(broker, "two") == wanted
            time.sleep(0.1)
