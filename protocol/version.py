"""The version of the project: of the package, the brokers and the clients."""

from typing import Final

VERSION: Final = "0.1.0"


def install(extra: str) -> str:
    """The command that installs an extra, for hints: from the sources, until there is a package on
    an index."""
    return f"pip install '.[{extra}]' in the folder of CometMQ's sources"
