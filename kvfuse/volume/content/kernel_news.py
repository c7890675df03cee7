"""Invalidates what the kernel of this host caches, where other hosts changed it.

A thread tells the kernel, as the kernel may wait for an answer of the event loop before it takes the news
(`views.kernel_cache`). Changes are gathered meanwhile: of many changes of one inode the kernel hears once.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import trio

from kvfuse.errors import EngineError
from kvfuse.volume.inodes.kernel_link import KernelLink
from kvfuse.volume.views.kernel_cache import KernelCache

TOLD_SECONDS = 0.5
"""for which an open waits at most: the kernel may wait itself, for somebody who holds a folder"""

T = TypeVar("T")

log = logging.getLogger(__name__)


class KernelNews:
    """Gathers what changed, once it runs and there is a kernel. One of each membership. Event loop only."""

    def __init__(self, link: KernelLink) -> None:
        self._link = link
        self._is_running = False
        self._contents: set[int] = set()
        self._attributes: set[int] = set()
        self._names: set[tuple[int, bytes]] = set()
        self._work = trio.Event()
        self._told = trio.Event()
        """set, and made anew, when the kernel was told what was gathered"""
        self._telling: dict[int, trio.Event] = {}
        """inodes of which the kernel is being told now, and when it was"""

    def content(self, ino: int) -> None:
        """Bytes, and so attributes, of an inode changed."""
        self._note(self._contents, ino)

    def attributes(self, ino: int) -> None:
        self._note(self._attributes, ino)

    def name(self, parent: int, name: bytes) -> None:
        """The name means something else than before."""
        self._note(self._names, (parent, name))

    def _note(self, news: set[T], changed: T) -> None:
        if self._is_running and self._link.cache is not None:
            news.add(changed)
            self._work.set()

    async def told_of(self, ino: int) -> None:
        """Return when the kernel was told what changed of an inode, `TOLD_SECONDS` later at the latest."""
        with trio.move_on_after(TOLD_SECONDS):
            if ino in self._contents or ino in self._attributes:
                await self._told.wait()
            elif ino in self._telling:
                await self._telling[ino].wait()

    async def told(self) -> None:
        """Return when the kernel was told all that is gathered now."""
        if self._is_running and (self._names or self._contents or self._attributes):
            await self._told.wait()

    async def run(self) -> None:
        """Tell the kernel, for ever."""
        self._is_running = True
        while True:
            await self._work.wait()
            self._work = trio.Event()
            news = (self._names, self._contents, self._attributes - self._contents)
            self._names, self._contents, self._attributes = set(), set(), set()
            told, self._told = self._told, trio.Event()
            self._telling = dict.fromkeys(news[1] | news[2], told)
            if self._link.cache is not None:
                await trio.to_thread.run_sync(_tell, self._link.cache, *news, abandon_on_cancel=True)
            self._telling = {}
            told.set()


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
