"""What the processes of a broker have in common is there once; none loads what others do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from family import RunningBroker
from paths import SEARCH
from patience import patient

from cometmq import Broker, Consumer, Producer
from cometmq.actors.launch.process import Setup, prepare
from cometmq.actors.launch.process_table import ProcessTable
from cometmq.actors.launch.runs import create_control
from cometmq.actors.runtime.family import settings_of
from cometmq.actors.runtime.roles import doorbell_of, roles_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ConfigError
from cometmq.shm.live.control import Counter


def test_the_broker_s_own_process_does_not_load_what_its_children_do() -> None:
    code = (
        "import sys, cometmq.actors.launch.broker\n"
        "assert 'cometmq.actors.launch.orderly_end' in sys.modules\n"
        "assert 'cometmq.actors.writer' not in sys.modules\n"
        "assert 'cometmq.actors.tables' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_are_worked_out_once_for_all_children() -> None:
    keys = BrokerSettings(broker_name="one").as_keys()
    settled = settings_of(keys)
    assert settings_of(dict(keys)) is settled
    assert settings_of({**keys, "brokerName": "two"}).broker_name == "two"
    assert settings_of(keys) == settled
    with pytest.raises(ConfigError):
        settings_of({**keys, "brokerName": 3.5})
    assert settings_of(keys) == settled


def test_what_children_have_in_common_is_made_once_before_their_forks(tmp_path: Path) -> None:
    settings = BrokerSettings(store_path_root_dir=tmp_path)
    create_control(settings, [], roles_of(settings), "one", "token", 0)
    in_common = {
        "settings": settings.as_keys(),
        "store": str(tmp_path),
        "doorbells": [],
        "addresses": {},
        "last_run": None,
    }
    own = [{"role": role, "doorbell": doorbell_of(role)} for role in ("flush", "cleaner")]
    messages = [in_common | each for each in own]
    flush, broken, cleaner = prepare(
        [messages[0], messages[1] | {"settings": {"no": 1}}, messages[1]]
    )
    assert isinstance(broken.setup, ConfigError)
    assert isinstance(flush.setup, Setup)
    assert isinstance(cleaner.setup, Setup)
    assert flush.setup.family.settings is cleaner.setup.family.settings
    ours, others = flush.setup.family.control, cleaner.setup.family.control
    ours.own(Counter.FLUSHES).advance(7)
    assert others.read(Counter.FLUSHES).value == 7
    with pytest.raises(AssertionError):
        others.own(Counter.FLUSHES)
    assert flush.setup.log.handler is not cleaner.setup.log.handler
    logged = settings.as_keys() | {"logFile": str(tmp_path / "log")}
    (child,) = prepare([in_common | own[0] | {"settings": logged}])
    assert isinstance(child.setup, Setup)
    assert child.setup.log.handler is None  # a file has a lock for each process that opened it


def test_a_process_with_nothing_to_do_shares_most_of_its_memory(tmp_path: Path) -> None:
    """What is imported or collected after the fork would be its own."""
    with Broker(tmp_path / "store") as broker:
        zygote, *_ = psutil.Process(broker.pid).children()
        flush = next(each for each in zygote.children() if "flush" in each.name())
        own, whole = (memory_kib(flush.pid, name) for name in ("Private_Dirty", "Anonymous"))
    assert own < whole / 5, f"{own} of {whole} KiB"


def test_a_process_imports_nothing_of_its_own(tmp_path: Path) -> None:
    """What is imported after the fork is there once for each process, and in the way of its start:
    it belongs into a module's head. From the start on, over messages, to the end."""
    imports = tmp_path / "imports"
    environ = {"IMPORTS": str(imports), "PYTHONPATH": SEARCH}
    with RunningBroker(
        tmp_path / "store", environ=environ, module="importing_broker", program=True
    ) as broker:
        with Producer(broker.ready.name_server) as producer:
            producer.send("t", b"now")
            producer.send("t", b"later", deliver_after=0.1)
        with Consumer(broker.ready.name_server, "g", "t", start="earliest") as consumer:
            came = 0
            while came < 2:
                came += len(consumer.poll(2, patient(30)))
    found = imports.read_text().split("\n")[:-1] if imports.exists() else []
    assert not found, found


def memory_kib(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")))


def test_a_child_may_serve_before_it_is_known_to_run() -> None:
    table = ProcessTable(["flush"])
    table.ordered("flush")
    table.serves("flush")
    assert not table.all_serve
    table.started("flush", 7)
    assert table.all_serve
    assert table.gone(7) == "flush"
    assert not table.all_serve


def test_a_broker_loads_what_its_processes_need_and_no_more() -> None:
    code = (
        "import sys\n"
        "from cometmq.actors.launch.process import load_roles\n"
        "from cometmq.conf import BrokerSettings\n"
        "load_roles(BrokerSettings())\n"
        "assert 'cometmq.actors.coordination.coordinator' in sys.modules\n"
        "assert 'cometmq.actors.replication.slaves.ha' not in sys.modules\n"
        "assert 'cometmq.actors.replication.slaves.follower' not in sys.modules\n"
        "load_roles(BrokerSettings(ha_listen_port=1))\n"
        "assert 'cometmq.actors.replication.slaves.ha' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
