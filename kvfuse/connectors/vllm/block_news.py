"""What becomes of the blocks of a namespace, for events of an engine. See `BlockNews`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from kvfuse.usrbio.client import Disconnected, Follower, News, NewsKind, key_of

log = logging.getLogger(__name__)

RETRY_S_MAX = 1.0


class BlockNews:
    """Keys that were stored and removed, by whatever process and host. A thread follows the namespace.

    Where the connection breaks, the difference to what is there afterwards is the news.
    """

    def __init__(self, mount: str, namespace: str, token: str | None) -> None:
        self._folder, self._token = Path(mount, namespace), token
        self._known: set[bytes] = set()
        self._present: set[bytes] | None = None
        """of a new connection, until all was named"""
        self._changed: dict[bytes, bool] = {}
        """keys that were stored or, True, removed since the last `take`; what was undone meanwhile is no news"""
        self._lock = threading.Lock()
        self._follower: Follower | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvfuse-news", daemon=True)
        self._thread.start()

    def take(self, limit: int) -> list[tuple[bool, Sequence[bytes]]]:
        """(removed, keys) since the last time; of at most ``limit`` keys, others the next time."""
        with self._lock:
            taken = list(islice(self._changed, limit))
            changed = {key: self._changed.pop(key) for key in taken}
        gone = [key for key, removed in changed.items() if removed]
        come = [key for key, removed in changed.items() if not removed]
        return [(removed, keys) for removed, keys in ((True, gone), (False, come)) if keys]

    def close(self) -> None:
        self._ended.set()
        if (follower := self._follower) is not None:
            follower.close()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause = 0.02
        while not self._ended.wait(pause):
            pause = min(2 * pause, RETRY_S_MAX)
            with suppress(Disconnected, OSError), Follower(self._folder, token=self._token) as self._follower:
                if self._ended.is_set():
                    return
                self._present = set()
                for news in self._follower:
                    self._hear(news)
                    pause = 0.02

    def _hear(self, news: News) -> None:
        keys = [key for name in news.names if (key := key_of(name)) is not None]
        match news.kind:
            case NewsKind.PRESENT | NewsKind.STORED:
                if self._present is not None:
                    self._present.update(keys)
                self._tell(False, [key for key in keys if key not in self._known])
            case NewsKind.REMOVED:
                if self._present is not None:
                    self._present.difference_update(keys)
                self._tell(True, [key for key in keys if key in self._known])
            case NewsKind.CLEARED:
                self._present = None if self._present is None else set()
                self._tell(True, list(self._known))
            case NewsKind.READY:
                present, self._present = self._present or set(), None
                self._tell(True, list(self._known - present))

    def _tell(self, removed: bool, keys: Sequence[bytes]) -> None:
        (self._known.difference_update if removed else self._known.update)(keys)
        with self._lock:
            for key in keys:
                if self._changed.get(key, removed) is removed:
                    self._changed[key] = removed
                else:
                    del self._changed[key]
