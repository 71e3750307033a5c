"""Plugin of both conftest.py: multiplies pytest-timeout's limits by `COMETMQ_TEST_PATIENCE`."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
from patience import FACTOR, patient

NAME: Final = "stretching"


def register(config: pytest.Config) -> None:
    """Register the plugin once, from whichever conftest.py is loaded first."""
    if FACTOR != 1 and not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(Stretching(config), NAME)


class Stretching:
    def __init__(self, config: pytest.Config) -> None:
        if config.option.timeout is None and "PYTEST_TIMEOUT" not in os.environ:
            config.option.timeout = patient(float(config.getini("timeout") or 0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("timeout")
            if mark is not None:
                item.add_marker(stretched(mark), append=False)


def stretched(mark: pytest.Mark) -> pytest.MarkDecorator:
    """Return the mark with a multiplied timeout; its other arguments stay."""
    arguments: list[Any] = [patient(each) for each in mark.args[:1]]
    named: dict[str, Any] = dict(mark.kwargs)
    if named.get("timeout"):
        named["timeout"] = patient(named["timeout"])
    return pytest.mark.timeout(*arguments, *mark.args[1:], **named)
