"""Libraries that tests have brokers begin with (LD_PRELOAD). No tests here."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def library(source: Path) -> Path:
    """Of a C file, built once: programs that have it preloaded are forked from one process."""
    folder = Path(tempfile.mkdtemp(prefix="cometmq-preloaded-"))
    atexit.register(shutil.rmtree, folder)
    built = folder / f"{source.stem}.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(built), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return built
