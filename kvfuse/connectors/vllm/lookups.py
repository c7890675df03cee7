"""Which blocks are there, asked ahead of need in a thread of its own. See `Lookups`."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Asked:
    """One key, as long as a request needs the answer."""

    asked_at: float
    request: str
    """the first that asked"""
    found: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Answers about keys: True, False, or None while nobody knows. Nothing here waits but `close`.

    Keys are gathered by `lookup` and asked about together from `flush` on. An answer holds until the requests that
    asked for it are forgotten; one that does not come within ``deadline`` seconds is False.
    """

    def __init__(self, find: Callable[[list[bytes], str], Sequence[bool]], deadline: float) -> None:
        """``find``: asks about the keys of one request, in the order in which they would be loaded; may wait."""
        self._find = find
        self._deadline = deadline
        self._asked: dict[bytes, _Asked] = {}
        self._keys: defaultdict[str, set[bytes]] = defaultdict(set)
        """by request"""
        self._gathered: list[tuple[bytes, _Asked]] = []
        self._batches: queue.SimpleQueue[list[tuple[bytes, _Asked]] | Callable[[], object] | None] = queue.SimpleQueue()
        self.late = 0
        """keys whose answer did not come in time"""
        self._thread = threading.Thread(target=self._answer, name="kvfuse-lookup", daemon=True)
        self._thread.start()

    def lookup(self, key: bytes, request: str) -> bool | None:
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(monotonic(), request)
            self._gathered.append((key, asked))
        asked.requests.add(request)
        self._keys[request].add(key)
        if asked.found is None and monotonic() > asked.asked_at + self._deadline:
            asked.found = False
            self.late += 1
        return asked.found

    def flush(self) -> None:
        """Have the thread ask about all keys gathered since."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._batches.put(gathered)

    def miss(self, keys: Iterable[bytes]) -> None:
        """They could not be loaded: requests that look again do without them."""
        for key in keys:
            if (asked := self._asked.get(key)) is not None:
                asked.found = False

    def forget(self, request: str) -> None:
        for key in self._keys.pop(request, ()):
            asked = self._asked[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[key]

    def run(self, call: Callable[[], object]) -> None:
        """Have the thread call it, after what it has to ask by now. For what nobody waits for."""
        self._batches.put(call)

    def close(self) -> None:
        self._batches.put(None)
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------

    def _answer(self) -> None:
        while (batch := self._batches.get()) is not None:
            if callable(batch):
                batch()
                continue
            by_request: defaultdict[str, list[tuple[bytes, _Asked]]] = defaultdict(list)
            for row in batch:
                by_request[row[1].request].append(row)
            for request, rows in by_request.items():
                self._answer_request(request, rows)

    def _answer_request(self, request: str, rows: Collection[tuple[bytes, _Asked]]) -> None:
        wanted = [(key, asked) for key, asked in rows if asked.found is None and asked.requests]
        if not wanted:
            return
        try:
            found = self._find([key for key, _ in wanted], request)
        except Exception:  # whatever it is, the scheduler goes on: all are misses
            log.exception("%d keys could not be looked up", len(wanted))
            found = [False] * len(wanted)
        for (_, asked), is_found in zip(wanted, found, strict=True):
            if asked.found is None:  # neither late nor missed meanwhile
                asked.found = bool(is_found)
