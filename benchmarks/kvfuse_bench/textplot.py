"""Small charts for a terminal, in block characters."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHT = 5
_BAR_WIDTH = 36


def chart(title: str, values: Sequence[float], top: float, label: str) -> list[str]:
    """Lines of a chart with one column for each value, from 0 to ``top``, which ``label`` stands for."""
    top = top or 1.0
    lines = [title]
    for row in reversed(range(_HEIGHT)):
        cells = [_EIGHTHS[_eighths(_HEIGHT * value / top - row)] for value in values]
        mark = {_HEIGHT - 1: label, 0: "0"}.get(row, "")
        lines.append(f"{mark:>9} ┤{''.join(cells)}")
    return lines


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> list[str]:
    """Lines of bars to compare: (name, value, its text). The longest has the whole width."""
    longest = max((value for _, value, _ in rows), default=0) or 1.0
    width = max((len(name) for name, _, _ in rows), default=0)
    return [title, *(f"  {name:<{width}} {_bar(value / longest)} {text}" for name, value, text in rows)]


def _bar(share: float) -> str:
    cells = _BAR_WIDTH * share
    return "█" * int(cells) + _LEFT_EIGHTHS[_eighths(cells - int(cells))].strip()


def _eighths(height: float) -> int:
    return round(8 * min(max(height, 0.0), 1.0))
