"""Where the test data of other makers lies: stores that RocketMQ wrote, real log lines."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "COMETMQ_TEST_DATA"
DATA = Path(os.environ.get(VARIABLE, Path(__file__).parents[1] / ".." / "shared" / "data"))


def data_path(*parts: str) -> Path:
    """A file or folder of the test data; FileNotFoundError says how to point at the data."""
    path = DATA.joinpath(*parts).resolve()
    if not path.exists():
        raise FileNotFoundError(
            f"test data {path} is absent: set {VARIABLE} to the folder that holds rocketmq-stores"
        )
    return path
