"""Uses of blocks that threads of rings see, for the caches' books, which the event loop keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class Uses:
    """Uses of blocks that other threads saw, until the event loop takes them. `note` is for any thread."""

    NOTED_MAX = 1 << 14

    def __init__(self) -> None:
        self._noted: deque[tuple[int, Sequence[bytes]]] = deque()

    def note(self, directory: int, names: Sequence[bytes]) -> None:
        """Blocks of one request were read. Forgotten where nobody takes them for long."""
        if len(self._noted) < self.NOTED_MAX:
            self._noted.append((directory, names))

    def take(self) -> Iterable[tuple[int, Sequence[bytes]]]:
        """What was noted since the last call."""
        while self._noted:
            yield self._noted.popleft()
