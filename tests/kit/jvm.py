"""JVMs of tests live for seconds: what an hour of running would repay costs them most. No tests
here.

    python tests/kit/jvm.py FILE

has a JVM of Spark write the classes that it has loaded to FILE (class data sharing). Where the
variable COMETMQ_TEST_SPARK_CLASSES names that file, JVMs of Spark begin with them, for a third less
of processor time; while it is not there they load their classes themselves. And it adds to the
archives that Spark's Python processes import from, in the environment that it runs in, what Python
makes of their modules: each process would compile them anew (cometmq.spark.daemon).
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
import zipfile
from pathlib import Path
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


#: Of pyspark: what no worker of ours imports.
NOT_IMPORTED: Final = tuple(f"pyspark/{each}/" for each in ("pandas", "sql/connect", "testing"))
UNCHECKED: Final = 1  # flags of a .pyc: by the hash of its source, which nobody compares


def compile_archives() -> None:
    """Of pyspark and py4j, for those who import from there."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    for archive in Path(found.origin or "").parent.glob("python/lib/*.zip"):
        part = archive.with_suffix(".part")
        with zipfile.ZipFile(archive) as sources, zipfile.ZipFile(part, "w") as both:
            names = set(sources.namelist())
            for name in sources.namelist():
                data = sources.read(name)
                both.writestr(name, data)
                if name.endswith(".py") and f"{name}c" not in names and not is_left_out(name):
                    code = compile(data, f"{archive}/{name}", "exec", dont_inherit=True)
                    head = importlib.util.MAGIC_NUMBER + UNCHECKED.to_bytes(4, "little")
                    hashed = importlib.util.source_hash(data)
                    both.writestr(f"{name}c", head + hashed + marshal.dumps(code))
        os.rename(part, archive)


def is_left_out(name: str) -> bool:
    return name.startswith(NOT_IMPORTED) or "/tests/" in name


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
    compile_archives()
    write_classes(sys.argv[1])
