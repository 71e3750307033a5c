"""The bytes of every command, as released: a change of the wire shows here.

`tests/protocol/wire/VERSION.txt` has a line for each command of a release: its name, a sample of it
as JSON, and the sample's bytes. Files of releases are never changed. What an old client or broker
says must still be understood, field for field; what was added since has its default.

What was added declares since when, and each release's bytes are asked whether that is true.

A new release prints its own:
`python tests/protocol/test_wire_golden.py > tests/protocol/wire/VERSION.txt`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from cometmq.protocol import commands, frames
from cometmq.protocol.commands import COMMANDS, Audience, Command, Part, Since
from cometmq.protocol.integers import Int32

# Taken back before any release; their tags are never given to another command.
WITHDRAWN = {60: "RegisterBroker with all topics in one head", 70: "TopicsChanged, the same"}
# Of the family only, whose processes are of one version; their tags are not given again either.
INNER_WITHDRAWN = {78: "WakeSleepers"}
RELEASES = sorted(Path(__file__).with_name("wire").glob("*.txt"))
PARTS = [kind for kind in Part.__subclasses__() if kind.__module__.startswith("cometmq.")]
BY_NAME = {kind.__name__: kind for kind in COMMANDS}


def sample(kind: msgspec.inspect.Type, name: str, seed: int) -> Any:
    """A value of that type which no default has, and which differs from field to field."""
    match kind:
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 1_000 + seed
        case msgspec.inspect.FloatType():
            return 0.5 + seed
        case msgspec.inspect.StrType():
            return f"{name}-{seed}"
        case msgspec.inspect.BytesType():
            return f"{name}-{seed}".encode()
        case (
            msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item)
        ):
            return [sample(item, name, seed), sample(item, name, seed + 1)]
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {sample(key, name, seed): sample(value, name, seed)}
        case msgspec.inspect.UnionType(types=types):
            return sample(types[0], name, seed)
        case msgspec.inspect.StructType(cls=cls):
            return _struct(cls, seed)
        case _:
            raise AssertionError(f"{name}: no sample of {kind}")


def _struct(cls: type[msgspec.Struct], seed: int) -> Any:
    fields = msgspec.inspect.type_info(cls).fields  # type: ignore[attr-defined]
    values = {
        field.name: sample(field.type, field.name, seed + at) for at, field in enumerate(fields)
    }
    return cls(**values)


def released() -> list[tuple[str, str, str, str]]:
    """(release, name of the command, the sample's fields as JSON, its bytes in hexadecimal)"""
    return [
        (path.stem, *line.split("\t"))  # type: ignore[misc]
        for path in RELEASES
        for line in path.read_text().splitlines()
        if line.split("\t")[0] not in INNER_WITHDRAWN.values()
    ]


@pytest.mark.parametrize(("release", "name", "fields", "wire"), released())
def test_a_released_command_is_understood(release: str, name: str, fields: str, wire: str) -> None:
    command = frames.unpack(frames.HEAD.pack(commands.PROTOCOL_VERSION, 7) + bytes.fromhex(wire))[1]
    assert type(command) is BY_NAME[name]
    then = msgspec.json.decode(fields)
    now = msgspec.to_builtins(command)[1:]
    assert _known(now, then) == then, f"{name} of {release} is not what it was"


def _known(now: Any, then: Any) -> Any:
    """`now` without the fields, of it and of its parts, that were added at their ends since."""
    if isinstance(now, list) and isinstance(then, list):
        return [_known(*pair) for pair in zip(now, then, strict=False)]
    return now


def test_every_command_of_the_newest_release_is_there() -> None:
    """A command may be added before its release is; none may vanish, or change its name or tag."""
    newest = RELEASES[-1].stem
    gone = {name for release, name, _, _ in released() if release == newest} - set(BY_NAME)
    assert not gone


# --- since when ---


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def sinces(kind: type[msgspec.Struct]) -> list[str]:
    """Of each field the release that first had it; empty: the first that had the command."""
    hints = typing.get_type_hints(kind, include_extras=True)
    marks = [getattr(hints[name], "__metadata__", ()) for name in kind.__struct_fields__]
    return ["".join(each.version for each in mark if isinstance(each, Since)) for mark in marks]


def count_at(kind: type[msgspec.Struct], release: str) -> int:
    """How many fields it had then, as it is declared."""
    return sum(not since or version(since) <= version(release) for since in sinces(kind))


def misdeclared(kind: msgspec.inspect.Type, then: Any, release: str) -> Iterator[str]:
    """Structures that had more or fewer fields in that release than they declare."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            declared = count_at(cls, release)
            if len(then) != declared:
                yield f"{cls.__name__} had {len(then)} fields in {release}, not {declared}"
            for field, value in zip(fields, then, strict=False):
                yield from misdeclared(field.type, value, release)
        case msgspec.inspect.ListType(item_type=item):
            for value in then:
                yield from misdeclared(item, value, release)


@pytest.mark.parametrize(("release", "name", "fields", "wire"), released())
def test_since_is_true(release: str, name: str, fields: str, wire: str) -> None:
    """A field that was added says since when: `Annotated[Int32, Since("1.1.0")]`."""
    kind = msgspec.inspect.type_info(BY_NAME[name])
    assert not list(misdeclared(kind, msgspec.json.decode(fields), release))


@pytest.mark.parametrize("kind", [*COMMANDS, *PARTS])
def test_what_is_added_stands_at_the_end_with_a_default(kind: type[msgspec.Struct]) -> None:
    added = [version(since) if since else () for since in sinces(kind)]
    assert added == sorted(added)
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    assert not [
        field.name for field, since in zip(fields, added, strict=True) if since and field.required
    ]


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_a_command_that_was_added_says_since_when(path: Path) -> None:
    """As `new_in` in its class. Within a broker all processes are of one release."""
    then = {name for release, name, _, _ in released() if release == path.stem}
    for kind in COMMANDS:
        is_known = not kind.new_in or version(kind.new_in) <= version(path.stem)
        if kind.access.audience not in (Audience.FAMILY, Audience.NOBODY):
            assert is_known == (kind.__name__ in then), kind
        elif kind.new_in:
            assert not is_known or kind.__name__ in then, kind


class Grown(Part, frozen=True):
    a: Int32
    b: Annotated[Int32, Since("1.2.0")] = 0


class Grows(Part, frozen=True):
    parts: list[Grown]


@pytest.mark.parametrize(
    ("then", "release", "what"),
    [
        ([[[1], [2]]], "1.1.0", []),
        ([[[1, 2]]], "1.2.0", []),
        ([[[1, 2]]], "1.10.0", []),
        ([[[1]]], "1.2.0", ["Grown had 1 fields in 1.2.0, not 2"]),
        ([[[1, 2]]], "1.1.9", ["Grown had 2 fields in 1.1.9, not 1"]),
        ([[[1], [1, 2]], 7], "1.1.0", ["Grows had 2 fields in 1.1.0, not 1",
                                       "Grown had 2 fields in 1.1.0, not 1"]),
    ],
)  # fmt: skip
def test_what_is_not_true_is_found(then: Any, release: str, what: list[str]) -> None:
    assert list(misdeclared(msgspec.inspect.type_info(Grows), then, release)) == what


def test_withdrawn_tags_are_not_used_again() -> None:
    assert not {kind.__struct_config__.tag for kind in COMMANDS} & {
        *WITHDRAWN,
        *INNER_WITHDRAWN,
    }


def main() -> None:
    for kind in sorted(COMMANDS, key=lambda kind: kind.__struct_config__.tag):
        command: Command = _struct(kind, 1)
        fields = msgspec.json.encode(msgspec.to_builtins(command)[1:]).decode()
        wire = frames.pack(7, command)[frames.HEAD.size :].hex()
        print(kind.__name__, fields, wire, sep="\t")


if __name__ == "__main__":
    main()
