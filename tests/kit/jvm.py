"""JVMs of tests live for seconds: what an hour of running would repay costs them most. No tests
here.

    python tests/kit/jvm.py FILE

has a JVM of Spark write the classes that it has loaded to FILE (class data sharing). Where the
variable COMETMQ_TEST_SPARK_CLASSES names that file, JVMs of Spark begin with them, for a third less
of processor time; while it is not there they load their classes themselves.
"""

from __future__ import annotations

import os
import sys
from typing import Final

#: Without the second compiler, which takes as much as all that they do, and without verifying the
#: classes of published jars.
QUICK: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
#: And of a small heap.
SMALL: Final = ("-XX:+UseSerialGC", *QUICK)
CLASSES: Final = os.environ.get("COMETMQ_TEST_SPARK_CLASSES")
#: A JVM that cannot use them would say so on its standard output.
SPARK: Final = (*SMALL, *((f"-XX:SharedArchiveFile={CLASSES}", "-Xlog:disable") if CLASSES else ()))


def write_classes(path: str) -> None:
    """Nobody sees half of it."""
    part = f"{path}.part"
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join((*SMALL, f"-XX:ArchiveClassesAtExit={part}"))
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.codegen.wholeStage", "false").getOrCreate()
    assert spark.range(9).groupBy("id").count().count() == 9
    gateway = SparkContext._gateway
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    assert gateway.proc.wait() == 0
    os.rename(part, path)


if __name__ == "__main__":
    write_classes(sys.argv[1])
