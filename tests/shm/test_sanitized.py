"""The kernel under gcc's address and undefined-behaviour sanitizers, built for this test alone.

A read behind a buffer that happens to hit mapped memory, or a sum that overflows and happens to
wrap around, is seen here and nowhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized_child
from paths import ROOT, SEARCH
from patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FUZZ_INPUTS = 3_000
FLAGS = (
    "-O0", "-g1", "-w", "-UNDEBUG", "-fno-wrapv", "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
    # memcpy of no bytes from NULL, which the next C allows: Arrow's empty columns have no buffer.
    "-fno-sanitize=nonnull-attribute",
)  # fmt: skip
KERNEL_TESTS = (
    "test_kernel.py", "test_columns.py", "test_rows.py", "test_java.py",
    "test_ends_batch.py",
)  # fmt: skip
LIMITS_S = patient(600)


def library(name: str) -> str:
    """gcc's own, of the version that compiles."""
    if shutil.which("gcc") is None:
        pytest.fail("gcc is not there: this test compiles the kernel with its sanitizers")
    command = ["gcc", f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.fail(f"gcc has no {name}: install the sanitizers of its version (libasan, libubsan)")
    return found


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the extensions as they stand in the sources."""
    library("libubsan.so")
    folder = tmp_path_factory.mktemp("sanitized")
    done = subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "build_ext", "--force"),
            *("--build-lib", str(folder), "--build-temp", str(folder / "made")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMITS_S,
        env={
            **os.environ,
            "CC": "gcc",
            "COMETMQ_KERNEL_FLAGS": " ".join(FLAGS),
            "LDFLAGS": "-fsanitize=address,undefined",
        },
    )
    assert done.returncode == 0, done.stderr
    return folder / "cometmq/shm/kernel"


def run(kernel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, sanitized_child.__file__, str(kernel), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMITS_S,
        env={
            **os.environ,
            "LD_PRELOAD": library("libasan.so"),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory to its end
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "PYTHONMALLOC": "malloc",  # or small objects would lie unseen in one arena
            "PYTHONPATH": SEARCH,
        },
    )


def test_the_sanitizers_are_at_work(kernel: Path) -> None:
    """Sums and reads of the kernel are checked, and a write behind its memory ends the child."""
    extensions = list(kernel.glob("*.so"))
    assert len(extensions) == 5
    for path in extensions:
        assert b"__asan_report_load8" in path.read_bytes()
    made = (path.read_bytes() for path in extensions)
    assert sum(b"__ubsan_handle_add_overflow_abort" in each for each in made) >= 3
    done = run(kernel, "overflow")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("seed", [pytest.param(seed, id=f"seed{seed}") for seed in (1, 2)])
def test_hostile_input(seed: int, kernel: Path, tmp_path: Path) -> None:
    note = tmp_path / "input"
    done = run(kernel, "fuzz", str(seed), str(FUZZ_INPUTS), str(note))
    assert done.stdout == "survived\n", (done.returncode, done.stderr, note.read_text())


def test_the_kernels_tests(kernel: Path) -> None:
    names = [str(Path(__file__).with_name(name)) for name in KERNEL_TESTS]
    done = run(kernel, "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *names)
    assert done.returncode == 0, done.stdout + done.stderr
