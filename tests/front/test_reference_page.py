"""docs/reference.md has every public name as its docstring and its source declare it.

After a change: `python tests/front/test_reference_page.py > docs/reference.md`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cometmq
from cometmq import errors, testing
from cometmq.protocol import errors as errors_module
from cometmq.protocol.errors import BY_CODE, CometError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference.md"
# As a reader meets them.
NAMES = (
    "Broker", "Producer", "Receipt", "Reply", "Consumer", "Message", "Admin", "AsyncProducer",
    "AsyncConsumer", "PopConsumer", "AsyncPopConsumer", "Transaction", "PendingTransaction",
    "Retry", "Reject", "Appender", "subscribe_actor",
)  # fmt: skip
TESTING = ("Sandbox", "OwnBroker")  # of cometmq.testing
HIDDEN = {"self", "cls"}

HEAD = """\
# Reference

Every public name, printed from its docstring: `python tests/front/test_reference_page.py >
docs/reference.md`; a test compares. [The guide](guide/README.md) is the way in; settings are in
[configuration.md](configuration.md), Spark in [spark.md](spark.md), commands in `cometmq --help`.

`from cometmq import ...` has all of these; errors are in `cometmq.errors`.
"""


def page() -> str:
    index = ", ".join(f"[{name}](#{name.lower()})" for name in NAMES)
    index += ", [errors](#errors), [fixtures of pytest](#fixtures-of-pytest)\n"
    return "\n".join([HEAD, index, *names(), *error_table(), *fixtures()])


# --- names ---


def names() -> Iterator[str]:
    for name in NAMES:
        declared = getattr(cometmq, name)
        yield f"## {name}\n"
        node = node_of(declared)
        if isinstance(node, ast.ClassDef):
            yield from class_page(name, declared, node)
        else:
            yield f"```python\n{signature(node)}\n```\n"
            yield text(inspect.getdoc(declared))


def class_page(name: str, declared: Any, node: ast.ClassDef) -> Iterator[str]:
    inherits = declared.__mro__[1].__name__ in TESTING  # its members are described there
    public = [
        each
        for each in (members(node) if inherits else public_members(declared))
        if not each.name.startswith("_")
    ]
    (made,) = [each for each in members(node) if each.name == "__init__"] or [None]
    if made is not None and name not in (
        "Appender",
        "Receipt",
        "Transaction",
        *TESTING,
    ):  # those are not made by users
        yield f"```python\n{signature(made, name)}\n```\n"
    yield text(inspect.getdoc(declared))
    fields = list(field_rows(node))
    if name == "Message":
        yield "| | | |\n| --- | --- | --- |\n" + "\n".join(fields) + "\n"
    for member in public:
        properties = {ast.unparse(each) for each in member.decorator_list}
        yield f"### {name}.{member.name}\n"
        if "property" in properties:
            assert member.returns is not None, (name, member.name)
            yield f"```python\n{member.name}: {ast.unparse(member.returns)}\n```\n"
        else:
            yield f"```python\n{signature(member)}\n```\n"
        yield text(inspect.getdoc(getattr(declared, member.name)) or ast.get_docstring(member))


def public_members(declared: type) -> list[Function]:
    """Return its own public members and those inherited from classes of ours, each once."""
    found: dict[str, Function] = {}
    for kind in declared.__mro__:
        if kind.__module__.startswith("cometmq."):
            for each in members(node_of(kind)):
                if not each.name.startswith("_"):
                    found.setdefault(each.name, each)
    return list(found.values())


def field_rows(node: ast.ClassDef) -> Iterator[str]:
    """Of a class that is data: name, type, the comment behind it."""
    lines = source_of("codec").splitlines()
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            comment = lines[each.lineno - 1].partition("#")[2].strip()
            kind = ast.unparse(each.annotation).replace("|", "\\|")
            yield f"| `{ast.unparse(each.target)}` | `{kind}` | {comment} |"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def members(node: ast.ClassDef) -> list[Function]:
    return [each for each in node.body if isinstance(each, Function)]


def signature(node: Function, name: str = "") -> str:
    """On one line where that is short, else an argument a line."""
    begin = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    shown = arguments(node.args)
    end = ")" if name or node.returns is None else f") -> {ast.unparse(node.returns)}"
    opening = f"{name}(" if name else f"{begin} {node.name}("
    line = opening + ", ".join(shown) + end
    if len(line) <= 88:
        return line
    return opening + "\n" + "".join(f"    {each},\n" for each in shown) + end


def arguments(given: ast.arguments) -> list[str]:
    alone = ast.parse(f"def f({ast.unparse(given)}): ...").body[0]
    assert isinstance(alone, ast.FunctionDef)
    found = alone.args
    plain = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(plain) - len(found.defaults)) + list(found.defaults)
    shown = [one(*each) for each in zip(plain, defaults, strict=True) if each[0].arg not in HIDDEN]
    if found.vararg is not None:
        shown.append("*" + one(found.vararg, None))
    elif found.kwonlyargs:
        shown.append("*")
    shown += [one(*each) for each in zip(found.kwonlyargs, found.kw_defaults, strict=True)]
    if found.kwarg is not None:
        shown.append("**" + one(found.kwarg, None))
    return shown


def one(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    if default is None:
        return argument.arg + kind
    return f"{argument.arg}{kind} = {ast.unparse(default)}"


def node_of(declared: Any) -> Any:
    """The declaration in the source; of the kernel's classes, in its stub."""
    package, _, name = declared.__module__.rpartition(".")
    if package == "cometmq.shm.kernel":
        source = source_of(name)
    else:
        source = inspect.getsource(sys.modules[declared.__module__])
    return next(
        each
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef | Function) and each.name == declared.__name__
    )


@cache
def source_of(name: str) -> str:
    return (ROOT / f"shm/kernel/{name}.pyi").read_text()


# --- docstrings as Markdown ---

_SECTION = re.compile(r"^(Args|Raises|Returns):$")
_ENTRY = re.compile(r"^([*\w][\w, *.]*): (.*)$", re.DOTALL)


def text(docstring: str | None) -> str:
    """A section `Args:` becomes a list; what is indented is code, as it is in Markdown."""
    assert docstring, "a public name without a docstring"
    blocks = re.split(r"\n\n+", docstring)
    return "\n\n".join(map(block, blocks)) + "\n"


def block(given: str) -> str:
    first, _, rest = given.partition("\n")
    if not _SECTION.match(first):
        return given
    return "\n".join(entries(textwrap.dedent(rest).splitlines()))


def entries(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        entry = _ENTRY.match(line)
        if entry is not None:
            named = ", ".join(f"`{each}`" for each in entry[1].split(", "))
            yield f"- {named}: {entry[2]}"
        else:
            yield f"  {line.strip()}"


# --- cometmq.testing ---


def fixtures() -> Iterator[str]:
    yield "## Fixtures of pytest\n"
    yield text(inspect.getdoc(testing))
    for node in ast.parse(inspect.getsource(testing)).body:
        if isinstance(node, Function) and any(
            ast.unparse(each).startswith("pytest.fixture") for each in node.decorator_list
        ):
            yield f"### {node.name}\n"
            yield text(ast.get_docstring(node))
    for name in TESTING:
        declared = getattr(testing, name)
        yield f"## {name}\n"
        yield from class_page(name, declared, node_of(declared))


# --- errors ---


def error_table() -> Iterator[str]:
    yield "## errors\n"
    yield text(inspect.getdoc(errors))
    yield "| error | code | |\n| --- | --- | --- |"
    for name in sorted(errors.__all__):
        kind = getattr(errors, name)
        if not issubclass(kind, CometError):
            continue
        first = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"| `{name}` | {kind.code} | {first.replace('|', chr(92) + '|')} |"
    yield ""


def test_the_page_is_what_is_declared() -> None:
    assert PAGE.read_text() == page(), "print it again: see the beginning of this file"


def test_nothing_public_is_left_out() -> None:
    assert {*NAMES, "errors", "__version__"} == set(cometmq.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_member_is_on_the_page(name: str) -> None:
    """Fault 32: every public member is on the page; inherited ones of Admin were missing."""
    declared = getattr(cometmq, name)
    if not inspect.isclass(declared):
        return
    described = {
        each
        for each, value in inspect.getmembers(declared)
        if not each.startswith("_")
        and (callable(value) or isinstance(value, property))
        and any(
            each in vars(kind) for kind in declared.__mro__ if kind.__module__.startswith("cometmq")
        )
    }
    printed = PAGE.read_text()
    missing = {each for each in described if f"### {name}.{each}\n" not in printed}
    assert not missing


def test_every_error_stands_in_the_tree() -> None:
    """Fault 32: every error type is in the docstring's tree; four were missing."""
    tree = re.findall(r"── (\w+)", inspect.getdoc(errors_module) or "")
    kinds = {kind.__name__: kind for kind in BY_CODE.values() if kind is not CometError}
    assert sorted(tree) == sorted(
        name for name, kind in kinds.items() if kind.__module__ == errors_module.__name__
    )


if __name__ == "__main__":
    print(page(), end="")
