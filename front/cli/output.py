"""How the command line speaks: data on standard output, everything else on standard error.

A table is drawn on a terminal. In a pipe it is tab-separated values below one line of names, and
with `-o json` it is JSON; both hold the plain values, and neither waits for a library that draws.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

JSON: Final = "json"
TABLE: Final = "table"

Row = Mapping[str, object]


def print_rows(
    rows: Sequence[Row], output: str, *, title: str = "", columns: Sequence[str] = ()
) -> None:
    """Rows of the same columns. `columns` names them where there may be no row."""
    if output == JSON:
        print_json(rows)
    elif sys.stdout.isatty():
        console().print(table_of(rows, title=title, columns=columns))
    else:
        names = list(rows[0]) if rows else list(columns)
        _write_tsv([names, *([row[name] for name in names] for row in rows)])


def print_record(record: Row, output: str, *, title: str = "") -> None:
    """One thing: a line for each of its fields."""
    if output == JSON:
        print_json(record)
    elif sys.stdout.isatty():
        console().print(record_of(record, title=title))
    else:
        _write_tsv(record.items())


def print_json(value: object) -> None:
    """The value as one JSON document; on several lines only where a person looks at it."""
    indent = 2 if sys.stdout.isatty() else None
    click.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def _write_tsv(rows: Iterable[Iterable[object]]) -> None:
    text = "".join("\t".join(_plain(value) for value in row) + "\n" for row in rows)
    click.echo(text, nl=False)


def _plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(_plain(each) for each in value)
    return " ".join(str(value).split())  # a tab or a line's end would be another field


# --- what rich draws ------------------------------------------------------------------------------


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def table_of(rows: Sequence[Row], *, title: str = "", columns: Sequence[str] = ()) -> Any:
    """A rich table; numbers to the right, with their thousands apart."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = list(rows[0]) if rows else list(columns)
    for name in names:
        is_number = any(_is_number(row[name]) for row in rows)
        table.add_column(
            name.replace("_", " "), justify="right" if is_number else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell(row[name]) for name in names))
    return table


def fitting(
    rows: Sequence[Row], console: Console, *, title: str = "", spare: Sequence[str] = ()
) -> Any:
    """A table as wide as the console is: where it has no room for all columns some of `spare` are
    left out, the first ones first. No number is ever split or cut."""
    left_out: list[str] = []
    for name in (*spare, ""):
        kept = [{key: row[key] for key in row if key not in left_out} for row in rows]
        table = table_of(kept, title=title)
        for column in table.columns[1:]:
            column.no_wrap = True
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= (
            console.width
        ):
            break
        left_out += [name] if name else []
    if left_out:
        table.caption = f"no room for: {', '.join(left_out)} (-o json has all)"
        table.caption_justify = "left"
    return table


def record_of(record: Row, *, title: str = "") -> RenderableType:
    """Names in one column, values in the next."""
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", box=None, show_header=False, pad_edge=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in record.items():
        table.add_row(name.replace("_", " "), cell(value))
    return table


def cell(value: object) -> Any:
    """How a value looks in a table."""
    from rich.text import Text

    if isinstance(value, list | tuple):
        return Text(", ".join(_plain(each) for each in value))
    if _is_number(value):
        return Text(f"{value:,}")
    if value is None:
        return Text("-", style="dim")
    return Text(_printable(_plain(value) if isinstance(value, bool) else str(value)))


def _printable(text: str) -> str:
    """Without what would move the cursor or change the colours."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- standard error -------------------------------------------------------------------------------


def hint(text: str) -> None:
    """Progress, or what to do next; nobody's data."""
    click.echo(text, err=True)


def warn(text: str) -> None:
    _say("Warning", "yellow", text)


def complain(text: str) -> None:
    _say("Error", "red", text)


def _say(kind: str, colour: str, text: str) -> None:
    prefix = f"{kind}:"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        prefix = click.style(prefix, fg=colour, bold=True)
    click.echo(f"{prefix} {text}", err=True)
