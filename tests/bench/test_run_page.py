"""The page of a run: one file, what it shows, and how a real browser draws it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations, islice
from pathlib import Path

import pytest
from browser_lab import CHROMIUM, Drawing, look_at
from places import ROOT

from kvfuse.errors import ConfigError
from kvfuse_bench.cachefolder import namespace_for
from kvfuse_bench.cachereplay import replay_on_cache
from kvfuse_bench.daemons import kvfuse_mount
from kvfuse_bench.firsttoken import PromptEngine, first_tokens
from kvfuse_bench.replay import ReplayPlan
from kvfuse_bench.runpage import page_of, write_page
from kvfuse_bench.runreport import Bar, Bars, Chart, Report, Table, report_of_caches, report_of_simulations
from kvfuse_bench.simulate import Setup, make_setups, simulate
from kvfuse_bench.speeds import Speeds, measure_speeds
from kvfuse_bench.svgcharts import bars_svg, lines_svg, short
from kvfuse_bench.textplot import bars
from kvfuse_bench.traffic import Generator, Request

SPEEDS = Speeds(2 << 20, 1.2, 3.1, 6.0, 0.9, 0.4)
PHONE, DESK = 360, 1200


def a_report() -> Report:
    requests = list(islice(Generator(7), 300))
    setups = make_setups(["lru", "chain"], ["all", "adaptive"], [500, 1000])
    table = Table("A long table", ["policy", *"abcdefgh"], [["chain + adaptive", *["0.123 / 123,456"] * 8]])
    return report_of_simulations([simulate(requests, setup) for setup in setups], requests, "Simulated", [table])


def test_time_to_first_token() -> None:
    """10 ms a token computed, 1 ms loaded; what loads slower than it computes is computed."""
    engine = PromptEngine(prefill=100.0, token_size=1000, load_rate=1e6)
    assert engine.seconds(100, 0) == 1.0
    assert engine.seconds(100, 50) == pytest.approx(0.05 + 0.5)
    assert engine.seconds(100, 100) == pytest.approx(0.1 + 0.01), "the last token is computed"
    assert engine._replace(load_rate=1e4).seconds(100, 50) == 1.0
    requests = [Request(0, 100, (1, 2)), Request(1, 100, (1, 3))]
    assert first_tokens(engine, requests, [0, 1], 50) == pytest.approx(((1.0 + 0.55) / 2, 0.45))


def test_bars_of_a_terminal() -> None:
    assert bars("hits", [("kvfuse", 2, "2"), ("LRU", 1, "1")]) == [
        "hits",
        "  kvfuse " + 36 * "█" + " 2",
        "  LRU    " + 18 * "█" + " 1",
    ]
    assert bars("none", [("a", 0, "0")])[1] == "  a  0"


def test_numbers_of_axes() -> None:
    assert [short(value) for value in (0, 0.25, 999, 1000, 12_500, 3e6)] == ["0", "0.25", "999", "1k", "12.5k", "3M"]


def test_charts_without_anything_in_them() -> None:
    assert "nothing was measured" in lines_svg(Chart("t", "x", {"a": []}))
    assert "<polyline" in lines_svg(Chart("t", "x", {"a": [(0, 0), (1, 0)]}))
    assert bars_svg([Bars("t", [Bar("a", 0, "0")])]).count("<rect") == 1


def test_the_page_is_one_file_and_names_are_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    report = Report(
        hostile, "<b>", [Bars(hostile, [Bar(hostile, 1, hostile)])], [Chart(hostile, "x", {hostile: [(0, 1)]})]
    )
    page = page_of(report)
    assert page.count("<script") == 2
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert not re.search(r"(src|href)=|url\(|@import|http://(?!www\.w3\.org/2000/svg)|https:", page), (
        "nothing is fetched"
    )
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(report, tmp_path / "absent" / "page.html")


def test_the_report_can_be_read_again() -> None:
    report = a_report()
    data = json.loads(re.search(r'id="report"[^>]*>(.*?)</script>', page_of(report), re.S)[1])  # type: ignore[index]
    assert data["title"] == "Simulated"
    assert list(data["charts"][0]["lines"]) == ["lru + all", "lru + adaptive", "chain + all", "chain + adaptive"]
    assert data["charts"][2]["lines"]["lru + all"][-1][0] == 1000


def test_a_simulation_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    command = [sys.executable, "-m", "kvfuse.cli", "replay", "--simulate", "--requests", "200", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Hit ratio over capacity" in page.read_text()
    refused = subprocess.run([*command[:4], str(tmp_path), "--html", str(page)], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "for caches of kvfuse" in refused.stderr


def test_the_picture_of_the_readme_is_of_its_figures() -> None:
    """`scripts/picture` made docs/first-run.svg of docs/first-run.json."""
    done = subprocess.run([sys.executable, ROOT / "scripts/picture", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.ring(3)
def test_a_replay_becomes_a_report(tmp_path: Path) -> None:
    plan = ReplayPlan("llama-3-8b", 512, 4096, request_max=400)
    with kvfuse_mount(tmp_path / "volume", tmp_path / "mnt", "capacity=256MiB") as daemon:
        with namespace_for(daemon.mountpoint, Setup("chain", "adaptive", 1000)) as folder:
            result = replay_on_cache(Generator(), folder, plan, lambda result: None)
        speeds = measure_speeds(daemon.mountpoint, tmp_path / "volume", 1 << 20)
    assert speeds.put
    assert speeds.get
    assert speeds.block_size == 1 << 20
    report = report_of_caches([result], speeds, 10_000, "title", [], has_charts=True)
    assert [chart.title for chart in report.charts][-1] == "Hit ratio over capacity"
    found, written, saved, rates = report.glance
    assert found.bars[0].value > found.bars[1].value, "more than LRU"
    assert written.bars[0].value < written.bars[1].value
    assert saved.bars[0].value >= saved.bars[1].value >= 0
    assert rates.bars[0].value == speeds.get
    tiers = next(chart for chart in report.charts if chart.title.startswith("Where"))
    assert sum(points[-1][1] for points in tiers.lines.values()) >= result.tally.hits


# -- in a browser -----------------------------------------------------------------------------------

needs_chromium = pytest.mark.needs("chromium")
without_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def overlapping(drawing: Drawing) -> list[tuple[str, str]]:
    return [(one.text, other.text) for one, other in combinations(drawing.texts, 2) if one.overlaps(other)]


@needs_chromium
@without_chromium
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_browser_draws_it(tmp_path: Path, width: int) -> None:
    """On a phone and on a desk: marks in every chart, texts apart, inside, and large enough; nothing fetched."""
    report = a_report()
    report.glance.append(
        Bars("GB/s " * 20, [Bar("get, blocks of 2 MiB", 3.1, "3.10"), Bar("memcpy, one thread", 6, "6.00")])
    )
    seen = look_at(page_of(report), tmp_path, width)
    assert seen.console == []
    assert seen.width <= width
    assert len(seen.drawings) == len(report.glance) + len(report.charts)
    for drawing in seen.drawings:
        assert drawing.marks
        assert overlapping(drawing) == []
        for box in (*drawing.texts, *drawing.marks):
            assert box.left >= drawing.box.left - 1, box.text
            assert box.right <= drawing.box.right + 1, box.text
        assert drawing.font >= 9


@needs_chromium
@without_chromium
def test_its_script_works(tmp_path: Path) -> None:
    """The button changes the theme, and a pointer in a chart shows the values there."""
    page = page_of(a_report())
    light = look_at(page, tmp_path, DESK)
    point = """
      page.getElementById("theme").click();
      const svg = page.querySelector("figure[data-chart] svg"), box = svg.getBoundingClientRect();
      const place = {clientX: box.left + box.width / 2, clientY: box.top + 40};
      svg.dispatchEvent(new view.PointerEvent("pointermove", place));
    """
    dark = look_at(page, tmp_path, DESK, point)
    assert dark.console == []
    assert {light.ground, dark.ground} == {"rgb(255, 255, 255)", "rgb(13, 17, 23)"}
    assert light.ink != dark.ink
    assert light.tips == []
    assert re.match(r".* minutes of traffic(lru|chain) \+ all: \d+\.\d %", dark.tips[0]), dark.tips


@needs_chromium
@without_chromium
def test_what_is_wrong_in_a_page_is_found(tmp_path: Path) -> None:
    """By the looks of above: an error of a script, texts on each other."""
    page = page_of(a_report()).replace("</body>", "<script>undefined_function()</script></body>")
    page = page.replace("</svg>", '<text x="46" y="50">one</text><text x="48" y="52">two</text></svg>')
    seen = look_at(page, tmp_path, PHONE)
    assert any("undefined_function" in line for line in seen.console)
    assert ("one", "two") in overlapping(seen.drawings[-1])
