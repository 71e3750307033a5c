"""The package as users get it: a wheel, installed in an environment of its own. No tests here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
#: A wheel that was built before from the same sources; without it one is built, which takes time.
WHEEL: Final = "COMETMQ_TEST_WHEEL"


BESIDE_CODE: Final = (
    ".ci", "docs", "tests", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE",
    "CHANGELOG.md",
)  # fmt: skip
MADE: Final = (
    "*.so", "_views.c", "codec.c", "columns.c", "live.c", "store.c", "__pycache__", ".*_cache",
    ".hypothesis",
)  # fmt: skip


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
    """Return the given wheel, or build one in `folder`.

    The build uses this environment if that has all requirements (the extra `dev` has), otherwise a
    package index. Without an index the test is skipped.
    """
    if given := os.environ.get(WHEEL):
        return Path(given)
    tree = copy_sources(folder / "tree")
    missing = missing_to_build(tree)
    why_not = _why_not_built(folder, tree, isolated=bool(missing))
    if why_not is not None and is_of_an_index(why_not):
        pytest.skip(
            f"the package as users get it, which needs a package index for {', '.join(missing)}: "
            f"{first_error(why_not)}"
        )
    assert why_not is None, why_not
    (wheel,) = folder.glob("cometmq-*.whl")
    return wheel


def missing_to_build(tree: Path) -> list[str]:
    """Return the build requirements (PEP 518) that this environment lacks."""
    settings = tomllib.loads((tree / "pyproject.toml").read_text())
    return [each for each in settings["build-system"]["requires"] if not _is_here(each)]


def _is_here(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _why_not_built(folder: Path, tree: Path, *, isolated: bool) -> str | None:
    """Build a wheel. Return pip's output if that fails, otherwise None."""
    options = [] if isolated else ["--no-build-isolation"]
    done = run_pip("wheel", "--no-deps", *options, "--wheel-dir", str(folder), str(tree))
    return done.stdout + done.stderr if done.returncode else None


def is_of_an_index(said: str) -> bool:
    """Return whether pip could not reach a package index; otherwise the build itself failed."""
    return bool(
        re.search(r"No matching distribution found|Could not fetch URL|Connection.*Error", said)
    )


def first_error(said: str) -> str:
    lines = (line.strip() for line in said.splitlines())
    return next((line for line in lines if line.startswith("ERROR: ")), "pip says no more")[:400]


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
    lent = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    Path(purelib, "borrowed.pth").write_text("".join(f"{each}\n" for each in lent))
    pip("--python", str(python), "install", "--no-index", f"{wheel}[spark]")
    return python


def run_pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def pip(*arguments: str) -> None:
    done = run_pip(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def installed(folder: Path) -> Path:
    """The interpreter of an environment that has the wheel."""
    return install(wheel_in(folder), folder / "venv")
