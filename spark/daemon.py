"""The process that starts Spark's Python workers, in a `session` on one machine.

Spark has workers import pyspark from an archive, `pyspark.zip`. An archive keeps nothing that was
compiled, so each process that imports from it compiles all it needs anew: a second of processor
time, for every kind of worker. Next to that archive pip has put the same files, and has compiled
them. So they are taken from there. And what all workers import is imported once, before they are
forked. All else is Spark's own daemon.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Where pip's pyspark has its archives, below the folder that it was installed into.
ARCHIVES: Final = ("pyspark", "python", "lib")


def without_archives(path: Sequence[str]) -> list[str]:
    """Of a `sys.path`: all but archives of what is installed in a folder of the path as well."""
    return [each for each in path if not _is_installed(Path(each), path)]


def _is_installed(archive: Path, path: Sequence[str]) -> bool:
    """Whether that is pyspark.zip or py4j-VERSION-src.zip, and what is in it lies unpacked too."""
    if archive.suffix != ".zip" or archive.parts[-4:-1] != ARCHIVES:
        return False
    module = Path(archive.stem.partition("-")[0], "__init__.py")
    beside = archive.parents[len(ARCHIVES)] / module
    # Spark follows links to its home, as an environment of linked files has them.
    installed = (Path(each, module) for each in path)
    return beside.is_file() and any(each.is_file() and each.samefile(beside) for each in installed)


def import_ahead() -> None:
    """What workers import, but for what starts threads, as pyarrow does: those would not be there
    after a fork. Spark has a worker look for garbage after each task; in this there is none."""
    import pyspark.worker  # noqa: F401

    import cometmq.spark.sink
    import cometmq.spark.source  # noqa: F401

    gc.freeze()


if __name__ == "__main__":
    sys.path[:] = without_archives(sys.path)
    from pyspark.daemon import manager

    from cometmq.spark.quiet import keep_quiet

    import_ahead()
    keep_quiet()
    manager()
