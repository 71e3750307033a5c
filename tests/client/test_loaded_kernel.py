"""Which extensions of the native kernel a process maps, by /proc/self/maps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

from cometmq.shm import kernel

PRODUCER = "import cometmq; made = cometmq.Producer(['127.0.0.1:1'])"
CONSUMERS = "import cometmq; cometmq.Consumer, cometmq.PopConsumer, cometmq.AsyncConsumer"
EXECUTOR = "import cometmq.spark.arrow, cometmq.spark.encoding"
MAPS = """
import json
bytes_of = {}
for line in open("/proc/self/maps"):
    where, *_, path = line.split(maxsplit=5) if line.count("/") else (line, "")
    if "/shm/kernel/" in path:
        begin, end = (int(each, 16) for each in where.split()[0].split("-"))
        name = path.rpartition("/")[2].partition(".")[0]
        bytes_of[name] = bytes_of.get(name, 0) + end - begin
print(json.dumps(bytes_of))
"""


def mapped(code: str) -> dict[str, int]:
    """Bytes by extension, in a process that has run the code."""
    done = subprocess.run(
        [sys.executable, "-c", code + MAPS],
        capture_output=True, text=True, check=True, timeout=patient(60),
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        pytest.param(PRODUCER, {"_views", "codec"}, id="producer"),
        pytest.param(CONSUMERS, {"_views", "codec", "live"}, id="consumers"),
    ],
)
def test_client_maps_less_than_half_of_the_kernel(code: str, wanted: set[str]) -> None:
    found = mapped(code)
    assert found.keys() == wanted
    whole = sum(path.stat().st_size for path in Path(kernel.__path__[0]).glob("*.so"))
    assert sum(found.values()) < whole / 2


def test_executor_of_spark_maps_messages_and_columns() -> None:
    assert mapped(EXECUTOR).keys() == {"_views", "codec", "columns"}
