"""The same command with the core and the simulator compiled by mypyc: 2.5 times as fast.

python -m tests.simulator.native --schedules 1000000

A seed means the same in both. Compiling takes half a minute, into a temporary folder; where it
fails, that is said and the interpreted form runs. Brokers and CI's schedules are interpreted.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))

from packages import link_files, link_packages
from paths import TESTS

# All with code that runs for each event. Structs of msgspec cannot be compiled, and are not slow.
CORE: Final = "contact electing following leading link local registering replica"
SIMULATED: Final = "mutants schedule truth world"
MODULES: Final = [
    *(f"cometmq.actors.replication.core.{name}" for name in CORE.split()),
    *(f"simulator.{name}" for name in SIMULATED.split()),
]


class NotCompiled(Exception):
    """mypyc is not there, or has failed; with the end of what it said."""


def compile_into(folder: Path) -> None:
    """All packages as links, with machine code beside the modules that have some. Whoever has the
    folder in its search path imports from there. Raises NotCompiled."""
    link_packages(folder)
    link_files(TESTS / "simulator", folder / "simulator")
    # A package by its file is found before tests/simulator, which has none, wherever that stands.
    (folder / "simulator" / "__init__.py").touch()
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    command = [sys.executable, "-m", "mypyc", "--strict", *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotCompiled((done.stdout + done.stderr)[-1000:])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="simulator.") as folder:
        print("compiling", flush=True)
        try:
            compile_into(Path(folder))
        except NotCompiled as error:
            print(f"cannot be compiled, so it is interpreted: {error}", file=sys.stderr, flush=True)
        else:
            # Processes that are not forked find it by the environment.
            search = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
            os.environ["PYTHONPATH"] = os.pathsep.join(search)
            sys.path.insert(0, folder)
            for name in MODULES:
                assert isinstance(importlib.import_module(name).__loader__, ExtensionFileLoader)
        importlib.import_module("tests.simulator.__main__").main()


if __name__ == "__main__":
    main()
