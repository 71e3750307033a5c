"""Tests that need a package index are skipped with that reason if there is none (fault 39)."""

from __future__ import annotations

import os
from pathlib import Path

import installed
import pytest

PYPROJECT = """
[build-system]
requires = [{requires}]
build-backend = "setuptools.build_meta"

[project]
name = "cometmq"
version = "0"
"""
#: A requirement that no index has; pip runs without an index.
ABSENT = "cometmq-test-that-nobody-publishes>=3"


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv(installed.WHEEL, raising=False)


def sources(monkeypatch: pytest.MonkeyPatch, requires: str, more: str = "") -> None:
    """Replace our package by a small one."""

    def copy(tree: Path) -> Path:
        tree.mkdir()
        text = PYPROJECT.format(requires=", ".join(f'"{each}"' for each in requires.split()))
        (tree / "pyproject.toml").write_text(text + more)
        (tree / "cometmq.py").touch()
        return tree

    monkeypatch.setattr(installed, "copy_sources", copy)


def test_a_wheel_is_built_with_what_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, "setuptools>=77")
    assert installed.wheel_in(tmp_path).name == "cometmq-0-py3-none-any.whl"


def test_ours_needs_nothing_that_is_not_here() -> None:
    """The extra `dev` has all build requirements."""
    assert installed.missing_to_build(installed.ROOT) == []


@pytest.mark.parametrize("requirement", [ABSENT, "setuptools>=9999"])
def test_a_test_that_needs_an_index_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requirement: str
) -> None:
    sources(monkeypatch, requirement)
    with pytest.raises(pytest.skip.Exception) as skipped:
        installed.wheel_in(tmp_path)
    said = str(skipped.value)
    assert f"needs a package index for {requirement}: ERROR: " in said


def test_a_build_that_fails_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed build fails the test: the index is not the cause."""
    sources(monkeypatch, "setuptools>=77", "[tool.setuptools]\npackages = ['not-there']\n")
    with pytest.raises(AssertionError, match="not-there"):
        installed.wheel_in(tmp_path)


def test_a_given_wheel_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(installed.WHEEL, str(tmp_path / "given.whl"))
    assert installed.wheel_in(tmp_path) == tmp_path / "given.whl"
