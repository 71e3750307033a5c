"""mypy --strict over the packages, at the places they are imported from. No tests here.

    python tests/kit/typed.py

does it, and leaves in `.mypy_cache` what mypy has found out about each file: whoever looks next has
less to do. It needs no kernel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from packages import link_packages
from paths import ROOT


def look_at_types(folder: Path, *modules: str) -> subprocess.CompletedProcess[str]:
    """Args:
    folder: an empty one, but for `modules`, which are looked at as well.
    """
    link_packages(folder)
    cache = ROOT / ".mypy_cache"  # what has not changed is not looked at again
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache)]
    command += ["-p", "cometmq", "-p", "pyspark_cometmq"]
    command += [part for name in modules for part in ("-m", name)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        done = look_at_types(Path(folder))
    print(done.stdout + done.stderr, end="")
    sys.exit(done.returncode)
