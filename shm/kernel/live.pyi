"""Types of the kernel: counters, sleeping on them, ends of queues."""

from collections.abc import Sequence
from typing import Any, Final, final

COUNTER_BYTES: Final[int]
DOORBELLS_MAX: Final[int]

# --- records ---

@final
class QueueCursor:
    """The writer's end of one topic queue. Raises ValueError for a topic that is too long."""

    topic: str
    queue_id: int
    next_offset: int
    barred: bool  # an Appender has to ask before it appends to it
    slot: int  # in the queue table; -1: it is not known yet
    def __init__(
        self, topic: str, queue_id: int, next_offset: int = 0, auto_version: bool = True
    ) -> None: ...

# --- counters ---

WAKE_WORDS_BYTES: int

@final
class WakeWords:
    """A word (futex) for each cell, on which processes sleep that have no doorbell."""

    writable: bool
    silent: bool  # a process may sleep on words that it cannot write
    def __init__(self, memory: Any) -> None: ...
    def wake_everybody(self) -> None:
        """Have all sleepers look again."""
    def is_slept_on(self, number: int) -> bool: ...

class ReadCell:
    """Anyone's view of a counter in the control file."""

    value: int  # acquire order
    def __init__(
        self,
        memory: Any,
        at: int,
        words: int = 1,
        wake_words: WakeWords | None = None,
        number: int = 0,
    ) -> None: ...

class SleepCell(ReadCell):
    """The view of a process that sleeps until the counter moves. Needs writable memory."""

    def __init__(
        self,
        memory: Any,
        at: int,
        doorbell: int,
        words: int = 1,
        wake_words: WakeWords | None = None,
        number: int = 0,
    ) -> None: ...
    def arm(self) -> None: ...
    def disarm(self) -> None: ...

class InvariantBroken(AssertionError):
    """A counter was to be published above one that bounds it."""

class OwnedCell(ReadCell):
    """The writer's end. One process opens it."""

    def __init__(
        self,
        memory: Any,
        at: int,
        doorbells: Sequence[int] = (),
        words: int = 1,
        second: bool = False,
        wake_words: WakeWords | None = None,
        number: int = 0,
    ) -> None: ...
    def bounded(self, name: str, bounds: tuple[tuple[str, ReadCell], ...]) -> None:
        """Never to be published above these; a bound of 0 is one whose writer has not begun."""
    def publish(self, value: int) -> None: ...
    def move(self, value: int) -> None: ...
    def raise_to(self, value: int) -> None: ...
    def wake(self) -> None: ...
    def wake_moved(self) -> None: ...
    def has_sleepers(self) -> bool: ...
    def advance(self, value: int) -> None: ...
    def reset(self, value: int) -> None: ...

# --- sleeping on counters without a doorbell ---

SLEEP_CELLS_MAX: int

class Bell:
    """Wakes a sleeper of the same process; what was rung before it sleeps is not lost."""

    def ring(self) -> None: ...

class Sleeper:
    """Sleeps until one of several cells moves, or its bell is rung. One thread uses it."""

    def __init__(self, cells: Sequence[ReadCell], bell: Bell) -> None: ...
    def look(self) -> None:
        """From now on a change counts."""
    def hear(self) -> None:
        """What the bell was rung for is about to be looked at."""
    def sleep(self, timeout_s: float, spin_s: float = 0) -> bool:
        """Whether something moved within the time. Raises OSError on a kernel before 5.16."""

def wait_until(cell: ReadCell, least: int, timeout_s: float) -> bool: ...

# --- the ends of queues ---

STRIPES: int

@final
class QueueEnds:
    """Tells how far the writer has come with each queue: for the commitlog process."""

    def __init__(
        self,
        memory: Any,
        at: int,
        slots: int,
        stripes: Sequence[OwnedCell],
        dispatcher_fd: int = -1,
    ) -> None: ...
    def place(self, queue: QueueCursor, slot: int) -> None:
        """Tell of this queue from now on; what was appended to it before is told at once."""

class QueueWatch:
    """Which of many queues reach beyond an offset, each under a key. One thread uses it.

    A look costs as much as there are stripes, and queues in the stripes that have moved.
    """

    def __init__(self, memory: Any, at: int, slots: int, stripes: Sequence[ReadCell]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...
    def set(self, key: Any, slot: int, offset: int) -> None:
        """Name this queue when it reaches beyond the offset, once; then it has to be set again."""
    def discard(self, key: Any) -> None: ...
    def end(self, slot: int) -> int:
        """How far a queue is written, watched or not."""
    def stripes(self) -> list[int]:
        """Those with any queue that is watched."""
    def news(self, count_max: int) -> list[Any]:
        """The keys of queues beyond their offsets, at most so many."""
