"""Parser of SQL92 filters: text to a checked program, in one pass and without recursion."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from lark import Lark
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from cometmq.protocol.errors import FilterIllegal
from cometmq.protocol.filters.nodes import Nodes
from cometmq.protocol.filters.program import Program

_SHOWN: Final = {
    "NAME": "a property",
    "TEXT": "a 'text'",
    "INTEGER": "a number",
    "FLOAT": "a number",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "EQUALS": "=",
    "UNEQUAL": "<>",
    "GREATER": ">",
    "GREATER_EQUAL": ">=",
    "LESS": "<",
    "LESS_EQUAL": "<=",
    "PLUS": "+",
    "MINUS": "-",
    "$END": "the end",
}


@cache
def _parser() -> Lark:
    grammar = files("cometmq.protocol.filters").joinpath("grammar.lark").read_text()
    return Lark(grammar, parser="lalr", lexer="basic", transformer=Nodes())


def parse(text: str) -> Program:
    """The program of an expression, which is of a bounded size. Raises FilterIllegal."""
    try:
        program = _parser().parse(text)
    except UnexpectedInput as error:
        raise _unexpected(error) from None
    assert isinstance(program, Program)
    return program


def _unexpected(error: UnexpectedInput) -> FilterIllegal:
    """With the place, what stands there, and what may stand there."""
    place = f"line {error.line}, column {error.column}"
    if isinstance(error, UnexpectedCharacters):
        if error.char == "'":
            return FilterIllegal(f"SQL92, {place}: a text without its closing '")
        return FilterIllegal(f"SQL92, {place}: {error.char!r} begins no word, number or operator")
    assert isinstance(error, UnexpectedToken)
    token = error.token
    found = "the end" if token.type == "$END" else repr(str(token)[:40])
    names = sorted({_SHOWN.get(name, name.lstrip("_")) for name in error.accepts or error.expected})
    return FilterIllegal(
        f"SQL92, {place}: {found} where one of these is expected: {', '.join(names)}"
    )
