"""Facts about the source itself: its types, its packages, and who imports whom."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cometmq.shm import _kernel, layout

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGE_DIR: dict[str, str] = SETUPTOOLS["package-dir"]

# Which folder may import which: imports run downward (docs/architecture.md, The floors).
FLOORS: dict[str, set[str]] = {
    "conf": set(),
    "protocol": set(),
    "shm": {"conf", "protocol"},
    "actors": {"conf", "protocol", "shm"},
    "client": {"protocol", "shm"},
    "spark": {"client", "conf", "protocol", "shm"},
    "front": {"actors", "client", "conf", "protocol", "shm", "spark"},
    "bench": {"actors", "client", "conf", "front", "protocol", "shm", "spark"},
}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_types(tmp_path: Path) -> None:
    """mypy --strict over the files at the places they are imported from."""
    for package, folder in sorted(PACKAGE_DIR.items()):
        target = tmp_path.joinpath(*package.split("."))
        target.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / folder).iterdir():
            if path.is_file():  # a folder in it is a package of its own
                (target / path.name).symlink_to(path)
    cache = os.environ.get("COMETMQ_MYPY_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache]
    command += ["-p", "cometmq", "-p", "pyspark_cometmq"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checked = re.search(r"no issues found in (\d+) source files", done.stdout)
    assert checked is not None
    folders = [ROOT / folder for folder in PACKAGE_DIR.values()]
    packaged = [
        path for folder in folders for kind in ("*.py", "*.pyi") for path in folder.glob(kind)
    ]
    assert int(checked[1]) == len(packaged)


def test_every_package_is_listed() -> None:
    """An unlisted sub-package works in the editable install and is missing from the wheel."""
    found = {
        str(init.parent.relative_to(ROOT))
        for folder in PACKAGE_DIR.values()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(PACKAGE_DIR.values())
    assert set(SETUPTOOLS["packages"]) == set(PACKAGE_DIR)


def imported(path: Path) -> set[str]:
    """The project's folders that a module imports; `front` for the names of cometmq itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "cometmq":
                inner = parts[1] if len(parts) > 1 else ""
                found.add(inner if inner in FLOORS and inner != "front" else "front")
    return found


@pytest.mark.parametrize("folder", sorted(FLOORS))
def test_floors(folder: str) -> None:
    for path in sources(folder):
        upward = imported(path) - FLOORS[folder] - {folder}
        assert not upward, f"{path.relative_to(ROOT)} imports {sorted(upward)}"


def test_the_kernels_layouts_are_printed_from_the_declarations() -> None:
    text = (ROOT / "shm/layout.pxi").read_text()
    assert text == layout.as_pxi(), "print it again: python -m cometmq.shm.layout > shm/layout.pxi"
    by_name = {found.name: found.size for found in layout.LAYOUTS}
    for name, size in _kernel.layout_sizes().items():
        assert by_name[name] == size


def test_the_kernels_types_name_what_is_there() -> None:
    """Every name in _kernel.pyi exists, and every public name of the kernel is in it."""
    tree = ast.parse((ROOT / "shm/_kernel.pyi").read_text())
    declared = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } | {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {
        name
        for name, value in vars(_kernel).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "cometmq.shm._kernel") == "cometmq.shm._kernel"
    }
    assert declared - {"Buffer"} <= set(vars(_kernel))
    assert public - declared == {"Holder"}
