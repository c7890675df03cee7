"""Uses of blocks, for the books of caches: those that threads of rings see, and those that other hosts are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence


class Uses:
    """Uses of blocks, until the event loop takes them: many at once cost it little. `note` is for any thread."""

    NOTED_MAX = 1 << 14

    def __init__(self) -> None:
        self._noted: deque[tuple[int, Sequence[bytes], int | None]] = deque()

    def note(self, directory: int, names: Sequence[bytes], namespace: int | None = None) -> None:
        """Blocks of one request were read. Forgotten where nobody takes them for long.

        ``namespace``: theirs; None: that of the directory.
        """
        if len(self._noted) < self.NOTED_MAX:
            self._noted.append((directory, names, namespace))

    def __len__(self) -> int:
        """Requests."""
        return len(self._noted)

    def take(self) -> Iterable[tuple[int, Sequence[bytes], int | None]]:
        """What was noted since the last call."""
        while self._noted:
            yield self._noted.popleft()


class UsesElsewhere:
    """Uses of blocks that other hosts have on their books, until they are reported. For the event loop alone."""

    KEYS_MAX = 1 << 14
    """keys of one report; of more the oldest are dropped"""

    def __init__(self) -> None:
        self.is_there: Callable[[int, bytes], bool] | None = None
        """a name in a directory means something; None: all blocks are on this host's books"""
        self.dropped = 0
        """keys that were not reported, as there were too many"""
        self._chains: dict[tuple[int, tuple[int, ...]], None] = {}
        self._count = 0

    def note(self, namespace: int, keys: Sequence[int]) -> None:
        """Blocks of one request were used, in this order."""
        chain = namespace, tuple(keys[: self.KEYS_MAX])
        if not keys or chain in self._chains:
            return
        self._chains[chain] = None
        self._count += len(chain[1])
        self.dropped += len(keys) - len(chain[1])
        while self._count > self.KEYS_MAX:
            oldest = next(iter(self._chains))
            del self._chains[oldest]
            self._count -= len(oldest[1])
            self.dropped += len(oldest[1])

    def take(self) -> list[tuple[int, tuple[int, ...]]]:
        """(namespace, keys) of each request since the last call. No key is in it twice: its first use counts."""
        chains, seen = [], set[int]()
        for namespace, keys in self._chains:
            new = tuple([key for key in keys if key not in seen])
            seen.update(new)
            if new:
                chains.append((namespace, new))
        self._chains.clear()
        self._count = 0
        return chains
