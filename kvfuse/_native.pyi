"""See blockindex.py. Buffers are numpy arrays, contiguous."""

from collections.abc import Sequence
from typing import Any

def fingerprints(multipliers: Any, keys: Sequence[bytes], out: Any) -> None: ...
def find(table: Any, keys: Sequence[bytes], numbers: Any) -> None: ...
def get(
    table: Any, keys: Sequence[bytes], arenas: Any, targets: Any, rooms: Any, numbers: Any, results: Any
) -> None: ...
