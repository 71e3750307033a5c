"""What commands declare of who may say them: complete, and of fields that there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from cometmq.protocol.commands import (
    COMMANDS,
    EVERY,
    Access,
    Answer,
    Audience,
    Command,
    CommitOffsets,
    GetMessageAt,
    ListQueues,
    Need,
    Needed,
    On,
    QueueOffset,
    Right,
    Section,
    SendMessages,
)

ASKED = [kind for kind in COMMANDS if not issubclass(kind, Answer)]
NEED_NOTHING = {"Ping", "GetLine"}
OWNED = {(On.TOPIC, "owned.topic")}  # it was given them: with the right that it had then
NAMED = {
    "topic": On.TOPIC, "topics": On.TOPIC, "group": On.GROUP, "target": On.GROUP,
    "producer_group": On.GROUP, "sink": On.SINK,
}  # fmt: skip
# Texts that name nothing that has rights. Put a new field into one of the two.
OTHER_TEXTS = {
    "attempt", "boot_id", "born_host", "broker", "cluster", "commitlog", "consumer", "coordinator",
    "correlation_id", "key", "member", "msg_id", "name", "nonce", "process", "producer_id",
    "readers", "requester", "secret", "sql", "stage", "stages", "store_id", "tags", "transactions",
}  # fmt: skip


def sample(kind: inspect.Type, name: str = "") -> Any:
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(*(sample(field.type, field.name) for field in fields))
        case inspect.ListType(item_type=item):
            return [sample(item, name), sample(item, name)]
        case inspect.DictType():
            return {}
        case inspect.StrType():
            return f"the {name}"
        case inspect.BoolType():
            return False
    return 0


def names_in(kind: inspect.Type, path: str = "") -> Iterator[tuple[On, str]]:
    """The fields of a command that hold names of what there are rights on."""
    match kind:
        case inspect.StructType(fields=fields):
            for field in fields:
                here = f"{path}.{field.name}".lstrip(".")
                if field.name in NAMED and _is_text(field.type):
                    yield NAMED[field.name], here
                yield from names_in(field.type, here)
        case inspect.ListType(item_type=item):
            yield from names_in(item, path)


def _is_text(kind: inspect.Type) -> bool:
    """Return whether a field holds one or several texts."""
    item = kind.item_type if isinstance(kind, inspect.ListType) else kind
    return isinstance(item, inspect.StrType)


def texts_in(kind: inspect.Type) -> Iterator[str]:
    """Yield the names of all fields that hold texts."""
    match kind:
        case inspect.StructType(fields=fields):
            for field in fields:
                if _is_text(field.type):
                    yield field.name
                yield from texts_in(field.type)
        case inspect.ListType(item_type=item):
            yield from texts_in(item)


@pytest.mark.parametrize("kind", ASKED)
def test_every_text_is_known_to_be_a_name_or_not(kind: type[Command]) -> None:
    """Every field with a text is classified, so that no name lacks a right (Fault 15)."""
    if kind.access.audience in (Audience.CLIENT, Audience.ADMINISTRATOR):
        assert set(texts_in(inspect.type_info(kind))) <= NAMED.keys() | OTHER_TEXTS


@pytest.mark.parametrize("kind", ASKED)
def test_the_fields_are_there(kind: type[Command]) -> None:
    command = sample(inspect.type_info(kind))
    for need in kind.access.needs:
        assert not need.unless or need.unless in kind.__struct_fields__
        holder = need.field.rpartition(".")[2]
        wanted = EVERY if need.field == EVERY else f"the {holder}"
        got = set(Access(Audience.CLIENT, (need._replace(unless=""),)).needed_for(command))
        assert got == {Needed(need.right, need.on, wanted)}


@pytest.mark.parametrize("kind", ASKED)
def test_every_name_needs_a_right(kind: type[Command]) -> None:
    """Of what comes from outside; but who administers brokers needs no other right."""
    if kind.access.audience is Audience.FAMILY:
        assert not kind.access.needs
        return
    needs = {(need.on, need.field) for need in kind.access.needs}
    of_all = {need.on for need in kind.access.needs if need.field == EVERY}
    if On.BROKER not in of_all:
        names = set(names_in(inspect.type_info(kind))) - OWNED
        assert {name for name in names if name[0] not in of_all} <= needs
    assert bool(needs) == (kind.__name__ not in NEED_NOTHING)


@pytest.mark.parametrize("kind", ASKED)
def test_administrators_need_that_right(kind: type[Command]) -> None:
    rights = {need.right for need in kind.access.needs if not need.unless}
    administers = kind.access.audience in (Audience.ADMINISTRATOR, Audience.BROKER)
    assert (rights == {Right.ADMINISTER}) == administers


def test_answers_are_said_by_nobody() -> None:
    for kind in set(COMMANDS) - set(ASKED):
        assert kind.access == Access(Audience.NOBODY)


def test_a_command_that_does_not_say_it_cannot_be() -> None:
    with pytest.raises(TypeError, match="Silent does not declare who may say it"):

        class Silent(Command, frozen=True, tag=99_999):
            topic: str


def test_what_is_needed() -> None:
    sent = SendMessages([Section("a", 0, 1), Section("b", 0, 1), Section("a", 1, 1)], 0)
    assert set(sent.access.needed_for(sent)) == {
        Needed(Right.PUBLISH, On.TOPIC, "a"), Needed(Right.PUBLISH, On.TOPIC, "b"),
    }  # fmt: skip
    found = GetMessageAt(0)
    assert list(found.access.needed_for(found)) == [Needed(Right.READ, On.TOPIC, EVERY)]
    listed = ListQueues()  # of all topics
    assert list(listed.access.needed_for(listed)) == [Needed(Right.DESCRIBE, On.TOPIC, EVERY)]


def test_what_is_needed_may_depend_on_a_field() -> None:
    """Who commits as no member is an administrator."""
    offsets = [QueueOffset("t", 0, 1)]
    by_member = CommitOffsets("g", offsets, "m")
    moved = CommitOffsets("g", offsets)
    needs = set(by_member.access.needed_for(by_member))
    assert needs == {Needed(Right.READ, On.GROUP, "g"), Needed(Right.READ, On.TOPIC, "t")}
    extra = set(moved.access.needed_for(moved)) - needs
    assert extra == {Needed(Right.ADMINISTER, On.GROUP, "g")}


def test_it_is_not_on_the_wire() -> None:
    assert "access" not in Command.__struct_fields__
    assert not any("access" in kind.__struct_fields__ for kind in COMMANDS)
    assert Need(Right.READ, On.TOPIC, "topic").unless == ""
    assert msgspec.msgpack.encode(GetMessageAt(7)) == b"\x92\x1a\x07"
