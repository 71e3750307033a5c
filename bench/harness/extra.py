"""Libraries that only the benchmarks need: loaded when used, and missed in one clear sentence."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cometmq.protocol.errors import CometError
from cometmq.protocol.version import install


class BenchError(CometError):
    """A measurement that cannot be made, or whose messages did not add up."""


def load(module: str) -> Any:
    """A module of the extra `bench`. Untyped on purpose: not all of them have types."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise BenchError(
            f"{module.partition('.')[0]} is not installed: {install('bench')}"
        ) from None
