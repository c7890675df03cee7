"""A real browser looks at a page: what it drew, as its own script tells it, and what its console says."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rings import require_lab

CHROMIUM = shutil.which("chromium")
SECONDS_MAX = 100

# In the frame that has the page: all texts and marks of each drawing, and how wide everything is.
_LOOK = """
const frame = document.getElementById("page");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, seen = [];
  const box = (element) => {
    const {left, top, right, bottom} = element.getBoundingClientRect();
    return {left, top, right, bottom, text: element.textContent};
  };
  ACT(page, frame.contentWindow);
  page.querySelectorAll("svg").forEach((svg) => seen.push({
    box: box(svg),
    texts: [...svg.querySelectorAll("text")].map(box),
    marks: [...svg.querySelectorAll(".mark,.line,.area")].map(box),
    font: Math.min(...[...svg.querySelectorAll("text")].map((one) => one.getBoundingClientRect().height)),
  }));
  const style = frame.contentWindow.getComputedStyle(page.body);
  document.getElementById("seen").textContent = JSON.stringify({
    drawings: seen, width: page.documentElement.scrollWidth, ground: style.backgroundColor, ink: style.color,
    tips: [...page.querySelectorAll(".tip")].filter((tip) => tip.style.display === "block")
      .map((tip) => tip.textContent),
  });
});
"""


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float
    text: str

    def overlaps(self, other: Box) -> bool:
        """By more than half a pixel."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 0.5 and min(self.bottom, other.bottom) - max(self.top, other.top) > 0.5


@dataclass(frozen=True)
class Drawing:
    box: Box
    texts: list[Box]
    marks: list[Box]
    font: float
    """height of the smallest text, in pixels"""


@dataclass(frozen=True)
class Seen:
    drawings: list[Drawing]
    width: float
    """that the page needs"""
    ground: str
    ink: str
    tips: list[str]
    console: list[str]


def look_at(page: str, folder: Path, width: int, act: str = "") -> Seen:
    """The page in a frame of ``width`` pixels, after the script ``act`` did something with ``page`` and ``view``."""
    require_lab("chromium")
    assert CHROMIUM is not None
    script = _LOOK.replace(
        "ACT(page, frame.contentWindow);", f"((page, view) => {{{act}}})(page, frame.contentWindow);"
    )
    frame = f'<iframe id="page" style="width:{width}px;height:4000px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f'<!doctype html><meta charset="utf-8">{frame}<pre id="seen"></pre><script>{script}</script>')
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width + 60},4200",
        "--virtual-time-budget=5000",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", wrapper.as_uri()], capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found is not None, done.stdout[-2000:]
    seen = json.loads(html.unescape(found[1]))
    drawings = [
        Drawing(
            Box(**one["box"]), [Box(**box) for box in one["texts"]], [Box(**box) for box in one["marks"]], one["font"]
        )
        for one in seen.pop("drawings")
    ]
    return Seen(drawings, **seen, console=[line for line in done.stderr.splitlines() if ":CONSOLE" in line])
