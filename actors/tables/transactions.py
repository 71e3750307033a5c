"""Transactions: which half messages have ended, and when a producer is asked. Pure: no I/O.

A half message is a record of RMQ_SYS_TRANS_HALF_TOPIC, known by its queue offset there. That it
has ended says a record of RMQ_SYS_TRANS_OP_HALF_TOPIC, the *op*. When its producer is asked, a copy
of it is stored behind all others (RocketMQ keeps the count of checks so), and the copy goes on in
its stead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Final, NamedTuple

from cometmq.actors.tables.delays import Now
from cometmq.actors.tables.lean import CRC
from cometmq.protocol.commands import QueueKey
from cometmq.protocol.names import HALF_TOPIC, OP_TOPIC
from cometmq.protocol.uptime import NAME as UPTIME_NAME
from cometmq.protocol.uptime import Uptime, uptime_of
from cometmq.shm.kernel.store import HalfEnds, note_ended, op_text

KEPT: Final = 1 << 20  # halves before the first pending one whose end is remembered
SPAN_MAX: Final = 1 << 26  # from the first that is remembered to the last
TIMES: Final = "TRANSACTION_CHECK_TIMES"
FIRST: Final = "TRAN_PREPARED_QUEUE_OFFSET"  # of a copy: the queue offset of the first of all
IMMUNITY: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
ENDS: Final = "COMETMQ_ENDS"  # of an op: how each of its halves has ended; RocketMQ keeps none
_ENDS: Final = ENDS.encode()
_DIGITS_MAX: Final = 18

GROUP: Final = "CID_RMQ_SYS_TRANS"  # RocketMQ's, by whose offsets it goes on
QUEUES: Final = (QueueKey(HALF_TOPIC, 0), QueueKey(OP_TOPIC, 0))


class Outcome(IntEnum):
    """What has become of a half message."""

    PENDING = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    COPIED = 3  # and the copy goes on
    GIVEN_UP = 4  # nobody has ended it
    ENDED = 5  # nobody remembers how


WORDS: Final = {
    Outcome.COMMITTED: "is committed",
    Outcome.ROLLED_BACK: "is rolled back",
    Outcome.GIVEN_UP: "was given up after too many checks",
    Outcome.ENDED: "has ended, and how is not remembered",
}
_LETTERS: Final = {
    Outcome.COMMITTED: "c",
    Outcome.ROLLED_BACK: "r",
    Outcome.COPIED: "m",
    Outcome.GIVEN_UP: "g",
}
_OUTCOMES: Final = {letter: outcome for outcome, letter in _LETTERS.items()}
_LETTERS_OF: Final = "".join([_LETTERS.get(outcome, "?") for outcome in Outcome]).encode()
BY_PRODUCERS: Final = (Outcome.ROLLED_BACK, Outcome.COMMITTED)  # what ends come to
END_LETTERS: Final = "".join([_LETTERS[outcome] for outcome in BY_PRODUCERS]).encode()
OP_HEAD: Final = b"TAGS\1d\2WAIT\1true\2%b\1" % _ENDS  # properties of an op: letters, and a 2

Ended = tuple[int, Outcome]  # queue offset of a half, and how it has ended


class Halves:
    """What has become of each half message, a byte each, from some queue offset on.

    Args:
        begin: the queue offset of the first.
    """

    def __init__(self, begin: int = 0) -> None:
        self.low = begin  # below that nothing is pending
        self.copies: dict[int, int] = {}  # by the first of all, the copy that is pending
        self._base = begin
        self._outcomes = bytearray()

    def find(self, queue_offset: int) -> Outcome:
        index = queue_offset - self._base
        if index < 0:
            return Outcome.ENDED
        return Outcome(self._outcomes[index]) if index < len(self._outcomes) else Outcome.PENDING

    @property
    def known(self) -> tuple[bytearray, int]:
        """Outcomes, and the queue offset of the first; those behind are pending. Not to be kept."""
        return self._outcomes, self._base

    def is_pending(self, queue_offset: int) -> bool:
        """As `find` says."""
        index = queue_offset - self._base
        return index >= 0 and (index >= len(self._outcomes) or not self._outcomes[index])

    @property
    def span(self) -> int:
        """So many are remembered."""
        return len(self._outcomes)

    def take(self, ended: Iterable[Ended]) -> None:
        """Note how halves have ended; what comes later about one of them counts."""
        note_ended(self._outcomes, self._base, SPAN_MAX, ended)
        self._go_on()

    def take_ends(self, ends: HalfEnds) -> None:
        """Note the ends that were picked."""
        ends.note(self._outcomes, self._base, SPAN_MAX, BY_PRODUCERS)
        self._go_on()

    def pending(self, begin: int, end: int) -> int:
        """The queue offset of the first that is pending from `begin` on; `end` if there is none."""
        index = max(begin, self.low) - self._base
        found = self._outcomes.find(0, index)
        at = self._base + (found if found >= 0 else max(index, len(self._outcomes)))
        return min(at, end)

    def _go_on(self) -> None:
        index = self.low - self._base
        found = self._outcomes.find(0, index)
        self.low = self._base + (found if found >= 0 else max(index, len(self._outcomes)))
        excess = self.low - self._base - 2 * KEPT
        if excess > 0:
            del self._outcomes[: excess + KEPT]
            self._base += excess + KEPT


class OpQueue:
    """From which queue offset on ops are needed: an op whose halves all lie below the first pending
    one is not."""

    def __init__(self, begin: int = 0) -> None:
        self.low = begin
        self._needed: deque[tuple[int, int]] = deque()  # (an op, the last of its halves)

    def take(self, queue_offset: int, last: int, halves: Halves) -> None:
        """An op that is stored now, and the last of the halves that it names."""
        self._needed.append((queue_offset, last))
        while self._needed and self._needed[0][1] < halves.low:
            self.low = self._needed.popleft()[0] + 1


# --- ops ---


def op_of(ended: Sequence[Ended]) -> tuple[bytes, bytes]:
    """Body and properties of the op that says so."""
    body, letters = op_text(list(ended), _LETTERS_OF)
    return body, OP_HEAD + letters + b"\2"


def last_of(ended: Iterable[Ended]) -> int:
    """The highest queue offset of a half among them."""
    return max([each[0] for each in ended], default=-1)


def read_op(body: bytes, properties: Mapping[str, str]) -> Iterator[Ended]:
    """What an op says; nothing, where it says what cannot be."""
    if properties.get("TAGS") != "d":
        return
    letters = properties.get(ENDS, "")
    for index, digits in enumerate(body.split(b",")):
        if digits.isdigit() and len(digits) <= _DIGITS_MAX:
            letter = letters[index] if index < len(letters) else ""
            yield int(digits), _OUTCOMES.get(letter, Outcome.ENDED)


# --- checks ---


class Rules(NamedTuple):
    """How old a half is when it is asked for, how often, and when nobody is asked any more."""

    timeout_ms: int
    check_max: int
    reserved_ms: int
    interval_ms: int


class Verdict(Enum):
    """What a round of checks does with a half."""

    WAIT = "wait"
    CHECK = "check"
    RENEW = "renew"  # it is not to be asked for yet, but later ones wait for it: store it anew
    GIVE_UP = "give up"


def check_times(properties: Mapping[str, str]) -> int:
    """How often it was asked for."""
    return _number(properties.get(TIMES, "")) or 0


def first_of(properties: Mapping[str, str], queue_offset: int) -> int:
    """The queue offset of the half that this one is a copy of, or its own."""
    found = _number(properties.get(FIRST, ""))
    return queue_offset if found is None else min(found, queue_offset)


def judge(
    properties: Mapping[str, str], born_ms: int, stored_ms: int, now: Now, rules: Rules
) -> Verdict:
    """What becomes of a half that is pending. The time of its birth is its producer's word, and
    counts for copies alone, where nothing better is known: those have been old enough once."""
    return _judge(properties, born_ms, stored_ms, now, rules)[0]


def judge_until(
    properties: Mapping[str, str], born_ms: int, stored_ms: int, now: Now, rules: Rules
) -> tuple[Verdict, int]:
    """Return a verdict like `judge`, at any time rather than once an interval: WAIT for a message
    that was checked less than one interval ago. With WAIT, also return in how many ms the verdict
    changes."""
    verdict, wait_ms = _judge(properties, born_ms, stored_ms, now, rules)
    here_ms = now.waited_ms(stored_ms, uptime_of(properties))
    if verdict is Verdict.CHECK and check_times(properties) and 0 <= here_ms < rules.interval_ms:
        return Verdict.WAIT, rules.interval_ms - here_ms
    return verdict, wait_ms


def _judge(
    properties: Mapping[str, str], born_ms: int, stored_ms: int, now: Now, rules: Rules
) -> tuple[Verdict, int]:
    times = check_times(properties)
    up = uptime_of(properties)
    here_ms = age_ms = now.waited_ms(stored_ms, up)
    if times > 0 or FIRST in properties:
        known_ms = None if up is None else now.up.since(up.clock, up.first_ms)
        age_ms = now.wall_ms - min(born_ms, stored_ms) if known_ms is None else known_ms
    immunity_s = _number(properties.get(IMMUNITY, ""))
    immune_ms = rules.timeout_ms if immunity_s is None else immunity_s * 1000
    if age_ms >= rules.reserved_ms or times >= rules.check_max:
        return Verdict.GIVE_UP, 0
    if age_ms < immune_ms:
        left_ms = max(rules.timeout_ms, rules.interval_ms) - here_ms
        if left_ms <= 0:
            return Verdict.RENEW, 0
        return Verdict.WAIT, min(left_ms, immune_ms - age_ms)
    return Verdict.CHECK, 0


def copy_properties(
    raw: bytes, properties: Mapping[str, str], first: int, times: int, now: Uptime
) -> bytes:
    """Of the copy that goes on, as they stand in its record.

    Args:
        raw, properties: of the half or copy before it.
    """
    before = uptime_of(properties)
    if before is not None and before.clock == now.clock:
        is_copy = FIRST in properties
        now = now._replace(first_ms=before.first_ms if is_copy else before.ms)
    new = {FIRST.encode(): b"%d" % first}
    if times:
        new[TIMES.encode()] = b"%d" % times
    pairs = (pair.partition(b"\1") for pair in raw.split(b"\2"))
    kept = {name: value for name, separator, value in pairs if separator and name and value}
    for name in (UPTIME_NAME.encode(), CRC):
        kept.pop(name, None)
    return b"".join(b"%b\1%b\2" % pair for pair in (kept | new).items()) + now.as_property()


def _number(text: str) -> int | None:
    usable = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return int(text) if usable else None
