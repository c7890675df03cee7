"""Spans of a real mount, received by a server that decodes OTLP; and that nothing is paid where they are off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import kvfuse
from mounting import shared_conf, temporary_mount, wait_until
from ring_calls import done
from trace_lab import Collector, collecting

from kvfuse.usrbio.client import connect
from kvfuse_cluster.etcd import EtcdServers

WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from kvfuse.cli import main
main()
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_requests_and_what_they_wait_for_are_spans(
    collector: Collector, etcd_alone: EtcdServers, tmp_path: Path
) -> None:
    words = [f"trace.endpoint={collector.endpoint},trace.ratio=1"]
    conf = shared_conf(tmp_path, etcd_alone)
    with temporary_mount(source=conf) as before:
        (before.point / "kept").write_bytes(bytes(300_000))
    with temporary_mount(words, source=conf) as mount:
        (mount.point / "folder").mkdir()
        assert len((mount.point / "kept").read_bytes()) == 300_000
        with connect(mount.point) as client, client.ring(8) as ring, client.file(mount.point / "kept", "rw") as file:
            ring.prep_fsync(file)
            done(ring)
        point = str(mount.point)
        wait_until(lambda: bool(collector.named("ring call") and collector.named("fuse mkdir")), "spans")
    assert collector.facts["service.name"] == "kvfuse"
    assert collector.facts["kvfuse.mount"] == point
    (made,) = collector.named("fuse mkdir")
    requests = {one.key: one.value.string_value for one in made.attributes}
    assert requests["kvfuse.request"].startswith("mkdir ")
    assert made.end_time_unix_nano > made.start_time_unix_nano
    assert "records commit" in {span.name for span in collector.spans}
    assert any("records get" in collector.below(span) for span in collector.spans if span.name.startswith("fuse "))
    assert any("segments read" in collector.below(span) for span in collector.named("fuse read"))
    assert not any("kept" in str(span) or "folder" in str(span) for span in collector.spans), "no names of files"


def test_a_share_of_requests_is_traced(collector: Collector) -> None:
    with temporary_mount([f"capacity=64MiB,trace.endpoint={collector.endpoint},trace.ratio=0.2"]) as mount:
        for number in range(300):
            (mount.point / f"folder{number}").mkdir()
    count = len(collector.named("fuse mkdir"))
    assert 20 < count < 120, count


def test_a_collector_that_is_away_costs_no_request() -> None:
    with temporary_mount(["capacity=64MiB,trace.endpoint=http://127.0.0.1:1/v1/traces,trace.ratio=1"]) as mount:
        for number in range(50):
            (mount.point / f"folder{number}").mkdir()
        assert len(os.listdir(mount.point)) == 50


def test_nothing_is_imported_where_it_is_off() -> None:
    with temporary_mount(["capacity=64MiB"], (sys.executable, "-c", WITHOUT, "mount", "--foreground")) as mount:
        (mount.point / "folder").mkdir()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, "mount", "--foreground", tmp_path / "volume", tmp_path]
    command += ["-o", "capacity=64MiB,outlive=false,trace.endpoint=http://127.0.0.1:1/"]
    refused = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "trace.endpoint needs the Python package 'opentelemetry" in refused.stderr
    assert "pip install opentelemetry-sdk" in refused.stderr


def test_what_is_no_url_is_refused(tmp_path: Path) -> None:
    refused = kvfuse("config", tmp_path, "-o", "trace.endpoint=127.0.0.1:4318")
    assert refused.returncode == 2
    assert "expected a URL" in refused.stderr
