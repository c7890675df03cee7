"""Charts as SVG: bars to compare, and lines over time or capacity. Colours are classes that a page or picture styles.

Sizes are in units of the drawing, `WIDTH` of which are the width of a phone: text stays readable there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from kvfuse_bench.runreport import Bar, Bars, Chart, Point

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 30
"""margins of a chart of lines"""
BAR_ROW, BAR_TITLE, BAR_GAP = 19, 21, 11
BAR_LEFT, BAR_RIGHT = 132, 62
TICKS = 4

COLOURS = {
    "light": ("#1f6feb", "#c9510c", "#1a7f37", "#8250df", "#57606a", "#bf3989"),
    "dark": ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#9da7b3", "#ff7bb5"),
}
"""of series, which stand out on each other's background alike"""
INKS = {"light": ("#1f2328", "#59636e", "#d1d9e0", "#ffffff"), "dark": ("#f0f6fc", "#9198a1", "#3d444d", "#0d1117")}
"""text, faint text, lines of the grid, the ground"""


def colour_rules(theme: str) -> str:
    """Declarations of CSS: the variables that the classes use."""
    text, faint, grid, ground = INKS[theme]
    series = "".join(f"--s{number}:{colour};" for number, colour in enumerate(COLOURS[theme]))
    return f"--text:{text};--faint:{faint};--grid:{grid};--ground:{ground};{series}"


def class_rules() -> str:
    """What each class looks like."""
    rules = [
        "text{font:11px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--faint)}",
        ".title{font-size:12.5px;font-weight:600;fill:var(--text)}",
        ".value{fill:var(--text);font-variant-numeric:tabular-nums}",
        ".grid{stroke:var(--grid);stroke-width:1}",
        ".limit{stroke:var(--faint);stroke-width:1;stroke-dasharray:4 3}",
        ".line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}",
        ".area{opacity:.75;stroke:none}",
    ]
    for number in range(len(COLOURS["light"])):
        rules.append(f".line.s{number}{{stroke:var(--s{number})}}")
        rules.append(f".mark.s{number},.area.s{number}{{fill:var(--s{number})}}")
    return "".join(rules)


def bars_svg(groups: Sequence[Bars], width: int = WIDTH, *, is_alone: bool = False) -> str:
    """Groups of bars, one below the other; in each the longest one has the whole width.

    ``is_alone``: a picture of its own, with the groups' titles, in the light or dark theme of its reader.
    """
    parts, top = [], 0
    for group in groups:
        if is_alone:
            parts.append(_text(0, top + 13, group.title, "title"))
            top += BAR_TITLE
        longest = max((bar.value for bar in group.bars), default=0) or 1
        for number, bar in enumerate(group.bars):
            length = max(1.0, (width - BAR_LEFT - BAR_RIGHT) * bar.value / longest)
            parts += _bar(bar, top + number * BAR_ROW, length, _series(group, number))
        top += len(group.bars) * BAR_ROW + BAR_GAP
    return _svg(width, top - BAR_GAP, parts, "Figures of the run, as bars", is_alone=is_alone)


def _bar(bar: Bar, top: int, length: float, series: int) -> Iterator[str]:
    yield _text(BAR_LEFT - 6, top + 13, bar.name, anchor="end")
    place = f'x="{BAR_LEFT}" y="{top + 3}" width="{length:.1f}" height="12" rx="2"'
    yield f'<rect class="mark s{series}" {place}/>'
    yield _text(BAR_LEFT + length + 5, top + 13, bar.text, "value")


def _series(group: Bars, number: int) -> int:
    """Ours and what it is compared with; in a group of many the first alone stands out."""
    return number if len(group.bars) <= 2 else min(number, 1) * 4


def lines_svg(chart: Chart) -> str:
    """A chart with a class ``s0``, ``s1``, ... for each line, in their order."""
    lines = [points for points in _stacked(chart) if points]
    if not lines:
        return _svg(WIDTH, HEIGHT, [_text(LEFT, HEIGHT / 2, "nothing was measured")], chart.title)
    across = [x for points in lines for x, _ in points]
    top = _nice_top(max([y for points in lines for _, y in points] + [chart.limit or 0]))
    view = _View(min(across), max(across), top, is_log=chart.is_log)
    parts = [*_grid(view, chart), *_limit(view, chart)]
    for number, points in reversed(list(enumerate(_stacked(chart)))):
        if points:
            parts += _line(view, points, number, chart)
    return _svg(WIDTH, HEIGHT, parts, chart.title)


class _View:
    """Where values are in the drawing."""

    def __init__(self, left: float, right: float, top: float, *, is_log: bool) -> None:
        self.is_log = is_log
        self.left, self.right = (max(left, 1), max(right, 1)) if is_log else (left, right)
        self.top = top

    def x(self, value: float) -> float:
        scale = math.log if self.is_log else float
        value = max(value, 1) if self.is_log else value
        span = scale(self.right) - scale(self.left) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * (scale(value) - scale(self.left)) / span

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top


def _stacked(chart: Chart) -> list[list[Point]]:
    """The lines; each with those before it below, where the chart is stacked."""
    lines = list(chart.lines.values())
    if not chart.is_stacked:
        return lines
    sums: list[list[Point]] = []
    for points in lines:
        below = [y for _, y in sums[-1]] if sums else [0.0] * len(points)
        sums.append([(x, y + under) for (x, y), under in zip(points, below, strict=True)])
    return sums


def _line(view: _View, points: Sequence[Point], number: int, chart: Chart) -> Iterator[str]:
    places = [f"{view.x(x):.1f},{view.y(y):.1f}" for x, y in points]
    if chart.is_stacked:
        ends = f"{view.x(points[-1][0]):.1f},{view.y(0):.1f} {view.x(points[0][0]):.1f},{view.y(0):.1f}"
        yield f'<polygon class="area s{number}" points="{" ".join(places)} {ends}"/>'
        return
    yield f'<polyline class="line s{number}" points="{" ".join(places)}"/>'
    if chart.is_log or len(points) == 1:
        for place in places:
            x, y = place.split(",")
            yield f'<circle class="mark s{number}" cx="{x}" cy="{y}" r="2.6"/>'


def _grid(view: _View, chart: Chart) -> Iterator[str]:
    for number in range(TICKS + 1):
        value = view.top * number / TICKS
        y = view.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 5, y + 4, f"{100 * value:.3g}%" if chart.is_share else short(value), anchor="end")
    for value in _across_ticks(view):
        is_last = view.x(value) > WIDTH - RIGHT - 10
        yield _text(
            view.x(value) + (RIGHT if is_last else 0), HEIGHT - 6, short(value), anchor="end" if is_last else "middle"
        )


def _limit(view: _View, chart: Chart) -> Iterator[str]:
    if chart.limit is not None:
        y = view.y(chart.limit)
        yield f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _across_ticks(view: _View) -> list[float]:
    """Values with room for their texts between them."""
    if view.is_log:
        count = max(1, min(4, round(math.log2(view.right / view.left)))) if view.right > view.left else 0
        ratio = (view.right / view.left) ** (1 / count) if count else 1.0
        return [view.left * ratio**number for number in range(count + 1)]
    step = _nice_step((view.right - view.left) / 5)
    first = math.ceil(view.left / step) * step
    return [first + number * step for number in range(int((view.right - first) / step + 1e-9) + 1)]


def _nice_step(least: float) -> float:
    if least <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= least)


def _nice_top(value: float) -> float:
    """At least ``value``, and `TICKS` round steps."""
    return _nice_step(value / TICKS) * TICKS


def short(value: float) -> str:
    """A number for an axis: "12k"."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], title: str, *, is_alone: bool = False) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    style = ""
    if is_alone:
        head = head.replace(" role", f' width="{width:g}" height="{height:g}" role')
        dark = f"@media (prefers-color-scheme:dark){{:root{{{colour_rules('dark')}}}}}"
        style = f"<style>:root{{{colour_rules('light')}}}{dark}{class_rules()}</style>"
    return "".join([head, f"<title>{escape(title)}</title>", style, *parts, "</svg>\n"])
