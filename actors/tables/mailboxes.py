"""Mailboxes: replies on their way to requesters. Each is kept until its requester says it has come.

Memory is bounded by how many there are, of a connection and in all, and by the bytes of what lies
in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from secrets import randbits
from typing import Any, Final

from cometmq.protocol.errors import RequesterGone, SystemBusy

REQUESTERS_MAX: Final = 16_384
REQUESTERS_OF_SENDER_MAX: Final = 64  # by one connection
LETTERS_MAX: Final = 16_384  # that wait for one requester
BYTES_MAX: Final = 64 * 1_048_576  # of bodies and properties, of all requesters together
BYTES_OF_REQUESTER_MAX: Final = 16 * 1_048_576
LETTER_BYTES: Final = 512  # what each costs beside them
ANSWER_COUNT: Final = 1_024  # letters that are handed out at once, ...
ANSWER_BYTES: Final = 4_194_304  # ... but for one that is larger alone
SILENT_S: Final = 5.0  # without a word a requester is gone


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class Letter:
    """A reply.

    Args:
        asked: those who want to know what becomes of it.
    """

    __slots__ = (
        "asked",
        "body",
        "correlation_id",
        "is_received",
        "is_stored",
        "is_storing",
        "is_written",
        "properties",
        "requester",
        "size",
    )

    def __init__(
        self, correlation_id: str, properties: dict[str, str], body: bytes, requester: str = ""
    ) -> None:
        self.requester = requester
        self.correlation_id = correlation_id
        self.properties = properties
        self.body = body
        texts = sum(_bytes(name) + _bytes(value) for name, value in properties.items())
        self.size = LETTER_BYTES + len(body) + texts + _bytes(correlation_id)
        self.asked: list[Any] = []
        self.is_received = False
        self.is_stored = True  # with the required acks
        self.is_storing = False  # its acks, or itself
        self.is_written = False  # in the log, whether its acks have come or not

    def begin_storing(self) -> None:
        self.is_stored, self.is_storing = False, True

    def end_storing(self, *, is_written: bool, is_stored: bool) -> None:
        self.is_stored, self.is_storing = is_stored, False
        self.is_written |= is_written

    def leave(self, *, is_received: bool) -> None:
        """Leave its mailbox: the requester has it, or is gone, and its memory is freed."""
        self.is_received = is_received
        self.properties, self.body = {}, b""


class Mailbox:
    """Of one requester."""

    __slots__ = (
        "heard_at",
        "ids",
        "letters",
        "number",
        "process",
        "sender",
        "sent",
        "size",
        "waits",
    )  # fmt: skip

    def __init__(self, sender: bytes) -> None:
        self.number = randbits(62) + 1  # no two are taken for each other, whoever has ended between
        self.letters: dict[int, Letter] = {}  # by number, in order
        self.ids: dict[str, Letter] = {}  # the same, by correlation id
        self.sent = 0  # the number of the last that was put in
        self.size = 0
        self.sender = sender
        self.process = ""
        self.waits = False  # its AwaitReplies is held
        self.heard_at = 0.0  # when it last was

    def due(self) -> list[Letter]:
        """What is handed out now: the first ones, as many of as many bytes as an answer may have.
        The first one is handed out however large it is."""
        found: list[Letter] = []
        size = 0
        for letter in islice(self.letters.values(), ANSWER_COUNT):
            size += letter.size
            if size > ANSWER_BYTES and found:
                break
            found.append(letter)
        return found

    @property
    def first(self) -> int:
        """The number of the first letter, or of the next one that comes."""
        return next(iter(self.letters), self.sent + 1)


class Mailboxes:
    """Time is handed in: seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}  # by the requester's name
        self._senders: Counter[bytes] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._boxes)

    @property
    def size(self) -> int:
        """Bytes of all that lies in them."""
        return self._bytes

    def get(self, requester: str) -> Mailbox | None:
        return self._boxes.get(requester)

    def open(self, requester: str, sender: bytes) -> Mailbox:
        """The mailbox of a requester that comes by this connection. Raises SystemBusy."""
        box = self._boxes.get(requester)
        if box is not None and box.sender == sender:
            return box
        if box is None and len(self._boxes) >= REQUESTERS_MAX:
            raise SystemBusy(f"{REQUESTERS_MAX} requesters wait for replies already")
        if self._senders[sender] >= REQUESTERS_OF_SENDER_MAX:
            raise SystemBusy(
                f"{REQUESTERS_OF_SENDER_MAX} requesters come by one connection already"
            )
        if box is None:
            box = self._boxes[requester] = Mailbox(sender)
        else:
            self._forget_sender(box)
            box.sender = sender
        self._senders[sender] += 1
        return box

    def put(self, requester: str, letter: Letter) -> Letter:
        """Put it into that mailbox; the one that lies there if it was there already.

        Raises RequesterGone, SystemBusy.
        """
        box = self._boxes.get(requester)
        if box is None:
            raise RequesterGone(
                f"requester {requester} of request {letter.correlation_id} is gone: nobody waits "
                "for this reply at this broker"
            )
        there = box.ids.get(letter.correlation_id)
        if there is not None:
            return there
        if len(box.letters) >= LETTERS_MAX or box.size + letter.size > BYTES_OF_REQUESTER_MAX:
            raise SystemBusy(
                f"{len(box.letters)} replies of {box.size} bytes wait for requester {requester}"
            )
        if self._bytes + letter.size > BYTES_MAX:
            raise SystemBusy(f"replies of {self._bytes} bytes wait for their requesters already")
        box.sent += 1
        box.letters[box.sent] = letter
        box.ids[letter.correlation_id] = letter
        self._add(box, letter.size)
        return letter

    def holds(self, letter: Letter) -> bool:
        """Return whether the requester can still fetch this letter."""
        box = self._boxes.get(letter.requester)
        return box is not None and box.ids.get(letter.correlation_id) is letter

    def confirm(self, box: Mailbox, received: int) -> list[Letter]:
        """The requester has all up to that number: they are taken out."""
        numbers = []
        for number in box.letters:
            if number > received:
                break
            numbers.append(number)
        letters = [box.letters.pop(number) for number in numbers]
        for letter in letters:
            del box.ids[letter.correlation_id]
            letter.leave(is_received=True)
        self._add(box, -sum(letter.size for letter in letters))
        return letters

    def close(self, requester: str) -> list[Letter]:
        """Forget a requester; what nobody will fetch any more."""
        box = self._boxes.pop(requester, None)
        if box is None:
            return []
        self._forget_sender(box)
        self._bytes -= box.size
        for letter in box.letters.values():
            letter.leave(is_received=False)
        return list(box.letters.values())

    def silent(self, now: float) -> Iterator[str]:
        """Requesters that have not been heard of for too long."""
        for requester, box in list(self._boxes.items()):
            if not box.waits and now - box.heard_at > SILENT_S:
                yield requester

    def items(self) -> list[tuple[str, Mailbox]]:
        return list(self._boxes.items())

    def _add(self, box: Mailbox, size: int) -> None:
        box.size += size
        self._bytes += size

    def _forget_sender(self, box: Mailbox) -> None:
        self._senders[box.sender] -= 1
        if not self._senders[box.sender]:
            del self._senders[box.sender]
