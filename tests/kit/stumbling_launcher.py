"""The broker, whose scheduler meets what nobody foresaw; see test_stumbling.py.

    python -m stumbling_launcher      with STUMBLES = a file in the environment

While that file is there each step of a delay level and of the timers fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cometmq.actors.launch import embedded
from cometmq.actors.semantics.delays import DelayLevel
from cometmq.actors.semantics.timers import Timers

STUMBLES = "COMETMQ_TEST_STUMBLES"


def stumbling(path: Path, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def stumble(self: Any) -> Any:
        if path.exists():
            raise KeyError(f"as the test wants it: {self.name}")
        return step(self)

    return stumble


def main() -> None:
    path = Path(os.environ[STUMBLES])
    DelayLevel.deliver = stumbling(path, DelayLevel.deliver)
    Timers.step = stumbling(path, Timers.step)
    embedded.main()


if __name__ == "__main__":
    main()
