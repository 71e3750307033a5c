"""Mailboxes: what lies in them, what they refuse, and who is gone. Pure rules."""

from __future__ import annotations

import pytest

from cometmq.actors.tables import mailboxes
from cometmq.actors.tables.mailboxes import LETTER_BYTES, SILENT_S, Letter, Mailboxes
from cometmq.protocol.errors import RequesterGone, SystemBusy

HERE = b"connection"


def letter(number: int, size: int = 10) -> Letter:
    return Letter(f"id-{number}", {}, bytes(size))


def test_letters_stay_until_they_are_confirmed() -> None:
    boxes = Mailboxes()
    box = boxes.open("a", HERE)
    letters = [boxes.put("a", letter(number)) for number in range(5)]
    assert boxes.put("a", letter(3)) is letters[3]  # it lies there already
    assert box.due() == letters == box.due()
    assert boxes.confirm(box, 2) == letters[:2]
    assert (box.first, box.due()) == (3, letters[2:])
    assert boxes.confirm(box, 1_000) == letters[2:]
    assert (box.first, boxes.size) == (6, 0)


def test_a_life_of_a_mailbox_has_a_number_of_its_own() -> None:
    boxes = Mailboxes()
    number = boxes.open("a", HERE).number
    assert boxes.open("a", HERE).number == number
    assert boxes.close("a") == []
    assert boxes.open("a", HERE).number != number


def test_answers_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    each = letter(0).size
    assert each == LETTER_BYTES + 10 + len("id-0")
    monkeypatch.setattr(mailboxes, "ANSWER_BYTES", 3 * each)
    boxes = Mailboxes()
    box = boxes.open("a", HERE)
    for number in range(5):
        boxes.put("a", letter(number))
    assert len(box.due()) == 3
    boxes.confirm(box, 5)
    large = boxes.put("a", letter(5, size=100_000))
    assert box.due() == [large]


def test_size_of_a_letter_counts_its_properties_in_utf8() -> None:
    assert Letter("\u00fc", {"\u20ac": "a"}, b"").size == LETTER_BYTES + 2 + 3 + 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = Mailboxes()
    boxes.open("a", HERE)
    boxes.open("b", HERE)
    monkeypatch.setattr(mailboxes, "LETTERS_MAX", 2)
    boxes.put("a", letter(1))
    boxes.put("a", letter(2))
    with pytest.raises(SystemBusy, match=r"2 replies of .* wait for requester a"):
        boxes.put("a", letter(3))
    monkeypatch.setattr(mailboxes, "BYTES_OF_REQUESTER_MAX", 1_000)
    with pytest.raises(SystemBusy, match="requester b"):
        boxes.put("b", letter(1, size=1_000))
    monkeypatch.setattr(mailboxes, "BYTES_MAX", boxes.size + 100)
    with pytest.raises(SystemBusy, match="wait for their requesters"):
        boxes.put("b", letter(1))
    boxes.close("a")
    boxes.put("b", letter(1))
    boxes.close("b")
    assert (boxes.size, len(boxes)) == (0, 0)


def test_requesters_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "REQUESTERS_OF_SENDER_MAX", 2)
    boxes = Mailboxes()
    for name in "ab":
        boxes.open(name, HERE)
    with pytest.raises(SystemBusy, match="2 requesters come by one connection"):
        boxes.open("c", HERE)
    boxes.open("a", b"another")  # it has connected again
    boxes.open("c", HERE)
    monkeypatch.setattr(mailboxes, "REQUESTERS_MAX", 3)
    with pytest.raises(SystemBusy, match="3 requesters"):
        boxes.open("d", b"a third")


def test_silent_requesters_are_gone() -> None:
    boxes = Mailboxes()
    for name, waits in (("waits", True), ("silent", False), ("fresh", False)):
        box = boxes.open(name, HERE)
        box.waits = waits
        box.heard_at = SILENT_S if name == "fresh" else 0.0
    assert list(boxes.silent(SILENT_S + 0.1)) == ["silent"]
    boxes.close("silent")
    with pytest.raises(RequesterGone, match="silent of request id-1 is gone"):
        boxes.put("silent", letter(1))
