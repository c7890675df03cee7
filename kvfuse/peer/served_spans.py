"""Spans of questions for blocks that threads without the interpreter have answered: they note them, this makes them."""

from __future__ import annotations

import numpy as np
import trio

from kvfuse.native._peers import Server
from kvfuse.traceparent import SIZE, TRACES

SERVED_SPAN = np.dtype(
    [
        ("parent", f"V{SIZE}"),
        ("client", "<u8"),
        ("begin", "<u8"),  # ns since 1970
        ("end", "<u8"),
        ("bytes", "<u8"),
        ("rows", "<u4"),
        ("here", "<u4"),
    ]
)
"""as native/peerserver.h notes it"""

assert SERVED_SPAN.itemsize == SIZE + 40


async def note_spans(server: Server) -> None:
    """Make spans of questions that named a parent, until cancelled."""
    bell = server.trace()
    while True:
        await trio.lowlevel.wait_readable(bell)
        for row in np.frombuffer(server.take_spans(), SERVED_SPAN):
            client = f"{int(row['client']):016x}"
            if (parent := TRACES.parse(row["parent"].tobytes(), f"host {client}")) is None:
                continue
            facts: dict[str, int | str] = {"kvfuse.client": client, "kvfuse.items": int(row["rows"])}
            facts |= {"kvfuse.found": int(row["here"]), "kvfuse.bytes": int(row["bytes"])}
            TRACES.note("peer answer_blocks", parent, int(row["begin"]), int(row["end"]), facts)
