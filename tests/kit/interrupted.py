"""A command line that is interrupted while it imports, for test_interrupts.

    python interrupted.py WHEN ARGUMENT...

WHEN is the name of a module, or a number: which import brings Ctrl-C, counted from 1 from where the
program begins to import its command line. It ends with status 99 where that import never came.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NEVER_CAME = 99
FIRST = "cometmq.cli.command_line"


class Interrupting:
    """Finds no module; it hears which are looked for."""

    def __init__(self, when: str) -> None:
        self.when = when
        self.count = 0
        self.came = False

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.count or name == FIRST:
            self.count += 1
        if self.when in (name, str(self.count)):
            self.came = True
            os.kill(os.getpid(), signal.SIGINT)  # the handler is called before this returns
        return None


if __name__ == "__main__":
    interrupting = Interrupting(sys.argv[1])
    sys.argv = ["cometmq", *sys.argv[2:]]
    sys.meta_path.insert(0, interrupting)
    from cometmq.__main__ import main

    try:
        main()
    except SystemExit:
        if not interrupting.came:
            sys.exit(NEVER_CAME)
        raise
