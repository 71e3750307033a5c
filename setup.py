"""What pyproject.toml cannot say: the native kernel, what its build needs, README's links.

Everything else is declared in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
import tomllib
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = "cometmq.shm.kernel"
FOLDER = Path("shm/kernel")
VIEWS = f"{PACKAGE}._views"  # Cython's typed memory views, which all extensions share
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def extension(name: str) -> Extension:
    kind = "c" if name == "_views" else "pyx"  # C that Cython makes without a source
    return Extension(
        f"{PACKAGE}.{name}",
        sources=[f"{FOLDER}/{name}.{kind}"],
        depends=sorted(
            str(path) for end in ("pxd", "pxi", "h") for path in FOLDER.glob(f"*.{end}")
        ),
        include_dirs=[str(FOLDER)],
        # Another set for another purpose: tests/shm/test_sanitized.py has one.
        extra_compile_args=shlex.split(os.environ.get("COMETMQ_KERNEL_FLAGS", "-O2 -g0")),
        extra_link_args=["-Wl,--strip-debug"],
    )


class BuildKernel(build_ext):
    """The native kernel: its extensions are made beside each other."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or PROCESSORS

    def run(self) -> None:
        self.check()
        self.translate()
        super().run()

    def translate(self) -> None:
        """Have Cython make C of the extensions' sources."""
        root = Path("build/cython")
        shutil.rmtree(root, ignore_errors=True)
        try:
            # It looks for `cometmq.shm.kernel.codec` in folders of these names.
            (root / "cometmq").mkdir(parents=True)
            (root / "cometmq/__init__.py").touch()
            (root / "cometmq/shm").symlink_to(Path("shm").absolute())
            made = cythonize(
                self.extensions,
                include_path=[str(root)],
                nthreads=PROCESSORS,
                shared_utility_qualified_name=VIEWS,
            )
        finally:
            shutil.rmtree(root)
        for ext, translated in zip(self.extensions, made, strict=True):
            ext.sources = translated.sources

    def check(self) -> None:
        """Say in one sentence why there can be no kernel."""
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise SystemExit(
                "cometmq: a free-threaded Python is not supported, since the native kernel counts "
                "on the interpreter's lock: use an ordinary build of this version"
            )
        command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
        compiler = shlex.split(command)[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"cometmq: the native kernel is built by a C compiler, and {compiler} is not "
                "there: install gcc (Debian and Ubuntu: apt install gcc; Fedora: dnf install gcc), "
                "or name another in CC"
            )
        headers = Path(sysconfig.get_path("include"), "Python.h")
        if not headers.exists():
            raise SystemExit(
                f"cometmq: the native kernel needs Python's headers, and {headers} is not there: "
                "install python3-dev (Debian and Ubuntu) or python3-devel (Fedora)"
            )


def readme() -> str:
    """For a package index, which has this page and nothing that lies beside it."""
    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text())["project"]
    files = f"{project['urls']['Homepage']}/blob/main/"
    return re.sub(r"\]\((?!https?:|#)", f"]({files}", (here / "README.md").read_text())


setup(
    # The one that takes longest first.
    ext_modules=[extension(name) for name in ("store", "codec", "columns", "live", "_views")],
    cmdclass={"build_ext": BuildKernel},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
