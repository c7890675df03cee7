"""See rowwriter.py, rowcopier.py and rowreceiver.py. Buffers are numpy arrays, contiguous."""

from typing import Any

COPIES: int
"""whether `copy_rows` may be called"""

def write_rows(rows: Any) -> tuple[int, int]: ...
def copy_rows(rows: Any) -> bytes: ...
