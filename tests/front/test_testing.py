"""The plug-in for pytest, as a user's tests see it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from paths import ROOT
from patience import patient
from waiting import still_there, until

from cometmq.errors import ArgumentIllegal, NameIllegal
from cometmq.testing.sandbox import OwnBroker, Sandbox

pytest_plugins = ["pytester"]

USES = """
import asyncio
import signal
import pytest
from cometmq.errors import ClientClosed, CometError

made = []


@pytest.fixture(scope="session")
def cometmq_settings():
    return {"messageDelayLevel": "1s 7s"}


@pytest.mark.parametrize("turn", [1, 2])
def test_topics_and_groups_are_the_tests_own(cometmq, turn):
    topic, group = cometmq.topic("orders", queues=2), cometmq.group("billing")
    assert topic == cometmq.topic("orders", queues=2)
    assert not {topic, group} & set(made)
    made.extend([topic, group])
    assert cometmq.admin.describe_topic(topic).message_count == 0
    assert group in [each.group for each in cometmq.admin.groups()]
    made_here = cometmq.producer(), cometmq.consumer(group, topic)
    made_here[0].send(topic, b"paid")
    (message,) = made_here[1].poll(timeout_s=60)
    popped = cometmq.pop_consumer(cometmq.group("popping"), topic)
    assert [each.body for each in popped.poll(timeout_s=60)] == [message.body]
    made.extend([*made_here, popped])


def test_clients_are_closed_at_the_end():
    producer, consumer, popped = [each for each in made if not isinstance(each, str)][:3]
    for call in (lambda: producer.send("t", b"x"), consumer.poll, popped.poll):
        with pytest.raises(ClientClosed):
            call()


def test_asyncio(cometmq):
    topic = cometmq.topic()

    async def work():
        await cometmq.async_producer().send(topic, b"paid")
        consumer = cometmq.async_consumer(cometmq.group(), topic)
        assert len(await consumer.poll(timeout_s=60)) == 1
        async with cometmq.async_pop_consumer(cometmq.group("pop"), topic) as consumer:
            assert len(await consumer.poll(timeout_s=60)) == 1
        made.append(consumer)

    asyncio.run(work())


def test_expect_takes_each_message_once_in_any_order(cometmq):
    topic, other = cometmq.topic(queues=4), cometmq.topic("other")
    cometmq.producer().send_many(topic, [b"c", b"a", b"b", b"a"])
    found = cometmq.expect(topic, [b"a", b"b", b"a"])
    assert [each.body for each in found] == [b"a", b"b", b"a"]
    assert len({(each.queue_id, each.queue_offset) for each in found}) == 3
    cometmq.expect(topic, [b"c"])
    cometmq.expect_none(topic, within_s=0)
    cometmq.expect_none(other, within_s=0)


def test_expect_none_fails(cometmq):
    topic = cometmq.topic()
    cometmq.producer().send(topic, b"surprise")
    cometmq.expect_none(topic, within_s=60)


def test_expect_fails(cometmq):
    topic = cometmq.topic()
    cometmq.producer().send_many(topic, [b"paid", b"lost"])
    cometmq.expect(topic, [b"lost"])
    cometmq.expect(topic, [b"paid", b"sent"], timeout_s=0.05)


def test_own_broker(cometmq_own_broker):
    broker = cometmq_own_broker
    assert broker.broker.settings.message_delay_level == "1s 7s"
    topic, producer, name_server = broker.topic(), broker.producer(), broker.name_server
    producer.send(topic, b"before")
    broker.kill()
    broker.restart()
    assert broker.name_server == name_server
    producer.send(topic, b"after")
    broker.expect(topic, [b"before", b"after"])
    broker.pause()
    hasty = broker.producer(timeout_s=0.1, retry_max=0)
    with pytest.raises(CometError):
        hasty.send(topic, b"late")
    broker.resume()
    producer.send(topic, b"continued")
    assert broker.expect(topic, [b"continued"])


def test_own_broker_is_killed(cometmq_own_broker):
    topic, producer = cometmq_own_broker.topic(), cometmq_own_broker.producer(timeout_s=0.1)
    producer.send(topic, b"x")
    cometmq_own_broker.kill()
    cometmq_own_broker.pause()
    cometmq_own_broker.kill()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Both programs' tests run, in a process of their own: pytester's would forget modules."""
    folder = tmp_path_factory.mktemp("uses")
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL)
    (folder / "test_page.py").write_text(next(each for each in programs if "def test_" in each))
    (folder / "test_uses.py").write_text(USES)
    command = [sys.executable, "-m", "pytest", "-rpf", f"--basetemp={folder / 'stores'}"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=patient(120), check=False
    )


def test_fixtures(ran: subprocess.CompletedProcess[str]) -> None:
    """Every fixture and method, by tests of a user; two of these fail, and say why."""
    assert "2 failed, 9 passed in" in ran.stdout, ran.stdout
    assert re.search(r"unexpected messages:\nE +b'surprise'  # queue 0 @0\n", ran.stdout)
    missing = r"of 2 expected messages 1 did not arrive within 0.05 s\nE +missing:\nE +b'sent'\n"
    assert re.search(missing + r"E +there instead:\nE +nothing\n", ran.stdout)


def test_a_failed_test_shows_the_log(ran: subprocess.CompletedProcess[str]) -> None:
    section = r"^-+ CometMQ broker log \(call\) -+\n.*coordinator: "
    assert len(re.findall(section, ran.stdout, re.MULTILINE)) == 2


def test_the_program_of_the_page_passes(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.stdout.count("PASSED test_page.py::") == 2, ran.stdout


ON_WORKERS = """
import os
from pathlib import Path


def test_nothing_is_imported_before_a_fixture_is_requested():
    import sys
    found = {name for name in sys.modules if name.partition(".")[0] == "cometmq"}
    assert found == {"cometmq", "cometmq.testing"}


def test_broker(cometmq_broker, cometmq):
    Path(os.environ["PYTEST_XDIST_WORKER"]).write_text(f"{cometmq_broker.pid}")
    assert cometmq.name_server == cometmq_broker.name_server
"""


@pytest.mark.slow
def test_each_xdist_worker_has_a_broker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ON_WORKERS)
    result = pytester.runpytest_subprocess("-p", "cometmq.testing", "-n", "2", "--dist", "each")
    result.assert_outcomes(passed=4)
    pids = [int((pytester.path / f"gw{worker}").read_text()) for worker in range(2)]
    assert len(set(pids)) == 2
    assert not still_there(pids, patient(30))


WAITS = """
import signal


def test_waits(cometmq, cometmq_own_broker):
    cometmq.producer().send(cometmq.topic(), b"x")
    print("ready", flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_nothing_is_left_after_ctrl_c(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(WAITS)
    store = tmp_path / "stores"
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, f"--basetemp={store}"], stdout=subprocess.PIPE, text=True, cwd=pytester.path
    ) as child:
        assert child.stdout is not None
        said = next((line for line in child.stdout if line.endswith("ready\n")), None)
        assert said, "the child ended before its brokers were ready"
        left = psutil.Process(child.pid).children(recursive=True)
        assert len(left) > 20  # two brokers
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=patient(60))
    assert child.returncode == pytest.ExitCode.INTERRUPTED
    assert not still_there([each.pid for each in left], patient(30))
    assert not list(store.glob("*/store"))


@pytest.mark.parametrize("bodies", [b"paid", "paid", ["paid"], []])
def test_bodies_that_are_none(cometmq: Sandbox, bodies: list[bytes]) -> None:
    with pytest.raises(ArgumentIllegal, match=r"expected a list of bytes, such as \[b\"paid\"\]"):
        cometmq.expect("t", bodies)


def test_a_name_that_cannot_be(cometmq: Sandbox) -> None:
    with pytest.raises(NameIllegal):
        cometmq.topic("a/b")
    with pytest.raises(NameIllegal):
        cometmq.group("a/b")


def test_the_log_of_before_a_restart_is_kept(cometmq_own_broker: OwnBroker) -> None:
    cometmq_own_broker.restart()
    cometmq_own_broker.restart()

    def starts() -> int:
        return sum("serves" in each.getMessage() for each in cometmq_own_broker.recent_log)

    until(lambda: starts() == 3, says="three starts are in the log")
