"""What pyproject.toml cannot say: what a build needs, in one sentence, and where README links to.

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

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildKernel(build_ext):
    """The native kernel, with a sentence where there can be none."""

    def run(self) -> None:
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
        super().run()


def readme() -> str:
    """For a package index, which has this page and nothing that lies beside it."""
    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text())["project"]
    files = f"{project['urls']['Homepage']}/blob/main/"
    return re.sub(r"\]\((?!https?:|#)", f"]({files}", (here / "README.md").read_text())


setup(
    cmdclass={"build_ext": BuildKernel},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
