"""Access times: which reads move them, and when they are stored.

They move in memory, as with ``lazytime``. They are stored with the next change of the inode; by fsync, sync and the end
of the volume; before the inode leaves memory; and else `STORE_SECONDS` after they moved, a few inodes at a time, as the
kernel does not pass on syncfs(2). A read waits for none of that. In a volume of many hosts the last two do not happen:
every record that is stored is news to every host.

The kernel answers from its cache without a word. So an open for reading alone counts as a read, where the kernel may
have the file cached. Threads of rings read without the event loop: they note it in the content map, and `collect`
looks there.
"""

from __future__ import annotations

from itertools import islice
from typing import Literal
from weakref import WeakKeyDictionary

import trio

from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.views import clock
from kvfuse.volume.views.content_map import ContentMap, ReadLog

DAY_NS = 86_400 * 10**9
STORE_SECONDS = 30.0
ROUND_SECONDS = 1.0
ROUND_INODES = 256
"""stored in each round, while there are some that have waited long enough"""

Policy = Literal["relatime", "strictatime", "noatime"]


class AccessTimes:
    """Moves access times and has them stored. One of each membership. ``directories``: theirs, too."""

    def __init__(self, core: Core, journal: Journal, policy: Policy, *, directories: bool) -> None:
        self._core = core
        self._journal = journal
        self._policy = policy
        self._directories = directories
        self._log = ReadLog(keeps_last=policy == "strictatime")
        self._moved: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        """inode -> when its access time moved first, by trio's clock. Those that a commit had since are not marked."""
        self._work = trio.Event()

    # -- reads ---------------------------------------------------------------------------------------

    def read(self, node: Node, moment: int | None = None) -> bool:
        """Something of the inode was read, now or at a moment; whether that moves its access time."""
        if self._policy == "noatime" or (node.is_directory and not self._directories):
            return False
        now = clock.now() if moment is None else moment
        if self._policy == "relatime" and max(node.mtime, node.ctime) < node.atime and now - node.atime < DAY_NS:
            return False
        if now == node.atime:
            return False
        node.atime = now
        if not node.atime_moved:
            node.atime_moved = True
            self._moved.setdefault(node, trio.current_time())
            self._work.set()
        return True

    def read_by(self, handle: FileHandle | Node, node: Node) -> None:
        """A read through a handle, which may have been opened with O_NOATIME."""
        if isinstance(handle, Node) or handle.counts_reads:
            self.read(node)

    def opened(self, handle: FileHandle) -> None:
        """The kernel opened a file, and may answer reads of it from its cache."""
        if handle.counts_reads and handle.cache_valid and not handle.writable and not handle.direct:
            node = handle.node
            if node.size and self.read(node):
                self._core.kernel.drop_attributes(node.ino)

    def log_for(self, node: Node) -> ReadLog | None:
        """Of a new content map of the inode."""
        self._work.set()
        return None if self._policy == "noatime" else self._log

    def collect(self) -> None:
        """Look at what threads have read."""
        while self._log.maps:
            content = self._log.maps.popleft()
            node = self._core.nodes.peek(content.ino)
            moment = content.take_read()
            if node is not None and node.map is content:
                self.read(node, moment)

    def look(self, content: ContentMap | None) -> None:
        """Before somebody is shown the access time of a file."""
        if content is not None and content.read_at:
            self.collect()

    # -- storing -------------------------------------------------------------------------------------

    def store(self, node: Node) -> None:
        """Have the inode in the next commit, if its access time moved since the last."""
        self._moved.pop(node, None)
        if not node.atime_moved or node.forgotten or not node.nlink:
            return
        node.atime_moved = False
        if node.is_directory:
            self._journal.pending.touch_times(node)
        else:
            self._journal.pending.touch(node)

    def store_all(self) -> None:
        self.collect()
        for node in list(self._moved):
            self.store(node)

    def _leaving(self, node: Node) -> None:
        self.look(node.map)
        if node.atime_moved:
            self.store(node)

    async def run(self) -> None:
        """Store what moved long enough ago, for ever, and what leaves memory; may be begun anew."""
        self._core.nodes.leaving = self._leaving
        self._work.set()
        while self._policy != "noatime":
            await self._work.wait()
            self._work = trio.Event()
            while self._moved or self._core.reads.threads:
                await trio.sleep(ROUND_SECONDS if self._store_due() else STORE_SECONDS / 2)
                self.collect()

    def _store_due(self) -> bool:
        """Store a few; whether there may be more."""
        latest = trio.current_time() - STORE_SECONDS
        first = list(islice(self._moved.items(), ROUND_INODES))
        due = [node for node, since in first if since <= latest]
        for node in due:
            self.store(node)
        return len(due) == ROUND_INODES
