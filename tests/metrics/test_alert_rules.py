"""The alert rules: promtool takes them, each fires in its case of kvfuse.test.yml, and its runbook exists."""

from __future__ import annotations

import re
import subprocess

from places import ROOT
from prometheus_lab import RULES, hasten, needs_prometheus

CASES = RULES.with_name("kvfuse.test.yml")
METRIC = re.compile(r"\bkvfuse_[a-z_]+\b")
SUFFIXES = re.compile("_(total|bucket|sum|count|info)$")


def rules() -> dict[str, str]:
    """Alert -> its text."""
    parts = re.split(r"^ +- alert: (\w+)\n", RULES.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def promtool(*words: str) -> str:
    done = subprocess.run(["promtool", *words], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_prometheus
def test_promtool_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES.name)


@needs_prometheus
def test_each_alert_fires_once_in_its_case() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES.name)
    assert set(re.findall(r'alertname="(\w+)"', CASES.read_text())) == rules().keys()


def test_each_alert_says_what_is_wrong_and_has_a_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert sections == sorted(sections, key=list(rules()).index), "the order of the rules"
    assert set(sections) == rules().keys()
    for name, text in rules().items():
        assert re.search(r"severity: (critical|warning|info)\n", text), name
        assert re.search(r'summary: ".+"\n', text), name
        assert re.search(r'description: ".+"\n', text), name
        assert f"runbook_url: docs/alerts.md#{name.lower()}\n" in text, name


def test_rules_are_about_metrics_that_exist() -> None:
    """docs/metrics.md names all: see test_dashboard."""
    first_cells = " ".join(re.findall(r"^\| (`kvfuse_[^|]+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    documented = {SUFFIXES.sub("", name) for name in METRIC.findall(first_cells)}
    named = {SUFFIXES.sub("", name) for name in METRIC.findall(RULES.read_text())}
    assert len(named) > 15
    assert named <= documented


def test_hastened_rules_keep_all_but_times() -> None:
    text = RULES.read_text()
    assert "for: " not in hasten(text)
    assert re.sub(r"\[\w+\]|\n +for: .*", "", hasten(text)) == re.sub(r"\[\w+\]|\n +for: .*", "", text)
