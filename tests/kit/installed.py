"""The package as users get it: a wheel, installed in an environment of its own. No tests here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
#: A wheel that was built before from the same sources; without it one is built, which takes time.
WHEEL: Final = "COMETMQ_TEST_WHEEL"


#: What a tree of sources has beside them.
MADE: Final = (
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info",
    "*.so", "_kernel.c",
)  # fmt: skip


def copy_sources(tree: Path) -> Path:
    """A build leaves files beside its sources."""
    return shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*MADE))


def wheel_in(folder: Path) -> Path:
    """The wheel that was given, or one that is built there."""
    if given := os.environ.get(WHEEL):
        return Path(given)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(copy_sources(folder / "tree")))
    (wheel,) = folder.glob("cometmq-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """An environment with this wheel; the interpreter.

    What the wheel needs is taken from the environment that runs the tests, and has to be there.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", str(wheel))
    # A line in a .pth is a place to look in; the .pth files there, as of an editable install of
    # cometmq, are not followed.
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(purelib, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(python), "install", "--no-index", f"{wheel}[spark]")
    return python


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def installed(folder: Path) -> Path:
    """The interpreter of an environment that has the wheel."""
    return install(wheel_in(folder), folder / "venv")
