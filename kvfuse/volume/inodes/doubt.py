"""Which slots no sync vouches for, since one failed: their bytes are written again, to other slots.

After a failed sync the kernel may have dropped what was written, or calls it clean: a later sync succeeds, and says
nothing of it. So what was written between the last sync that succeeded and the one that failed is *in doubt* for good.
Generations of slots are given in the order of writes: it is a range of generations. Bytes that were written in place
have the generation of before; such an extent has no checksums, and one of an earlier generation than the failure is in
doubt, too.

The ranges stand in a page that outlives the daemon: what one has written, another may have to vouch for. Event loop
only.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import trio

from kvfuse.errors import EngineError, KvfuseError
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.volume.inodes.chunk import Chunk
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.store.numbers import NumberRange

log = logging.getLogger(__name__)

NAME = "volume/doubt"
"""what the keeper knows the page by"""
COMMITS_FAIL = "volume/commits-fail"
_VOUCHED, _COUNT, _FIRST = 0, 1, 2
"""words of the page: the generation from which on nothing is vouched for; how many ranges are in doubt; the first"""
RANGES_MAX = (mmap.PAGESIZE // 8 - _FIRST) // 2


class Doubt:
    """Of one volume. ``keeper``: has the page of the daemon before this one, of the volume ``content``."""

    def __init__(self, generations: NumberRange, keeper: Keeper = NO_KEEPER, content: bytes = b"") -> None:
        self._generations = generations
        self._keeper = keeper
        self.have_commits_failed = bool(keeper.list_names(COMMITS_FAIL))
        """those of the record store, and none succeeded since"""
        self._words = kept_page(keeper, NAME, content)
        if not self._words[_VOUCHED]:
            self._words[_VOUCHED] = generations.upcoming
        self._writing: int | None = None
        """generation below which no slot is being written to; None: none is"""
        self._sealed: set[int] = set()
        """inodes whose bytes were written in place, and sealed, since the last sync began"""
        self._inodes: set[int] = set()
        """of them those in doubt"""
        self.lost: set[int] = set()
        """generations of extents in doubt whose bytes cannot be read back, which was told"""
        self.epoch = 0
        """counts failures, and other losses that writers are to hear of"""
        self.arose = trio.Event()
        self.on_failure: Callable[[], object] = lambda: None
        """called when a sync has failed: the block store has bytes of its own in doubt"""
        if self.is_any:
            self.epoch = 1
            self.arose.set()

    @property
    def is_any(self) -> bool:
        return bool(self._words[_COUNT] or self._inodes)

    @property
    def ranges(self) -> list[range]:
        """of generations"""
        words = self._words[_FIRST : _FIRST + 2 * self._words[_COUNT]].tolist()
        return [range(*pair) for pair in zip(words[::2], words[1::2], strict=True)]

    def covers(self, ino: int, chunks: Iterable[Chunk]) -> bool:
        """Bytes of these chunks of an inode are in doubt."""
        if not self.is_any:
            return False
        ranges = self.ranges
        end = ranges[-1].stop if ranges else 0
        return any(
            ino in self._inodes
            or (not extent.checksums and extent.generation < end)
            or any(extent.generation in one for one in ranges)
            for chunk in chunks
            for extent in chunk.extents
        )

    def sealed(self, ino: int) -> None:
        """Bytes that were written in place have checksums from now on."""
        self._sealed.add(ino)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Slots get their generations, and are written to, in the body; of one caller at a time."""
        self._writing = self._generations.upcoming
        try:
            yield
        finally:
            self._writing = None

    @contextmanager
    def telling(self, handle: FileHandle) -> Iterator[None]:
        """An fsync in the body; its error, or that of bytes that are lost, is what the handle's owner hears of it."""
        try:
            yield
        except EngineError:
            handle.heard = self.epoch
            raise
        handle.tell_lost()

    def lose(self, node: Node, error: KvfuseError, *, is_new: bool = False) -> None:
        """Bytes of the file that were taken are lost: whoever has it open for writing hears so, if he did not hear of
        the failed sync; in any case where ``is_new``: it has another cause."""
        self.epoch = max(1, self.epoch + is_new)
        node.lost = error, self.epoch
        log.error("%s", error)

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """A sync of the segments in the body. EngineError: all that it was to vouch for is in doubt."""
        began = self._generations.upcoming if self._writing is None else self._writing
        sealed, self._sealed = self._sealed, set()
        try:
            yield
        except BaseException as error:
            self._sealed |= sealed
            if isinstance(error, EngineError):
                self._fail()
            raise
        self._words[_VOUCHED] = began

    def _fail(self) -> None:
        words, count, end = self._words, self._words[_COUNT], self._generations.upcoming
        if count < RANGES_MAX:
            words[_FIRST + 2 * count], words[_FIRST + 2 * count + 1] = words[_VOUCHED], end
            words[_COUNT] = count + 1
        else:
            words[_FIRST + 2 * count - 1] = end
        words[_VOUCHED] = end  # last: a daemon that is killed before has it in doubt twice
        self._inodes |= self._sealed
        self._sealed = set()
        self.epoch += 1
        self.arose.set()
        self.on_failure()

    def note_commit(self, *, has_failed: bool) -> None:
        """For the daemon after this one."""
        if has_failed == self.have_commits_failed:
            return
        self.have_commits_failed = has_failed
        if has_failed:
            self._keeper.keep(COMMITS_FAIL)
        else:
            self._keeper.drop(COMMITS_FAIL)

    def renewed(self, ino: int) -> None:
        """All that was in doubt of the inode is staged again, or known to be lost."""
        self._inodes.discard(ino)

    @property
    def all(self) -> tuple[list[range], set[int]]:
        """For `settled`."""
        return self.ranges, set(self._inodes)

    def settled(self, doubted: tuple[list[range], set[int]]) -> bool:
        """What was in doubt by then was written again, and is vouched for. False: more is by now."""
        words, is_all = self._words, self.ranges == doubted[0] and self._inodes <= doubted[1]
        if is_all:
            self.arose = trio.Event()
        left = [one for one in self.ranges if one not in doubted[0]]
        for number, one in enumerate(left):
            words[_FIRST + 2 * number], words[_FIRST + 2 * number + 1] = one.start, one.stop
        words[_COUNT] = len(left)
        self._inodes -= doubted[1]
        return is_all


def kept_page(keeper: Keeper, name: str, content: bytes) -> memoryview:
    """That of the daemon before this one, or a new one, as 64-bit words."""
    kept = keeper.take(name)
    descriptors = kept.descriptors if kept is not None else ()
    try:
        if kept is not None and kept.content == content and len(descriptors) == 1:
            return memoryview(mmap.mmap(descriptors[0], mmap.PAGESIZE)).cast("q")
    except (OSError, ValueError):
        pass  # it is none of ours
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if not keeper.outlives:
        return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    descriptor = os.memfd_create(f"kvfuse-{name[7:]}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        keeper.keep(name, content, [descriptor])
        return memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")
    finally:
        os.close(descriptor)
