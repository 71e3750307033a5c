"""Where the test data of other makers lies: stores that RocketMQ wrote, real log lines.

It is no part of the repository. Log lines are made by ourselves where it is not there; what only a
RocketMQ can write is not, and tests that need that are skipped, which the end of the run says.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest

VARIABLE = "COMETMQ_TEST_DATA"
DATA = Path(os.environ.get(VARIABLE, Path(__file__).parents[2] / ".." / "shared" / "data"))
SEED: Final = 20_260_101
LINES: Final = 2_000


def data_path(*parts: str) -> Path:
    """A file or folder of the test data; the test is skipped where it is not there."""
    path = DATA.joinpath(*parts).resolve()
    if path.exists():
        return path
    if parts[0] == "loghub":
        return made_logs().joinpath(*parts[1:])
    reason = f"{path} is not there: set {VARIABLE} to the folder that holds {parts[0]}"
    pytest.skip(reason, allow_module_level=True)


# --- log lines of our own -------------------------------------------------------------------------


@functools.cache
def made_logs() -> Path:
    """A folder of logs like those of loghub in form, the same in every run."""
    folder = Path(tempfile.mkdtemp(prefix="cometmq-test-logs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, line in _LOGS.items():
        chance = random.Random(f"{SEED} {name}")
        text = "\n".join(line(chance, number) for number in range(LINES)) + "\n"
        (folder / f"{name}.log").write_text(text)
    return folder


def _words(chance: random.Random) -> str:
    words = ("served", "block", "lost", "node", "user", "session", "failed", "opened", "closed")
    return " ".join(chance.choices(words, k=chance.randint(2, 14)))


def _hdfs(chance: random.Random, number: int) -> str:
    part = chance.choice(("dfs.FSNamesystem", "dfs.DataNode$PacketResponder", "dfs.DataNode"))
    block = chance.choice((-1, 1)) * chance.getrandbits(62)
    return (
        f"081109 {203_000 + number:06} {chance.randint(1, 999)} INFO {part}: "
        f"{_words(chance)} blk_{block} {_words(chance)}"
    )


def _syslog(chance: random.Random, number: int) -> str:
    host = ".".join(str(chance.randint(1, 254)) for _ in range(4))
    clock = f"{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}"
    return f"Dec 10 {clock} LabSZ sshd[{chance.randint(1, 32_000)}]: {_words(chance)} {host}"


def _levels(chance: random.Random, number: int) -> str:
    level = chance.choice(("INFO", "INFO", "WARN", "ERROR"))
    clock = f"{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}"
    return f"17/06/09 {clock} {level} part.{chance.choice('ABCD')}: {_words(chance)} \t#{number}"


_LOGS: Final = {
    "Apache": _levels,
    "HDFS": _hdfs,
    "Hadoop": _levels,
    "Linux": _syslog,
    "OpenSSH": _syslog,
    "OpenStack": _levels,
    "Spark": _levels,
    "Zookeeper": _levels,
}
