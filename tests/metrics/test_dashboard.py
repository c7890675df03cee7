"""The dashboard, the documentation and a real Prometheus, against the metrics that really exist."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from cli_lab import kvfuse as run
from metrics_lab import ask, listen_word, samples, scrape
from mounting import KvfuseMount, shared_conf, temporary_mount, wait_until
from places import ROOT
from posix_calls import opened
from prometheus_lab import Prometheus, needs_prometheus, prometheus

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

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


def reuse(mount: KvfuseMount) -> None:
    """Read what is there several times: gaps between uses are counted of one block in 16. Which folder has kept its
    blocks is the policy's choice."""
    found, keys = 0, [f"block{number}" for number in range(ROOM // BLOCK)]
    for folder in sorted(path.name for path in mount.point.iterdir() if path.is_dir() and path.name[0] != "."):
        with BlockStore(mount.point, folder) as store:
            for _ in range(3):
                found += sum(store.get(key) is not None for key in keys)
    assert found > 300


def commit(mount: KvfuseMount) -> None:
    with opened(mount.point, os.O_RDONLY) as folder:
        os.fsync(folder)


def series(port: int) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples(scrape(port))}


def test_every_metric_of_the_dashboard_exists(busy: tuple[KvfuseMount, int]) -> None:
    found = scrape(busy[1]).keys()  # families: those of a lease have no series here
    wanted = {re.sub("_(total|bucket|info)$", "", name) for name in NAME.findall(json.dumps(DASHBOARD))}
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


def plain(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def has_data(server: Prometheus, expression: str) -> bool:
    """Some series has a number: a quantile of no requests is none."""
    return any(math.isfinite(float(row["value"][1])) for row in server.query(plain(expression)))


@needs_prometheus
def test_a_real_prometheus_has_data_for_every_panel(
    busy: tuple[KvfuseMount, int], tmp_path: Path, etcd_alone: EtcdServers
) -> None:
    mount, port = busy
    word, shared_port = listen_word()
    with (
        temporary_mount([word], source=shared_conf(tmp_path, etcd_alone)),
        prometheus(tmp_path, port, shared_port) as server,
    ):
        wait_until(lambda: len(server.query('up{job="kvfuse"} == 1')) == 2, "the first scrapes")
        traffic(mount, "scraped")
        reuse(mount)
        done = server.scrapes()
        wait_until(lambda: server.scrapes() >= done + 3, "some scrapes")
        names = set(server.get("label/__name__/values"))
        assert set(NAME.findall(json.dumps(DASHBOARD))) <= names
        empty = [expression for expression in EXPRESSIONS if not has_data(server, expression)]
        assert empty == []
        assert all(float(row["value"][1]) < 1.0 for row in server.query("scrape_duration_seconds"))
