"""Runs with a kernel that was built with the sanitizers in place of the installed one. No tests.

sanitized_child.py KERNEL fuzz SEED COUNT NOTE
sanitized_child.py KERNEL pytest ARGUMENT ...
sanitized_child.py KERNEL overflow      writes too far, to see that it is noticed
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import cometmq.shm.kernel

NAME = "cometmq.shm.kernel._kernel"


def use_kernel(path: str) -> None:
    assert NAME not in sys.modules, "the installed kernel is there already"
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = kernel
    spec.loader.exec_module(kernel)
    cometmq.shm.kernel._kernel = kernel


if __name__ == "__main__":
    use_kernel(sys.argv[1])
    if sys.argv[2] == "fuzz":
        import kernel_fuzz

        kernel_fuzz.main(int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    elif sys.argv[2] == "overflow":
        ctypes.memmove((ctypes.c_char * 40)(), bytes(64), 64)
    else:
        import pytest

        sys.exit(pytest.main(sys.argv[3:]))
