"""One SparkSession for the whole run, in a directory that has nothing to do with the source."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import installed
from pyspark.sql import SparkSession

from cometmq.spark import session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Executors and planners must find the package by themselves: not by where we stand."""
    if "JAVA_HOME" not in os.environ and shutil.which("java") is None:
        pytest.fail("these tests run Spark, and that needs Java 17: set JAVA_HOME, or PATH")
    before = Path.cwd()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    os.chdir(elsewhere)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    made = session(
        "local[2]",
        name="cometmq tests",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            # To compile code for each query takes longer than to interpret it for some rows.
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(elsewhere / "warehouse"),
            "spark.driver.memory": "1g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    os.chdir(before)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def installed_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel, as users get it."""
    return installed(tmp_path_factory.mktemp("installed"))
