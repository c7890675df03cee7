"""A run as one HTML file: no server, no network. Charts are SVG; a short script shows values below the pointer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path

from kvfuse.errors import ConfigError
from kvfuse_bench.runreport import Chart, Report, Table
from kvfuse_bench.svgcharts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    bars_svg,
    class_rules,
    colour_rules,
    lines_svg,
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root{{color-scheme:light dark;{light}}}
@media (prefers-color-scheme:dark){{:root{{{dark}}}}}
:root[data-theme=light]{{color-scheme:light;{light}}}
:root[data-theme=dark]{{color-scheme:dark;{dark}}}
{css}
{classes}
</style>
</head>
<body>
<main>
<header><h1>{title}</h1><button id="theme" type="button">light / dark</button></header>
<p>{subtitle}</p>
{body}
</main>
<script id="report" type="application/json">{report}</script>
<script>
{script}
</script>
</body>
</html>
"""


def write_page(report: Report, path: Path) -> None:
    """ConfigError: the file cannot be written."""
    try:
        path.write_text(page_of(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the page cannot be written: {error.strerror}") from error


def page_of(report: Report) -> str:
    """The text of the page."""
    source = files("kvfuse_bench")
    return _PAGE.format(
        title=escape(report.title),
        subtitle=escape(report.subtitle),
        light=colour_rules("light"),
        dark=colour_rules("dark"),
        css=(source / "runpage.css").read_text(),
        classes=class_rules(),
        body="\n".join(_body(report)),
        report=json.dumps(asdict(report)).replace("<", "\\u003c"),  # no end of the script is in a name
        script=(source / "runpage.js").read_text(),
    )


def _body(report: Report) -> Iterator[str]:
    yield '<div class="glance">'
    for group in report.glance:
        yield f"<figure><figcaption>{escape(group.title)}</figcaption>{bars_svg([group])}</figure>"
    yield '</div><div class="charts">'
    for number, chart in enumerate(report.charts):
        yield _figure(number, chart)
    yield "</div>"
    for table in report.tables:
        yield _table(table)


def _figure(number: int, chart: Chart) -> str:
    names = [
        f'<li><i style="background:var(--s{place})"></i>{escape(name)}</li>' for place, name in enumerate(chart.lines)
    ]
    if chart.limit is not None:
        names.append(f'<li><i style="background:var(--faint)"></i>{escape(chart.limit_name)}</li>')
    cross = (
        f'<line class="cross" data-left="{LEFT}" data-right="{WIDTH - RIGHT}" x1="{LEFT}" x2="{LEFT}"'
        f' y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )
    return (
        f'<figure data-chart="{number}"><figcaption>{escape(chart.title)}</figcaption>'
        f'<ul class="legend">{"".join(names)}</ul>{lines_svg(chart).replace("</svg>", cross)}'
        f'<div class="across">{escape(chart.across)}</div><div class="tip"></div></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<h2>{escape(table.title)}</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
