"""What the kernel of this host has to hear of other hosts' changes.

It is told by a thread, as it may wait for an answer of the event loop before it takes the news (`api.KernelCache`).
What comes meanwhile is gathered: of many changes of one inode it hears once.
"""

from __future__ import annotations

import logging

import trio

from kvfuse.errors import EngineError
from kvfuse.volume.api import KernelCache

log = logging.getLogger(__name__)


class KernelNews:
    """See the module. Event loop only. Without a kernel nothing is kept."""

    def __init__(self) -> None:
        self.kernel: KernelCache | None = None
        self._contents: set[int] = set()
        self._attributes: set[int] = set()
        self._names: set[tuple[int, bytes]] = set()
        self._work = trio.Event()

    def content(self, ino: int) -> None:
        """Bytes, and so attributes, of an inode changed."""
        if self.kernel is not None:
            self._contents.add(ino)
            self._work.set()

    def attributes(self, ino: int) -> None:
        if self.kernel is not None:
            self._attributes.add(ino)
            self._work.set()

    def name(self, parent: int, name: bytes) -> None:
        """The name means something else than before."""
        if self.kernel is not None:
            self._names.add((parent, name))
            self._work.set()

    async def run(self) -> None:
        """Tell the kernel, for ever."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            news = (self._names, self._contents, self._attributes - self._contents)
            self._names, self._contents, self._attributes = set(), set(), set()
            if self.kernel is not None:
                await trio.to_thread.run_sync(_tell, self.kernel, *news, abandon_on_cancel=True)


def _tell(kernel: KernelCache, names: set[tuple[int, bytes]], contents: set[int], attributes: set[int]) -> None:
    """In a thread. What the kernel refuses stays in its cache until that times out."""
    try:
        for parent, name in names:
            kernel.drop_any_name(parent, name)
        for ino in contents:
            kernel.drop_content(ino)
        for ino in attributes:
            kernel.drop_attributes(ino)
    except EngineError as error:
        log.warning("changes of other hosts may show late: %s", error)
