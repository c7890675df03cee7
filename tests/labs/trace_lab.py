"""A collector of spans that decodes OTLP, and an application that has spans of its own."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


class Collector:
    """An OTLP receiver on loopback."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.facts: dict[str, str] = {}
        collector = self

        class Door(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = trace_service.ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    collector.facts |= {one.key: one.value.string_value for one in resource.resource.attributes}
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def of(self, trace_id: int) -> list[Any]:
        """Spans of that trace, in the order in which they began."""
        found = [span for span in self.spans if int.from_bytes(span.trace_id, "big") == trace_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def below(self, parent: Any) -> list[str]:
        """Names of spans of its trace that are below it."""
        found, ids = [], {parent.span_id}
        mates = sorted(
            (span for span in self.spans if span.trace_id == parent.trace_id),
            key=lambda span: span.start_time_unix_nano,
        )
        for span in mates:
            if span.parent_span_id in ids:
                ids.add(span.span_id)
                found.append(span.name)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def attributes(span: Any) -> dict[str, int | str]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}
