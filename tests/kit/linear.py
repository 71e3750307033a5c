"""Whether a history of a compare-and-set register is linearizable: the search of Wing and Gong,
with Lowe's memory of what was tried (WGL).

Every record that is written is another one, so the register's state is its record. What an engine
says of versions is checked beside: a record has one, larger than that of the one it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

ABSENT = ""
NEVER = float("inf")


@dataclass(frozen=True)
class Op:
    """One call. `kind` is "get", "applied", "refused" or "unknown".

    Args:
        began, ended: of the call; an unknown one may take effect at any time after it began.
        expected: the record whose version was expected; of what changes something.
        record: what was read (get), was there (refused), or was to be written.
    """

    kind: str
    began: float
    ended: float
    record: str
    expected: str = ABSENT

    def after(self, state: str) -> str | None:
        """The state that it leaves; None: it cannot take place in that state."""
        if self.kind == "get":
            return state if state == self.record else None
        if self.kind == "refused":
            return state if state == self.record != self.expected else None
        if state == self.expected:
            return self.record
        return state if self.kind == "unknown" else None


def is_linearizable(history: list[Op], start: str = ABSENT) -> bool:
    """Whether the calls can be put in one order, each within its time, that explains them all."""
    ops = sorted(history, key=lambda op: op.began)
    ends = [NEVER if op.kind == "unknown" else op.ended for op in ops]
    needed = sum(1 << number for number, op in enumerate(ops) if op.kind != "unknown")
    tried: set[tuple[int, str]] = set()
    stack = [(0, start)]
    while stack:
        done, state = stack.pop()
        if done & needed == needed:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        first_end = min(ends[n] for n in range(len(ops)) if not done >> n & 1)
        for number, op in enumerate(ops):
            if op.began > first_end:
                break
            if not done >> number & 1:
                after = op.after(state)
                if after is not None:
                    stack.append((done | 1 << number, after))
    return False
