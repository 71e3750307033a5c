"""Which processes the members of groups live in, as they say, and which of these have ended."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from cometmq.shm.os.processes import NAME_MAX, has_ended


class MemberProcesses:
    """Only processes of this machine are seen to end; of others it is not known."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, str]] = {}  # group -> member -> its process

    def note(self, group: str, member: str, process: str) -> None:
        """Where a member lives."""
        if process and len(process) <= NAME_MAX:
            self._groups.setdefault(group, {})[member] = process

    def ended(self, groups: Mapping[str, Container[str]]) -> Iterator[tuple[str, str]]:
        """(group, member) of those whose process has ended. Who has left is forgotten."""
        known: dict[str, bool] = {}  # one process may have many members
        for name, processes in list(self._groups.items()):
            group = groups.get(name, ())
            there = {each: process for each, process in processes.items() if each in group}
            self._groups[name] = there
            if not there:
                del self._groups[name]
            for member, process in there.items():
                if process not in known:
                    known[process] = has_ended(process)
                if known[process]:
                    yield name, member
