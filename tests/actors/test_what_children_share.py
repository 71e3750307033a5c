"""What the processes of a broker have in common is there once; none loads what others do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cometmq.actors.runtime.family import settings_of
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ConfigError


def test_the_broker_s_own_process_does_not_load_what_its_children_do() -> None:
    code = (
        "import sys, cometmq.actors.launch.broker\n"
        "assert 'cometmq.actors.launch.orderly_end' in sys.modules\n"
        "assert 'cometmq.actors.writer' not in sys.modules\n"
        "assert 'cometmq.actors.books' not in sys.modules"
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
