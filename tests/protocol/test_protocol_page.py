"""docs/protocol.md has every command, part and error as they are declared.

After a change: `python tests/protocol/test_protocol_page.py > docs/protocol.md`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import cometmq.protocol.commands as declared
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    COMMANDS,
    EVERY,
    Answer,
    Command,
    Need,
    On,
    Part,
    ServedBy,
    administration,
    consuming,
    general,
    group_administration,
    groups,
    inner,
    popping,
    reading,
    replies,
    sending,
    tag_of,
    topics,
    transactions,
)
from cometmq.protocol.errors import BY_CODE

PAGE = Path(__file__).resolve().parents[2] / "docs/protocol.md"
FAMILIES = (
    general, sending, reading, consuming, popping, replies, groups, group_administration, topics,
    administration, transactions, inner,
)  # fmt: skip

HEAD = f"""\
# Commands on the wire

Printed from the declarations: `python tests/protocol/test_protocol_page.py > docs/protocol.md`; a
test compares. Applications rely on `cometmq.Producer`, `Consumer` and `Admin`; this page is for
writing another client, and for reading a capture.

## Frames

{textwrap.indent(inspect.getdoc(frames) or "", "    ")}

| | bytes |
| --- | --- |
| a head | at most {frames.HEAD_MAX:,} |
| any frame | at most {frames.FRAME_MAX:,} |
| a message on a local connection, and 64 for each frame | at most {frames.MESSAGE_MAX:,} |

## Commands

{inspect.getdoc(declared)}
"""


def page() -> str:
    return "\n".join([HEAD, *commands(), *errors()])


def commands() -> list[str]:
    """A section for each file; under it its commands and their parts, in the file's order."""
    shown: list[str] = []
    for family in FAMILIES:
        source = inspect.getsource(family)
        shown.append(f"### {(inspect.getdoc(family) or '').rstrip('.')}\n")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name in WIRE:
                shown += _class(node, source.splitlines())
    return shown


WIRE = {kind.__name__: kind for kind in COMMANDS} | {
    kind.__name__: None for kind in Part.__subclasses__() if kind.__module__.startswith("cometmq.")
}


def _class(node: ast.ClassDef, lines: list[str]) -> list[str]:
    kind = WIRE[node.name]
    tag = f" ({tag_of(kind)})" if kind is not None else ", a part"
    shown = [f"**{node.name}**{tag}\n"]
    if text := ast.get_docstring(node):
        shown.append(text.replace("    ", "") + "\n")
    body = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    if kind is not None and not issubclass(kind, Answer):
        shown.append(_access(kind) + "\n")
    if body:
        fields = lines[body[0].lineno - 1 : body[-1].end_lineno]
        shown.append("```python\n" + textwrap.dedent("\n".join(fields)) + "\n```\n")
    return shown


def _access(kind: type[Command]) -> str:
    access = kind.access
    needs = [_need(need) for need in access.needs]
    said = f"*Said by {access.audience.value}"
    if needs:
        said += f"; needs {', '.join(needs)}"
    if access.served_by is not ServedBy.MASTER:
        said += f"; served by {access.served_by.value}"
    if kind.new_in:
        said += f"; since {kind.new_in}"
    return said + ("; may be answered later.*" if access.later else ".*")


def _need(need: Need) -> str:
    if need.on is On.BROKER:
        return f"{need.right.value} on the broker"
    on = f"every {need.on.value}" if need.field == EVERY else f"{need.on.value} `{need.field}`"
    unless = f" unless `{need.unless}`" if need.unless else ""
    unless += " where one is named" if need.is_optional else ""
    return f"{need.right.value} on {on}{unless}"


def errors() -> list[str]:
    rows = [
        f"| {code} | {kind.__name__} | {'yes' if kind.retriable else ''} | "
        f"{_in_a_cell(inspect.getdoc(kind) or '')} |"
        for code, kind in sorted(BY_CODE.items())
    ]
    head = ["## Errors\n", "| code | error | try again | |", "| --- | --- | --- | --- |"]
    return [*head, *rows, ""]


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def test_the_page_is_what_is_declared() -> None:
    assert PAGE.read_text() == page()


def test_every_command_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert not [name for name in WIRE if f"**{name}**" not in text]


if __name__ == "__main__":
    print(page(), end="")
