"""The broker, two of whose processes meet what nobody foresaw; see test_stumbling.py.

    python -m stumbling_launcher      with STUMBLES = a file in the environment

While that file is there each step of a delay level, of the timers, of a look at transactions that
are pending, and of the commitlog process's reading of them fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cometmq.actors.launch import embedded
from cometmq.actors.scheduling.checks import Checks
from cometmq.actors.scheduling.delays import DelayLevel
from cometmq.actors.scheduling.timers import Timers
from cometmq.actors.writer.half_book import HalfBook

STUMBLES = "COMETMQ_TEST_STUMBLES"


def stumbling(path: Path, step: Callable[..., Any]) -> Callable[..., Any]:
    def stumble(self: Any, *arguments: Any) -> Any:
        if path.exists():
            raise KeyError(f"as the test wants it: {step.__qualname__}")
        return step(self, *arguments)

    return stumble


def main() -> None:
    path = Path(os.environ[STUMBLES])
    DelayLevel.deliver = stumbling(path, DelayLevel.deliver)
    Timers.step = stumbling(path, Timers.step)
    Checks._judge = stumbling(path, Checks._judge)
    load = HalfBook._load

    def stumbling_load(self: HalfBook, *begins: int) -> Iterator[object]:
        stumbling(path, load)(self, *begins)
        yield from load(self, *begins)

    HalfBook._load = stumbling_load
    embedded.main()


if __name__ == "__main__":
    main()
