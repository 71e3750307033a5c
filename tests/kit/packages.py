"""The packages as they are imported; the repository has their folders under other names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from paths import ROOT

SETUPTOOLS: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "setuptools"
]
#: Package -> its folder below ROOT. A folder in it is a package of its own.
PACKAGE_DIR: Final[dict[str, str]] = SETUPTOOLS["package-dir"]


def link_packages(target: Path) -> None:
    """A tree of links to all their files, at the places they are imported from."""
    for package, folder in PACKAGE_DIR.items():
        link_files(ROOT / folder, target.joinpath(*package.split(".")))


def link_files(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            (target / path.name).symlink_to(path)
