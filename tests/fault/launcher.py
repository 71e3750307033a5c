"""`cometmq.actors.launch.embedded`, with points at which a process is killed; see points.py.

It is run before the zygote is forked, so every child has what is wrapped here.
"""

from __future__ import annotations

import os
from pathlib import Path

from fault.points import FOLDER_VARIABLE, install

from cometmq.actors.launch import embedded


def main() -> None:
    install(Path(os.environ[FOLDER_VARIABLE]))
    embedded.main()


if __name__ == "__main__":
    main()
