"""The package as users get it: a wheel, installed in an environment of its own. No tests here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
#: A wheel that was built before from the same sources; without it one is built, which takes time.
WHEEL: Final = "COMETMQ_TEST_WHEEL"


BESIDE_CODE: Final = (
    ".ci", "docs", "tests", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE",
    "CHANGELOG.md",
)  # fmt: skip
MADE: Final = ("*.so", "_kernel.c", "__pycache__", ".*_cache", ".hypothesis")


def copy_sources(tree: Path) -> Path:
    """A build leaves files beside its sources."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    code = {each.partition("/")[0] for each in settings["package-dir"].values()}
    tree.mkdir()
    for name in sorted(code.union(BESIDE_CODE)):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*MADE))
        else:
            shutil.copy(ROOT / name, tree)
    return tree


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
