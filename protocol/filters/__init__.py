"""SQL92 filters: an expression over a message's properties is parsed, checked and compiled.

`shm/kernel/filter.pxi` carries the program out; docs/filters.md has the grammar and the rules.
"""

from __future__ import annotations

from functools import lru_cache

from cometmq.protocol.errors import FilterIllegal, FiltersOff
from cometmq.protocol.filters.limits import TEXT_MAX
from cometmq.protocol.filters.program import Program

__all__ = ["TEXT_MAX", "Program", "check_filters_on", "compile_filter"]


@lru_cache(maxsize=512)
def compile_filter(text: str) -> Program:
    """The program of an SQL92 expression.

    Raises FilterIllegal with the line and column of what is wrong, and what was expected there.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > TEXT_MAX:
        raise FilterIllegal(f"an SQL92 expression of {size} bytes, at most {TEXT_MAX}")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise FilterIllegal("an SQL92 expression that is no Unicode text: it has a lone surrogate")
    from cometmq.protocol.filters.parsing import parse  # not before somebody has a filter

    return parse(text)


def check_filters_on(enabled: bool) -> None:
    """Raises FiltersOff."""
    if not enabled:
        raise FiltersOff(
            "this broker takes no SQL92 expressions: its enablePropertyFilter is false"
        )
