"""The dashboard, the documentation and a real Prometheus, against the metrics that really exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cli_lab import kvfuse as run
from metrics_lab import ask, listen_word, samples, scrape
from mounting import KvfuseMount, temporary_mount, wait_until
from places import ROOT
from posix_calls import opened

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.process import Server, free_ports

DASHBOARD = json.loads(resources.files("kvfuse").joinpath("data/grafana.json").read_text("utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"\b(?:kvfuse|process)_[a-z_]+\b")
MISSES = "absent", "evicted", "expired", "cleared", "slow", "deadline", "corrupt", "engine", "refused"
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$cache": ".*", "$job": ".*"}
BLOCK = 64 << 10
ROOM = 64 << 20
PART = 64
NAMESPACE_SERIES_MAX = 150
"""series that a namespace may have: a dozen plain ones, and the buckets of seven histograms"""

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the Debian package prometheus")


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[KvfuseMount, int]]:
    """A mount with traffic through every door, and the port of its metrics."""
    word, port = listen_word()
    with temporary_mount([word, f"capacity={ROOM},kind=blocks,admission=all"]) as mount:
        for name, capacity in (("model-a", "16MiB"), ("model-b", "8MiB")):
            made = run("namespace", "create", mount.point / name, "--kind", "blocks", "--capacity", capacity)
            assert made.returncode == 0, made.stderr
        for folder in ("first", "model-a"):
            traffic(mount, folder)
        yield mount, port


def traffic(mount: KvfuseMount, folder: str) -> None:
    """By files and by a ring, more than there is room for: found, not found, and evicted."""
    for number in range(40):
        path = mount.point / folder / f"file{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(BLOCK))
        assert len(path.read_bytes()) == BLOCK
    with BlockStore(mount.point, folder) as store:
        keys = [f"block{number}" for number in range(ROOM // BLOCK)]
        assert store.longest_prefix(keys) == 0
        for start in range(0, len(keys), PART):
            store.put_many(keys[start : start + PART], [bytes(BLOCK)] * PART)
            commit(mount)
        assert any(store.get(key) is not None for key in keys)
        store.exists(keys)


def commit(mount: KvfuseMount) -> None:
    with opened(mount.point, os.O_RDONLY) as folder:
        os.fsync(folder)


def series(port: int) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples(scrape(port))}


def test_every_metric_of_the_dashboard_exists(busy: tuple[KvfuseMount, int]) -> None:
    found = {name for name, _ in series(busy[1])}
    wanted = set(NAME.findall(json.dumps(DASHBOARD)))
    assert len(wanted) > 25
    assert wanted <= found


def test_every_metric_is_documented(busy: tuple[KvfuseMount, int]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    families = {name for name in scrape(busy[1]) if name.startswith("kvfuse")}
    first_cells = " ".join(re.findall(r"^\| (`kvfuse_[^|]+)", text, re.MULTILINE))
    documented = {re.sub("_(total|info)$", "", name) for name in re.findall(r"`(kvfuse_[a-z_]+)`", first_cells)}
    assert documented == families


def test_more_files_and_clients_make_no_more_series(busy: tuple[KvfuseMount, int]) -> None:
    mount, port = busy
    before = series(port)
    for turn in range(3):
        traffic(mount, f"folder{turn}")
    assert series(port) ^ before == set()
    of_each = Counter(dict(labels).get("cache") for _, labels in before)
    assert set(of_each) == {None, "/", "/model-a", "/model-b"}
    assert max(of_each.values()) <= NAMESPACE_SERIES_MAX
    requested = [dict(labels) for name, labels in before if name == "kvfuse_blocks_requested_total"]
    results = {(labels["tier"], labels["result"]) for labels in requested}
    assert results == {
        *((tier, "hit") for tier in ("dram", "disk", "remote")),
        *(("none", result) for result in MISSES),
    }
    assert len(requested) == 3 * len(results)


@needs_prometheus
def test_the_exposition_follows_the_rules_of_prometheus(busy: tuple[KvfuseMount, int]) -> None:
    text = ask(busy[1], accept="text/plain")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Prometheus]:
    """A server that scrapes the metrics of ``port``."""
    (own,) = free_ports(1)
    scraped = {"job_name": "kvfuse", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML, too
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    server = Server(folder, "prometheus", [*command, f"--web.listen-address=127.0.0.1:{own}"])
    found = Prometheus(own)
    try:
        server.start(found.is_ready)
        yield found
    finally:
        server.stop()


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
        (count,) = [int(row["value"][1]) for row in self.query("count_over_time(kvfuse_commits_total[1h])")] or [0]
        return count


def plain(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


@needs_prometheus
def test_a_real_prometheus_answers_every_question_of_the_dashboard(
    busy: tuple[KvfuseMount, int], tmp_path: Path
) -> None:
    mount, port = busy
    with prometheus(tmp_path, port) as server:
        wait_until(lambda: bool(server.query('up{job="kvfuse"} == 1')), "the first scrape")
        traffic(mount, "scraped")
        wait_until(lambda: server.scrapes() >= 3, "some scrapes")
        names = set(server.get("label/__name__/values"))
        assert set(NAME.findall(json.dumps(DASHBOARD))) <= names
        empty = [expression for expression in EXPRESSIONS if not server.query(plain(expression))]
        assert empty == []
        (took,) = server.query("scrape_duration_seconds")
        assert float(took["value"][1]) < 1.0
