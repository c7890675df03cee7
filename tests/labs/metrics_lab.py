"""A client of the metrics door."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvfuse.metrics.server import OPEN_METRICS
from kvfuse_cluster.process import free_ports


def listen_word() -> tuple[str, int]:
    """An -o word for a free port, and the port."""
    (port,) = free_ports(1)
    return f"metrics.listen=127.0.0.1:{port}", port


def ask(port: int, path: str = "/metrics", method: str = "GET", accept: str = OPEN_METRICS) -> tuple[int, str, str]:
    """(status, content type, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> dict[str, Metric]:
    """The families of one scrape, by name; strictly parsed."""
    status, content_type, body = ask(port)
    assert (status, content_type.partition(";")[0]) == (200, "application/openmetrics-text")
    return parse(body)


def parse(text: str) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def samples(families: dict[str, Metric]) -> Iterator[Sample]:
    for family in families.values():
        yield from family.samples


def value(families: dict[str, Metric], name: str, **labels: str) -> Any:
    """Of the one sample that has this name and these labels, at least."""
    (found,) = [
        sample.value for sample in samples(families) if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found
