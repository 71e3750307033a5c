"""Few descriptors (ulimit -n): a typed error that says how many there are and how many are needed,
for any number below what suffices."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import environment
from family import RunningBroker
from patience import patient

from cometmq.actors.launch.supervisor import DESCRIPTORS
from cometmq.actors.runtime.roles import doorbell_count
from cometmq.conf import BrokerSettings
from cometmq.errors import TooFewDescriptors
from cometmq.protocol.wire.descriptors import need, need_in_all

KIT = Path(__file__).parents[1] / "kit"
PROGRAM = """
import sys
from cometmq import Broker
from cometmq.errors import TooFewDescriptors
try:
    with Broker(sys.argv[1], profile=None) as broker, broker.producer() as producer:
        producer.send("t", b"x")
        with broker.consumer("g", "t", start="earliest") as consumer:
            print(len(consumer.poll(1, 30)))
except TooFewDescriptors as error:
    print(error)
"""
NEEDED = DESCRIPTORS + doorbell_count(BrokerSettings())


def run(count: int, *command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'ulimit -n {count}; exec "$@"', "sh", sys.executable]
    return subprocess.run(
        [*shell, *map(str, command)],
        cwd=cwd, capture_output=True, text=True, timeout=patient(120), check=False,
        env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize("client", ["admin", "producer", "consumer"])
@pytest.mark.slow
def test_a_client_says_what_it_needs(client: str, tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        broker.send("t", 0, [b"x"])
        server = broker.ready.name_server
        done = run(1024, KIT / "few_descriptors.py", client, server, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert len(found["too_low"]) >= 12  # from none that is left on
        assert re.search(
            r"takes \d+ descriptors, and \d+ are left of the \d+ that this process may have",
            found["text"],
        )
        few = run(12, "-m", "cometmq", "topic", "list", "--name-server", server, cwd=tmp_path)
        assert few.returncode == 1
        assert "Error: a connection to" in few.stderr
        assert "of the 12 that this process may have (ulimit -n)" in few.stderr
        assert "Traceback" not in few.stderr


@pytest.mark.parametrize("count", [64, NEEDED - 1])
@pytest.mark.slow
def test_a_broker_says_what_it_needs(count: int, tmp_path: Path) -> None:
    text = f"takes {NEEDED} descriptors, and this process may have {count} (ulimit -n)"
    done = run(count, "-c", PROGRAM, tmp_path / "store", cwd=tmp_path)
    assert text in done.stdout, done.stderr
    done = run(count, "-m", "cometmq", "broker", "--port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()  # nothing was begun


@pytest.mark.parametrize("count", [NEEDED, 256])
@pytest.mark.slow
def test_a_broker_serves_with_what_it_says(count: int, tmp_path: Path) -> None:
    done = run(count, "-c", PROGRAM, tmp_path / "store", cwd=tmp_path)
    assert done.stdout == "1\n", done.stdout + done.stderr


def test_a_service_and_a_name_server_say_it_too(tmp_path: Path) -> None:
    done = run(16, "-c", PROGRAM, tmp_path / "store", cwd=tmp_path)
    assert "a broker of this process's own takes 16 descriptors" in done.stdout, done.stderr
    done = run(40, "-m", "cometmq", "namesrv", "--port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert "a name server takes 40 descriptors" in done.stderr


def test_what_is_needed_is_counted_exactly() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need_in_all(soft, "all of them")
    with pytest.raises(TooFewDescriptors, match=f"takes {soft + 1} descriptors"):
        need_in_all(soft + 1, "one more")
    need(0, "nothing")
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(TooFewDescriptors, match="takes 1 descriptors, and 0 are left of the 0"):
            need(1, "something")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
