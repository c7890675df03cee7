"""Has the daemon's spans be children of the application's: the current one of OpenTelemetry's API, if it is sampled.

The API is not imported: where the application has not done so, there is no span. A ring has room for a few spans at a
time; each is written once, however many entries name it, and stays until these have completed.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from collections.abc import Iterable

from kvfuse.traceparent import SIZE, SpanPlace
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, SQE_STRUCT, Op

_API = "opentelemetry.trace"
_USER_DATA, _USER_DATA_OFFSET = struct.Struct("<Q"), 48
"""of an SQE, in bytes"""
_PARENT, _PARENT_OFFSET = struct.Struct("<I"), 60
_WITHOUT = (Op.CANCEL, Op.RELEASE)
"""operations that wait for nothing"""


def current_span() -> bytes:
    """The packed span of the calling thread or task; empty: there is none, or nobody keeps it."""
    api = sys.modules.get(_API)
    if api is None:
        return b""
    try:
        context = api.get_current_span().get_span_context()
        if context.is_valid and context.trace_flags.sampled:  # also one that has ended: work that it began goes on
            return SpanPlace(context.trace_id, context.span_id).pack()
    except (AttributeError, OverflowError):  # the API is being imported, or the span is of another kind
        pass
    return b""


class ParentSpans:
    """The spans that entries of one ring name. ``memory``: where they stand in the ring's."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._free = list(range(PARENTS_MAX, 0, -1))
        self._numbers: dict[bytes, int] = {}
        """span -> its number"""
        self._spans: dict[int, bytes] = {}
        self._users = Counter[int]()
        """number -> entries under way that name it"""
        self.of: dict[int, int] = {}
        """ticket -> number that its entry names"""

    def name(self, span: bytes, entries: memoryview, places: Iterable[int]) -> None:
        """Have prepared entries name their parent, by their places in the queue; where there is no room they do not."""
        number = self._numbers.get(span) or (self._free[-1] if self._free else 0)
        for place in places if number else ():
            start = place * SQE_STRUCT.size
            if entries[start] in _WITHOUT:
                continue
            (ticket,) = _USER_DATA.unpack_from(entries, start + _USER_DATA_OFFSET)
            _PARENT.pack_into(entries, start + _PARENT_OFFSET, number)
            self.of[ticket] = number
            self._users[number] += 1
        if number and self._users[number] and span not in self._numbers:
            self._memory[(number - 1) * SIZE : number * SIZE] = span
            self._free.pop()
            self._numbers[span], self._spans[number] = number, span

    def completed(self, tickets: Iterable[int]) -> None:
        """Entries have completed, whether they named a span or not."""
        for ticket in tickets:
            if (number := self.of.pop(ticket, 0)) == 0:
                continue
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number], self._numbers[self._spans.pop(number)]
                self._free.append(number)
