"""Tables for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click


def print_json(content: Any) -> None:
    """Indented JSON on stdout; paths as text."""
    click.echo(json.dumps(content, indent=2, default=str))


def text_of(value: Any) -> str:
    """A value in a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(text_of(part) for part in value) or "-"
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Any:
    """A rich table; columns whose cells are all numbers are aligned right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(type(row[index]) in (int, float, type(None)) for row in cells)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(cell if isinstance(cell, Text) else Text(text_of(cell)) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table on stdout; where that is no terminal, lines are as long as they need to be."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    console.print(make_table(columns, rows, title), soft_wrap=False)


IDENTIFIERS = frozenset({"pid", "ino"})
"""numbers that are names: no thousands separators"""


def print_object(content: Mapping[str, Any], title: str) -> None:
    """An object as a table of its plain values, and a table for every list of objects in it.

    Columns of these that have objects themselves, or nothing but None, are left out.
    """
    flat = dict(flatten(content))
    plain = (
        (name, str(value) if name in IDENTIFIERS else value) for name, value in flat.items() if not _is_table(value)
    )
    print_table(["", ""], plain, title)
    for name, value in flat.items():
        if _is_table(value):
            columns = [column for column in value[0] if any(_is_plain(row.get(column)) for row in value)]
            print_table(columns, [[row.get(column) for column in columns] for row in value], name)


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects as dotted names, in their order."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)
