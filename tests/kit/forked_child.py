"""The process that programs of tests are forked from; see forked.py.

    python -m forked_child [MODULE ...]     with standard input as for actors/launch/nursery.py

It has imported those modules and what a broker needs.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import threading

from cometmq.actors.launch import nursery

# In the environment that a program is ordered with, and not in its own:
MODULE = "COMETMQ_TEST_MODULE"  # the module whose `main` it is
ARGUMENTS = "COMETMQ_TEST_ARGUMENTS"  # its arguments, in JSON


def run() -> None:
    name = os.environ.pop(MODULE)
    sys.argv = [name, *json.loads(os.environ.pop(ARGUMENTS))]
    try:
        importlib.import_module(name).main()
    finally:  # as at the end of an interpreter
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        importlib.import_module(each)
    nursery.main(run)
