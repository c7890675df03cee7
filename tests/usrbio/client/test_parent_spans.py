"""Places of spans in a ring: one for each span, as long as an entry names it, and none where there is no room."""

from __future__ import annotations

import random

from kvfuse.traceparent import SIZE, SpanPlace
from kvfuse.usrbio.client.parent_spans import ParentSpans
from kvfuse.usrbio.protocol.wire import PARENTS_MAX, SQE_STRUCT, Op

ENTRIES = 256


def place(entries: memoryview, number: int, op: Op, ticket: int) -> None:
    SQE_STRUCT.pack_into(entries, number * SQE_STRUCT.size, op, 0, 0, 0, 0, 0, 0, 0, 0, 0, ticket, 0, 0)


def parent_of(entries: memoryview, number: int) -> int:
    return int(SQE_STRUCT.unpack_from(entries, number * SQE_STRUCT.size)[-1])


def test_spans_keep_their_places_while_entries_name_them(rng: random.Random) -> None:
    """Against a model, with more spans than there is room for."""
    memory = memoryview(bytearray(PARENTS_MAX * SIZE))
    entries = memoryview(bytearray(ENTRIES * SQE_STRUCT.size))
    parents, free = ParentSpans(memory), list(range(ENTRIES))
    under_way: dict[int, bytes] = {}
    refused = 0
    for _ in range(3000):
        if free and rng.random() < 0.55:
            span = SpanPlace(rng.randrange(1, 150), 7).pack()
            tickets = [free.pop() for _ in range(min(len(free), rng.randint(1, 3)))]
            ops = [rng.choice((Op.GET, Op.PUT, Op.CANCEL)) for _ in tickets]
            for number, (ticket, op) in enumerate(zip(tickets, ops, strict=True)):
                place(entries, number, op, ticket)
            parents.name(span, entries, range(len(tickets)))
            for number, (ticket, op) in enumerate(zip(tickets, ops, strict=True)):
                parent = parent_of(entries, number)
                assert parent == parents.of.get(ticket, 0)
                has_room = span in under_way.values() or len(set(under_way.values()) - {b""}) < PARENTS_MAX
                assert (parent > 0) == (op is not Op.CANCEL and has_room)
                refused += op is not Op.CANCEL and not has_room
                under_way[ticket] = span if parent else b""
        elif under_way:
            tickets = rng.sample(sorted(under_way), rng.randint(1, min(3, len(under_way))))
            parents.completed(tickets)
            for ticket in tickets:
                del under_way[ticket]
            free += tickets
        for ticket, span in under_way.items():
            if span:
                start = (parents.of[ticket] - 1) * SIZE
                assert bytes(memory[start : start + SIZE]) == span
    assert refused
    parents.completed(under_way)
    assert not parents.of
    assert len(parents._free) == PARENTS_MAX
