// The theme button, and the values below the pointer or finger in charts of lines.
"use strict";
const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

const charts = JSON.parse(document.getElementById("report").textContent).charts;
document.querySelectorAll("figure[data-chart]").forEach((figure) => {
  const chart = charts[Number(figure.dataset.chart)];
  const lines = Object.entries(chart.lines).filter(([, points]) => points.length);
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), cross = figure.querySelector(".cross");
  if (!lines.length || !cross) return;
  const xs = lines.flatMap(([, points]) => points.map(([x]) => x));
  const scale = (x) => (chart.is_log ? Math.log(Math.max(x, 1)) : x);
  const low = scale(Math.min(...xs)), high = scale(Math.max(...xs)), left = Number(cross.dataset.left), right = Number(cross.dataset.right);
  const shown = (y) => (chart.is_share ? (100 * y).toFixed(1) + " %" : Math.round(y).toLocaleString());
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const part = ((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width - left) / (right - left);
    const at = low + Math.min(Math.max(part, 0), 1) * (high - low);
    const near = (points) => points.reduce((best, one) => (Math.abs(scale(one[0]) - at) < Math.abs(scale(best[0]) - at) ? one : best));
    const x = near(lines[0][1])[0], place = left + (right - left) * (scale(x) - low) / (high - low || 1);
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    cross.style.display = "inline";
    const head = Number(x.toPrecision(4)).toLocaleString() + " " + chart.across;
    tip.replaceChildren(...[head, ...lines.map(([name, points]) => name + ": " + shown(near(points)[1]))].map((text) => {
      const line = document.createElement("div");
      line.textContent = text;
      return line;
    }));
    tip.style.display = "block";
    tip.style.top = "40px";
    tip.style.left = Math.max(4, Math.min(event.clientX - figure.getBoundingClientRect().left + 12, figure.clientWidth - tip.offsetWidth - 4)) + "px";
  };
  const hide = () => { tip.style.display = cross.style.display = "none"; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
});
