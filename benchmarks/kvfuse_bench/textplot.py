"""Small charts for a terminal, in block characters."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 5


def chart(title: str, values: Sequence[float], top: float, label: str, line: float | None = None) -> list[str]:
    """Lines of a chart with one column for each value, from 0 to ``top``, which ``label`` stands for.

    ``line``: a height at which a line is drawn where no column is.
    """
    top = top or 1.0
    line_row = None if line is None else min(int(_HEIGHT * line / top), _HEIGHT - 1)
    lines = [title]
    for row in reversed(range(_HEIGHT)):
        cells = [_cell(_HEIGHT * value / top - row, row == line_row) for value in values]
        mark = {_HEIGHT - 1: label, 0: "0"}.get(row, "")
        lines.append(f"{mark:>9} ┤{''.join(cells)}")
    return lines


def _cell(height: float, on_line: bool) -> str:
    cell = _EIGHTHS[round(8 * min(max(height, 0.0), 1.0))]
    return "─" if on_line and cell == " " else cell
