"""Fork safety: what a client says in the child of a fork, where it does not work."""

from __future__ import annotations

import os


class Forked:
    """Stands in for a lock in the child of a fork: whoever takes it is told."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self) -> None:
        raise RuntimeError(
            f"this {self._name} was made before the process forked (now pid {os.getpid()}): "
            "its connections belong to the parent. Make one of your own in the child"
        )

    def __enter__(self) -> None:
        self._raise()

    def __exit__(self, *_: object) -> None:
        """Never reached."""

    def acquire(self, *_: object, **__: object) -> bool:
        self._raise()
        return False

    def release(self) -> None:
        """Never reached."""
