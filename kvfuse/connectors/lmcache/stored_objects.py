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
from functools import cached_property
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from lmcache.logging import init_logger
from lmcache.v1.distributed import api

from kvfuse.connectors.lmcache import identity
from kvfuse.connectors.steady_store import Region, SteadyStore
from kvfuse.usrbio.client import Follower, NewsKind

log = init_logger(__name__)

NOTE_SIZE = 1024
NOTED_S = 60.0
"""after which it is looked whether a note is still there"""
LISTED_S = 10.0
"""for which a listing counts; or, of many names, `LISTED_TIMES` as long as it took"""
LISTED_TIMES = 20


class Kind(NamedTuple):
    """What objects with the same mark have in common."""

    model: str
    rank: int
    group: int
    salt: str
    size: int
    """bytes of each"""


class StoredObjects:
    """Blocks have names of a hash and the mark of a kind. What a kind is stands in a note, a block of its own.

    Servers leave notes in a namespace ``NAMESPACE.layouts/kinds`` when they store. Objects whose note is not there yet
    count for nobody. Safe to use from any number of threads.
    """

    def __init__(self, mount: str, namespace: str, deadline: float, token: str | None) -> None:
        """``deadline``: seconds that a listing may take; it comes on top of that of a store."""
        self._folder, self._deadline = os.path.join(mount, namespace), deadline
        self._place = mount, f"{namespace}.layouts/kinds", deadline / 2, token
        self._lock = threading.Lock()
        """of the notes' store and memory"""
        self._looked: dict[bytes, float] = {}
        self._kinds: dict[bytes, Kind] = {}
        self._thread = ThreadPoolExecutor(1, "kvfuse-list")
        self._listing: Future[tuple[float, list[str]]] | None = None

    # -- what servers store --------------------------------------------------------------------------

    def note(self, keys: Sequence[Any], sizes: Sequence[int]) -> None:
        """Have a thread leave a note for each kind of objects that were stored, where there is none. Never waits."""
        now, named = monotonic(), [identity.kind_of(key) for key in keys]
        kinds = {identity.kind_mark(*kind): (*kind, size) for kind, size in zip(named, sizes, strict=True)}
        due = [mark for mark in kinds if self._looked.get(mark, 0) <= now]
        self._looked.update(dict.fromkeys(due, now + NOTED_S))
        if due:
            with suppress(RuntimeError):  # closed
                self._thread.submit(self._leave_notes, {mark: Kind(*kinds[mark]) for mark in due})

    def _leave_notes(self, kinds: Mapping[bytes, Kind]) -> None:
        try:
            with self._lock:
                there = self._notes.exists(list(kinds)).tolist()
                for (mark, kind), is_there in zip(kinds.items(), there, strict=True):
                    if not is_there and not self._put_note(mark, kind):
                        self._looked.pop(mark, None)
        except Exception:  # LMCache goes on: the objects count for nobody
            log.exception("kvfuse: what %d kinds of objects are is not noted", len(kinds))

    def _put_note(self, mark: bytes, kind: Kind) -> bool:
        text = json.dumps(kind._asdict()).encode()
        if len(text) > NOTE_SIZE:
            return True
        self._memory.array[: len(text)] = np.frombuffer(text, np.uint8)
        return bool(self._notes.put([mark], self._memory, [0], [len(text)])[0])

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
        with self._lock:
            if "_notes" in vars(self):
                self._notes.close()

    # -- how -----------------------------------------------------------------------------------------

    @cached_property
    def _notes(self) -> SteadyStore:
        """From the first use on."""
        mount, namespace, deadline, token = self._place
        descriptor = {"engine": "lmcache, kinds"}
        return SteadyStore(mount, namespace, descriptor=descriptor, deadline=deadline, token=token)

    @cached_property
    def _memory(self) -> Region:
        return self._notes.register(np.zeros(NOTE_SIZE, np.uint8))

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
        def names() -> tuple[float, list[str]]:
            """And until when they count."""
            began = monotonic()
            found = sorted(map(os.fsdecode, present(self._folder, self._deadline, self._place[-1])))
            return (ended := monotonic()) + max(LISTED_S, LISTED_TIMES * (ended - began)), found

        self._listing = self._thread.submit(names)
        return self._listing

    def _kind(self, mark: bytes) -> Kind | None:
        known = self._kinds.get(mark)
        if known is None and len(mark) == 2 * identity.MARK_SIZE:
            with self._lock:
                (size,) = self._notes.get([mark], self._memory, [0], [NOTE_SIZE]).tolist()
                text = self._memory.part(0, max(size, 0)).tobytes()
            if text:
                known = self._kinds[mark] = _read(text)
        return known


def _read(text: bytes) -> Kind:
    facts: Mapping[str, Any] = json.loads(text)
    return Kind(**{name: facts[name] for name in Kind._fields})


def present(folder: str, deadline: float, token: str | None) -> set[bytes]:
    """Names of the blocks of a folder, as the daemon tells those who follow it: faster than a listing of files."""
    names: set[bytes] = set()
    with Follower(folder, deadline=deadline, token=token) as follower:
        for news in follower:
            match news.kind:
                case NewsKind.PRESENT | NewsKind.STORED:
                    names.update(news.names)
                case NewsKind.REMOVED:
                    names.difference_update(news.names)
                case NewsKind.CLEARED:
                    names.clear()
                case NewsKind.READY:
                    break
    return names
