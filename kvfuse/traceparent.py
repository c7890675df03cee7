"""The span that a request belongs to, as it goes from a client to the daemon, and from host to host.

It is the `traceparent` of W3C's Trace Context in binary: whoever gets one makes its own span a child of that. Nothing
here needs OpenTelemetry; `kvfuse.cli.tracing` does, and sets `TRACES`. Without it nothing is sent and nothing is read.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

_ROW = struct.Struct("<16s 8s B 7x")
"""trace, span (both as W3C writes them, the highest byte first), flags"""
SIZE = _ROW.size
SAMPLED = 1
"""flag: whoever made the span keeps it"""
RING_CLIENT = "a ring's client"
"""who names a parent, as the log says it"""

log = logging.getLogger(__name__)

assert SIZE == 32


class SpanPlace(NamedTuple):
    """Where a span stands: its trace, and its number in that."""

    trace_id: int
    span_id: int

    def pack(self) -> bytes:
        """Its `SIZE` bytes; the span is kept."""
        return _ROW.pack(self.trace_id.to_bytes(16, "big"), self.span_id.to_bytes(8, "big"), SAMPLED)


NoteSpan = Callable[[str, SpanPlace, int, int, Mapping[str, int | str]], None]
"""Makes a span of something that is over: name, parent, begin and end in ns since 1970, attributes."""


@dataclass
class Traces:
    """What this daemon does about spans. Any thread."""

    is_on: bool = False
    """it makes spans, heeds parents and tells other hosts of its own"""
    note: NoteSpan = lambda *_: None
    malformed: int = 0
    """parents that were ignored"""

    def begin(self, note: NoteSpan) -> None:
        self.is_on, self.note = True, note

    def end(self) -> None:
        self.is_on = False

    def parse(self, row: bytes, sender: str) -> SpanPlace | None:
        """The parent that ``sender`` gives; None: none that is kept, or it is malformed, which is logged once."""
        if not row:
            return None
        if len(row) == SIZE:
            trace, span, flags = _ROW.unpack(row)
            if any(trace) and any(span) and not any(row[25:]):
                return SpanPlace(int.from_bytes(trace, "big"), int.from_bytes(span, "big")) if flags & SAMPLED else None
        self.malformed += 1
        if self.malformed == 1:
            log.warning("%s names a parent span that is malformed: it is ignored, as are others from here on", sender)
        return None


TRACES = Traces()
SPAN: ContextVar[bytes] = ContextVar("span", default=b"")
"""the packed span of what this task does; empty: it has none"""
HEARD: ContextVar[bytes] = ContextVar("heard", default=b"")
"""the packed parent that another host gave with the question that this task answers"""
