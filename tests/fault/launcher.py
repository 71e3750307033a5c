"""The broker as `cometmq.actors.supervisor` starts it, with points to be killed at; see points.py.

It is imported before the zygote is forked, so every child has what is wrapped here.
"""

from __future__ import annotations

import os
from pathlib import Path

from fault.points import FOLDER_VARIABLE, install

from cometmq.actors import process, supervisor  # noqa: F401  process: what the children import

if __name__ == "__main__":
    install(Path(os.environ[FOLDER_VARIABLE]))
    supervisor.main()
