"""Child processes of this package's own, started from somebody else's program."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Final

import msgspec
import pykka
import zmq

import cometmq

# What a broker cannot do without; where this program has found each, its children find it too. They
# are imported with this module: later the program may look elsewhere.
_NEEDED: Final = (cometmq, zmq, msgspec, pykka)
_BOOT: Final = (
    "import runpy, sys; sys.path += sys.argv.pop(1).split({separator!r}); "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules in a Python like this one.

    Nothing is imported from the working directory (-P): there may be a zmq.py in it. Where this
    program has found us by its own `sys.path`, the folder is looked through in the child as well,
    behind all others, so that what else lies there hides nothing.
    """
    flags = sys.flags
    asked = {"-E": flags.ignore_environment, "-s": flags.no_user_site, "-S": flags.no_site}
    command = [sys.executable, "-P", *(flag for flag, is_set in asked.items() if is_set)]
    folders = _folders_of_our_own()
    if not folders:
        return [*command, "-m", module, *arguments]
    boot = _BOOT.format(separator=os.pathsep, module=module)
    return [*command, "-c", boot, os.pathsep.join(folders), *arguments]


def _folders_of_our_own() -> list[str]:
    """Where packages that we need were found, if a Python that is just started does not look
    there."""
    found: dict[str, None] = {}  # in order
    for module in _NEEDED:
        folder = Path(module.__file__ or "").absolute().parent
        if folder.name == module.__name__:  # else it is an editable install, which has its own way
            found[str(folder.parent)] = None
    return [folder for folder in found if folder not in _folders_of_any_python()]


def _folders_of_any_python() -> set[str]:
    if sys.flags.no_site:
        return set()
    paths = sysconfig.get_paths()
    found = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return {str(Path(each).absolute()) for each in found}
