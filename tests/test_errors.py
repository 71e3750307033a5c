"""The errors of all packages: one tree, no code twice, each of them told apart on the wire."""

from __future__ import annotations

import importlib

import pytest
from packages import PACKAGE_DIR
from paths import ROOT

from cometmq.errors import CometError, ConfigError, StoreDamaged
from cometmq.protocol.errors import BY_CODE, from_code
from cometmq.shm.state.fastjson import ConfigFileDamaged


def modules() -> list[str]:
    return [
        f"{package}.{path.stem}"
        for package, folder in PACKAGE_DIR.items()
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]


def all_errors(root: type[CometError]) -> list[type[CometError]]:
    below = (each for child in root.__subclasses__() for each in all_errors(child))
    return list(dict.fromkeys([root, *below]))  # one that has two bases is found by both


def test_codes_are_unique_over_all_packages() -> None:
    names = modules()
    assert len(names) > 150
    assert {"cometmq.spark.schema", "cometmq.bench.extra", "cometmq.shm.state.config_files"} <= set(
        names
    )
    for name in names:
        importlib.import_module(name)
    by_code: dict[int, list[str]] = {}
    for error in all_errors(CometError):
        if "code" in vars(error) and error.__module__.startswith("cometmq"):
            by_code.setdefault(error.code, []).append(error.__name__)
    assert {code: found for code, found in by_code.items() if len(found) > 1} == {}
    assert {error.code for error in all_errors(CometError)} >= {
        9042,
        9043,
    }  # Spark's are among them


@pytest.mark.parametrize("error", sorted(BY_CODE.values(), key=lambda error: error.code))
def test_every_error_survives_the_wire(error: type[CometError]) -> None:
    back = from_code(error.code, "why\nand what to do")
    assert type(back) is error
    assert str(back) == "why\nand what to do"


def test_a_setting_that_cannot_be_used_is_one_of_the_tree() -> None:
    error = ConfigError("a = 1: must be 2", "b = 1: must be 3")
    assert isinstance(error, CometError)
    assert error.problems == ("a = 1: must be 2", "b = 1: must be 3")
    assert str(error) == "a = 1: must be 2\nb = 1: must be 3"


def test_a_damaged_config_file_arrives_as_a_damaged_store() -> None:
    """It is made of more than a text, so it travels as what it is made of."""
    error = ConfigFileDamaged("topics.json", "no map", 3, 4)
    back = from_code(error.code, str(error))
    assert type(back) is StoreDamaged
    assert str(back) == "topics.json, line 3, column 4: no map"
