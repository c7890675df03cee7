"""What a namespace has of each model and salt, by whichever server it was stored. See `StoredObjects`."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from lmcache.logging import init_logger
from lmcache.v1.distributed import api

from kvfuse.connectors.lmcache import identity
from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.usrbio.client import PutHints, file_name

log = init_logger(__name__)

NOTE = b"kind."
NOTE_SIZE = 1024
NOTED_S = 60.0
"""after which it is looked whether a note is still there"""
LISTED_S = 10.0
"""for which a listing counts; or, of many names, `LISTED_TIMES` as long as it took"""
LISTED_TIMES = 20
LAST_TO_GO = PutHints(priority=127)


class Kind(NamedTuple):
    """What objects with the same mark have in common."""

    model: str
    rank: int
    group: int
    salt: str
    size: int
    """bytes of each"""


class StoredObjects:
    """Blocks have names of a hash and the mark of a kind, and for each kind there is a block that says what it is.

    Servers leave these notes when they store. Objects whose note is not there yet count for nobody. Safe to use from
    any number of threads.
    """

    def __init__(self, store: SteadyStore, folder: str, deadline: float) -> None:
        """``folder``: of the namespace, in the mount. ``deadline``: seconds that a listing may take."""
        self._store, self._folder, self._deadline = store, folder, deadline
        self._notes = store.register(np.zeros(NOTE_SIZE, np.uint8))
        self._lock = threading.Lock()
        """of the memory of notes"""
        self._looked: dict[bytes, float] = {}
        self._kinds: dict[bytes, Kind] = {}
        self._thread = ThreadPoolExecutor(1, "kvfuse-list")
        self._listing: Future[tuple[float, list[str]]] | None = None

    # -- what servers store --------------------------------------------------------------------------

    def note(self, keys: Sequence[Any], sizes: Sequence[int]) -> None:
        """Leave a note for each kind of objects that were stored, where there is none."""
        kinds = {identity.kind_mark(*kind): (*kind, size) for kind, size in zip(map(identity.kind_of, keys), sizes)}  # noqa: B905
        now = monotonic()
        due = [mark for mark in kinds if self._looked.get(mark, 0) <= now]
        if not due:
            return
        there = self._store.exists([NOTE + mark for mark in due]).tolist()
        for mark, is_there in zip(due, there, strict=True):
            if is_there or self._put_note(mark, Kind(*kinds[mark])):
                self._looked[mark] = now + NOTED_S

    def _put_note(self, mark: bytes, kind: Kind) -> bool:
        text = json.dumps(kind._asdict()).encode()
        if len(text) > NOTE_SIZE:
            return True
        with self._lock:
            self._notes.array[: len(text)] = np.frombuffer(text, np.uint8)
            return bool(self._store.put([NOTE + mark], self._notes, [0], [len(text)], hints=LAST_TO_GO)[0])

    # -- what there is -------------------------------------------------------------------------------

    def bytes_by_salt(self) -> dict[str, int]:
        """Of all servers together, some seconds ago at most."""
        found: Counter[str] = Counter()
        for mark, count in Counter(name.partition(".")[2] for name in self._names()).items():
            if (kind := self._kind(mark.encode())) is not None:
                found[kind.salt] += count * kind.size
        return dict(found)

    def page(self, model: str | None, size: int, cursor: str | None) -> Any:
        """A ``KeyListPage``. ``cursor``: the last name of the page before. ValueError: there is no such page."""
        if size <= 0:
            raise ValueError(f"a page has {size} keys; ask for 1 or more")
        if cursor is not None and "." not in cursor:
            raise ValueError(f"{cursor!r} is no cursor: take it from the page before")
        entries: list[Any] = []
        names, last = self._names(), None
        start = bisect_right(names, cursor) if cursor is not None else 0
        for name, kind in self._of_model(names[start:], model):
            if len(entries) == size:
                return api.KeyListPage(tuple(entries), last)
            key = api.EncodedObjectKey(name.partition(".")[0], *kind[:4])
            entries.append(api.KeyEntry(key, kind.size))
            last = name
        return api.KeyListPage(tuple(entries), None)

    def changed(self) -> None:
        """Objects were deleted: list anew."""
        self._listing = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- how -----------------------------------------------------------------------------------------

    def _of_model(self, names: Sequence[str], model: str | None) -> Iterator[tuple[str, Kind]]:
        for name in names:
            kind = self._kind(name.partition(".")[2].encode())
            if kind is not None and model in (None, kind.model):
                yield name, kind

    def _names(self) -> list[str]:
        """Of blocks, sorted; none where there is no mount, or it does not answer in time."""
        with suppress(Exception):  # it is late, or there is no mount
            listing = self._listing or self._list()
            until, names = listing.result(self._deadline)
            if until <= monotonic():
                until, names = self._list().result(self._deadline)
            return names
        self._listing = None
        return []

    def _list(self) -> Future[tuple[float, list[str]]]:
        prefix = os.fsdecode(file_name(NOTE))

        def names() -> tuple[float, list[str]]:
            """And until when they count."""
            began = monotonic()
            found = sorted(name for name in os.listdir(self._folder) if not name.startswith(prefix))
            return (ended := monotonic()) + max(LISTED_S, LISTED_TIMES * (ended - began)), found

        self._listing = self._thread.submit(names)
        return self._listing

    def _kind(self, mark: bytes) -> Kind | None:
        known = self._kinds.get(mark)
        if known is None and len(mark) == 2 * identity.MARK_SIZE:
            with self._lock:
                (size,) = self._store.get([NOTE + mark], self._notes, [0], [NOTE_SIZE]).tolist()
                text = self._notes.part(0, max(size, 0)).tobytes()
            if text:
                known = self._kinds[mark] = _read(text)
        return known


def _read(text: bytes) -> Kind:
    facts: Mapping[str, Any] = json.loads(text)
    return Kind(**{name: facts[name] for name in Kind._fields})
