"""Runs with a kernel that was built with the sanitizers in place of the installed one. No tests.

KERNEL is the folder of its extensions.

sanitized_child.py KERNEL fuzz SEED COUNT NOTE
sanitized_child.py KERNEL pytest ARGUMENT ...
sanitized_child.py KERNEL overflow      writes too far, to see that it is noticed
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import cometmq.shm.kernel


def use_kernel(folder: str) -> None:
    """Have the extensions of that folder imported."""
    name = cometmq.shm.kernel.__name__
    assert not any(each.startswith(f"{name}.") for each in sys.modules), "there is one already"
    cometmq.shm.kernel.__path__.insert(0, folder)


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
