"""See rowwriter.py, rowreceiver.py and messagefields.py. Buffers are numpy arrays, contiguous."""

from typing import Any

CHECKSUMS: int
"""whether `receive_rows` may be called"""

def write_rows(rows: Any) -> tuple[int, int]: ...
def receive_rows(descriptor: int, rows: Any, first: int, budget: int) -> tuple[int, int, int]: ...
def fields(data: bytes) -> list[tuple[int, int | bytes]] | None: ...
