"""A broker that writes down what its processes import after they were forked, for
test_what_children_share: a line of role and module each, to the file that IMPORTS names."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from cometmq.actors.launch import embedded, process, supervisor
from cometmq.actors.launch.process import Child


class Listening:
    """Finds no module; it hears which are looked for."""

    def __init__(self, role: str) -> None:
        self.role = role

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        with open(os.environ["IMPORTS"], "a") as file:
            file.write(f"{self.role} {name}\n")
        return None


def run_child(child: Child, reports: int, lifeline: int) -> int:
    sys.meta_path.insert(0, Listening(child.role))
    return process.run_child(child, reports, lifeline)


def main() -> None:
    supervisor.run_child = run_child
    embedded.main()


if __name__ == "__main__":
    main()
