"""The process that brokers of tests are forked from; see forked.py.

python -m forked_child       with standard input as for actors/launch/nursery.py
"""

from __future__ import annotations

import importlib
import os

from cometmq.actors.launch import nursery

#: In a broker's environment: the module whose `main` is its main process.
MODULE = "COMETMQ_TEST_MODULE"


def run() -> None:
    importlib.import_module(os.environ[MODULE]).main()


if __name__ == "__main__":
    nursery.main(run)
