"""The wheel in an environment of its own, used from elsewhere and without register()."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import golden
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

READ = """
import json, sys
import cometmq
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]")
for key, value in {
    "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
frame = spark.read.format("cometmq").option("store", sys.argv[1]).option("subscribePattern", ".*")
rows = frame.load().select("topic", "queue_id", "queue_offset").collect()
print(json.dumps({"from": cometmq.__file__, "rows": sorted(tuple(row) for row in rows)}))
"""


def test_found_without_register(installed_python: Path, tmp_path: Path) -> None:
    store = golden.unpack("loghub-clean", tmp_path)
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [installed_python, "-c", READ, store], cwd=tmp_path, capture_output=True, text=True,
        env={**kept, "PYSPARK_PYTHON": str(installed_python)}, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["from"]).is_relative_to(installed_python.parents[1])
    listed = [
        [row["topic"], row["queueId"], row["queueOffset"]]
        for row in golden.listing("loghub-clean")
    ]  # fmt: skip
    assert found["rows"] == sorted(listed)
