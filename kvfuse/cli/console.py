"""All that commands print: lines, tables, pages and progress for people, JSON for programs.

Names and words of others reach a terminal here alone, by `printable`, and never as markup. No other module of the
command line prints; a test sees to that.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from rich.text import Text

WIDTH = 1000
"""of lines where nobody looks at them in a terminal"""


def printable(text: object) -> str:
    """Text in one line, in which control and format characters and lone surrogates are escaped as in Python's strings.

    A terminal takes some of them for commands: it may be renamed, or show other words than there are. A byte of a name
    that is not UTF-8 is shown as that byte.
    """
    said = str(text)
    return said if said.isprintable() else "".join(one if one.isprintable() else _escaped(one) for one in said)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # as os.fsdecode has it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


# -- lines ------------------------------------------------------------------------------------------


def say(line: object, *, err: bool = False) -> None:
    """One line on stdout, or stderr."""
    click.echo(printable(line), err=err)


def say_each(lines: Iterable[object], *, err: bool = False) -> None:
    """Many lines, at once."""
    click.echo("\n".join(map(printable, lines)), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Text with line ends of its own."""
    say_each(text.split("\n"), err=err)


def note(line: object) -> None:
    """One line on stderr."""
    say(line, err=True)


def print_traceback(error: BaseException) -> None:
    """On stderr, for KVFUSE_DEBUG."""
    say_lines("".join(traceback.format_exception(error)).rstrip("\n"), err=True)


def confirm(question: str) -> None:
    """Somebody at the terminal agrees. click.Abort: no."""
    click.confirm(printable(question), abort=True)


def ask(question: str) -> str:
    """What somebody at the terminal types. click.Abort."""
    return str(click.prompt(printable(question), prompt_suffix=": "))


def take_any_character() -> None:
    """From here on, what stdout and stderr have no bytes for is escaped there: a name must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class LogFormatter(logging.Formatter):
    """One line a message. Logs are looked at in terminals."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


def print_json(content: Any) -> None:
    """Indented JSON on stdout; paths as text. It is ASCII: all else is escaped, as JSON has it."""
    click.echo(json.dumps(content, indent=2, default=str))


# -- tables -----------------------------------------------------------------------------------------


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


def styled(text: object, style: str = "") -> Text:
    """For a cell or a page."""
    from rich.text import Text

    return Text(printable(text), style)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], left: Iterable[str] | None = None) -> Table:
    """``left``: columns that are aligned so; None: those that have other cells than numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(type(row[index]) in (int, float, type(None)) for row in cells)
        is_left = not numbers if left is None else column in left
        table.add_column(styled(column), justify="left" if is_left else "right", overflow="fold")
    for row in cells:
        table.add_row(*(cell if isinstance(cell, Text) else styled(text_of(cell)) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table on stdout; where that is no terminal, lines are as long as they need to be."""
    if title is not None:
        _console().print(styled(title, "italic"), soft_wrap=True)
    print_page(make_table(columns, rows))


def print_fitting(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table, where the terminal is wide enough for it; else each row as a block: its first cell, then name and value
    of each other one."""
    from rich.measure import Measurement
    from rich.table import Table

    cells = [list(row) for row in rows]
    table, console = make_table(columns, cells), _console()
    wide = console.options.update(width=WIDTH)
    if Measurement.get(console, wide, table).maximum <= console.width:
        print_table(columns, cells, title)
        return
    if title is not None:
        console.print(styled(title, "italic"))
    for row in cells:
        console.print(styled(text_of(row[0]), "bold"))
        block = Table.grid(padding=(0, 2))
        for name, value in zip(columns[1:], row[1:], strict=True):
            block.add_row(styled(f"  {name}", "dim"), styled(text_of(value)))
        console.print(block)


def shorten(text: str, width: int) -> str:
    """Printable text of at most ``width`` characters: both ends stay, as paths and names differ there."""
    text = printable(text)
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def fill_lines(pieces: Iterable[str], width: int) -> list[str]:
    """Pieces in as few lines as they take, two spaces apart; a line ends between two of them."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 2 + len(piece) <= width:
            lines[-1] += f"  {piece}"
        else:
            lines.append(piece)
    return lines


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


# -- pages, and what happens meanwhile --------------------------------------------------------------


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=WIDTH)
    return console


def page_size() -> tuple[int, int | None]:
    """Columns and rows of the terminal; None: lines may be as many as there are, as this is none."""
    console = _console()
    return console.width, console.height if console.is_terminal else None


def page_of(parts: Iterable[RenderableType]) -> RenderableType:
    """Tables and styled texts, one below the other."""
    from rich.console import Group

    return Group(*parts)


def print_page(page: RenderableType) -> None:
    _console().print(page, soft_wrap=False)


@contextmanager
def live(page: RenderableType, *, screen: bool = False) -> Iterator[Callable[[RenderableType], None]]:
    """A page in the terminal, and what replaces it. ``screen``: it has all of it."""
    from rich.live import Live

    with Live(page, console=_console(), auto_refresh=False, screen=screen) as shown:
        yield lambda other: shown.update(other, refresh=True)


@contextmanager
def doing(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr while something is done, where that is a terminal; yields what changes it."""
    with _console(stderr=True).status(styled(what)) as status:
        yield lambda text: status.update(styled(text))


class Bars:
    """Progress on stderr, where that is a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, done: float, total: float | None, text: str = "") -> None:
        """How far ``what`` is; the first call begins a bar for it."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(printable(what), text="")
        self._progress.update(self._tasks[what], completed=done, total=total, text=printable(text))


@contextmanager
def bars(*, counts: bool = False, transient: bool = False) -> Iterator[Bars]:
    """``counts``: "3/10" instead of a percentage."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = _console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn() if counts else TaskProgressColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    ) as progress:
        yield Bars(progress)
