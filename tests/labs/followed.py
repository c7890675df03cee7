"""What a client knows of the blocks of a folder by following it."""

from __future__ import annotations

import threading
from pathlib import Path

from mounting import PATIENCE_S

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import Follower, NewsKind


class Followed:
    """What a client knows of a folder from its news alone, gathered in a thread."""

    def __init__(self, folder: Path) -> None:
        self.names: set[bytes] = set()
        self.removed: list[bytes] = []
        self.is_ready = threading.Event()
        self.error: Exception | None = None
        self.follower = Follower(folder)
        self._thread = threading.Thread(target=self._gather)
        self._thread.start()

    def _gather(self) -> None:
        try:
            for kind, names in self.follower:
                if kind is NewsKind.READY:
                    self.is_ready.set()
                elif kind is NewsKind.CLEARED:
                    self.names.clear()
                elif kind is NewsKind.REMOVED:
                    self.names.difference_update(names)
                    self.removed += names
                else:
                    self.names.update(names)
        except Disconnected as error:
            self.error = error

    def __enter__(self) -> Followed:
        assert self.is_ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.close()
        self._thread.join()
