"""A real Prometheus on loopback, which scrapes metrics of mounts and judges alert rules."""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from kvfuse_cluster.process import Server, free_ports

RULES = ROOT / "deploy" / "alerts" / "kvfuse.rules.yml"
JOB = "kvfuse"
WINDOWS = {"5m": "10s", "10m": "10s", "15m": "15s", "30m": "10s", "1h": "30s", "1d": "2m"}
"""window of a rule -> a window for tests"""

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the Debian package prometheus")


class Prometheus:
    """The API of a server on loopback."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=10) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        return content["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found

    def scrapes(self) -> int:
        """Successful scrapes of the target that has most of them."""
        rows = self.query("count_over_time(kvfuse_commits_total[1h])")
        return max((int(row["value"][1]) for row in rows), default=0)

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Alert -> the annotations of each firing instance."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self.get("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["annotations"])
        return found


def hasten(rules: str) -> str:
    """Rules that fire at once and look back for seconds; all else is as in ``rules``."""
    rules = re.sub(r"^ +for: .*\n", "", rules, flags=re.MULTILINE)
    return re.sub(r"\[(\w+)\]", lambda found: f"[{WINDOWS[found[1]]}]", rules)


@contextmanager
def prometheus(folder: Path, *ports: int, with_rules: bool = False) -> Iterator[Prometheus]:
    """A server that scrapes the metrics of ``ports`` each second; ``with_rules``: and judges the hastened rules."""
    (own,) = free_ports(1)
    targets = [f"127.0.0.1:{port}" for port in ports]
    settings: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": targets}]}],
    }
    if with_rules:
        (folder / "rules.yml").write_text(hasten(RULES.read_text()))
        settings["rule_files"] = [f"{folder}/rules.yml"]
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML, too
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    server = Server(folder, "prometheus", [*command, f"--web.listen-address=127.0.0.1:{own}"])
    found = Prometheus(own)
    try:
        server.start(found.is_ready)
        yield found
    finally:
        server.stop()
