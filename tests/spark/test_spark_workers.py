"""Where Spark's Python workers import from."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cometmq.spark.daemon import without_archives


def folder(path: Path, *packages: str) -> str:
    for package in packages:
        (path / package).mkdir(parents=True)
        (path / package / "__init__.py").touch()
    return str(path)


def test_archives_of_what_is_installed_are_left_out(tmp_path: Path) -> None:
    installed = folder(tmp_path / "a b", "pyspark", "py4j")
    archives = [
        f"{installed}/pyspark/python/lib/{each}" for each in ("pyspark.zip", "py4j-0.9-src.zip")
    ]
    path = ["", *archives, "/jars/some.jar", installed, "/lib/python3"]
    assert without_archives(path) == ["", "/jars/some.jar", installed, "/lib/python3"]


def test_linked_files_are_the_same(tmp_path: Path) -> None:
    folder(tmp_path / "there", "pyspark", "py4j")
    linked = folder(tmp_path / "here", "pyspark")
    init = Path("pyspark", "__init__.py")
    (tmp_path / "here" / init).unlink()
    (tmp_path / "here" / init).symlink_to(tmp_path / "there" / init)
    lib = tmp_path / "there/pyspark/python/lib"
    archives = [str(lib / "pyspark.zip"), str(lib / "py4j.zip")]
    assert without_archives([*archives, linked]) == [archives[1], linked]


@pytest.mark.parametrize("packages", [(), ("pyspark",), ("py4j",)])
def test_what_is_not_installed_stays(tmp_path: Path, packages: tuple[str, ...]) -> None:
    """As where Spark is no package of pip's, or its py4j lies elsewhere."""
    installed = folder(tmp_path, *packages)
    archives = [f"{installed}/pyspark/python/lib/{each}-1.zip" for each in ("pyspark", "py4j")]
    left = [each for each in archives if Path(each).stem.removesuffix("-1") not in packages]
    assert without_archives([*archives, installed]) == [*left, installed]
    assert without_archives(archives) == archives, "the folder is not on the path"
    elsewhere = [installed, "/opt/spark/python/lib/pyspark.zip", f"{installed}/pyspark.zip"]
    assert without_archives(elsewhere) == elsewhere


@pytest.mark.slow
def test_workers_import_what_pip_has_compiled(spark: SparkSession) -> None:
    def paths(batches: Iterator[object]) -> Iterator[object]:
        import py4j
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyspark

        for _ in batches:
            found = [pyspark.__file__, py4j.__file__, sys.executable]
            yield pa.RecordBatch.from_arrays([pa.array(found)], ["path"])

    rows = spark.range(0, 1, 1, 1).mapInArrow(paths, "path string").collect()
    found = {row.path for row in rows}
    assert sys.executable in found
    assert len(found) == 3
    assert not [each for each in found if ".zip" in each]


def test_what_is_imported_ahead_starts_no_thread() -> None:
    """It would not be there in the workers, which are forked."""
    program = (
        "import os, sys; from cometmq.spark.daemon import import_ahead; import_ahead(); "
        "print(len(os.listdir('/proc/self/task')), 'cometmq.spark.source' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == [b"1", b"True"]


@pytest.mark.slow
def test_workers_are_forked_with_what_they_need(spark: SparkSession) -> None:
    def frozen(batches: Iterator[object]) -> Iterator[object]:
        import pyarrow as pa

        for _ in batches:
            ahead = "cometmq.spark.source" in sys.modules
            yield pa.RecordBatch.from_arrays([pa.array([gc.get_freeze_count() * ahead])], ["count"])

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(frozen, "count long").collect()
    assert row["count"] > 10_000
