"""Directory, name and lookup count of each inode that the kernel knows.

The kernel may know a million inodes and forget none of them for hours. Inode numbers are allocated in sequence,
so these are kept in arrays indexed by number, a page for 1,024 inodes: 17 bytes and the name for each. In a shared
volume 8 more bytes hold the version of the content that the kernel may have in its page cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvfuse.volume.views.handover import Handover

_PAGE_BITS = 10
_PAGE_SIZE = 1 << _PAGE_BITS
_SLOT_MASK = _PAGE_SIZE - 1
_WASTE_MAX = 16 << 10
"""Bytes of unused names at which a page's names are compacted."""


class _InodePage:
    """Inodes with the same high bits of their number. An inode with count 0 is not known."""

    __slots__ = ("counts", "known", "lengths", "names", "offsets", "parents", "versions", "wasted")

    def __init__(self) -> None:
        self.parents = array("Q", bytes(8 * _PAGE_SIZE))
        self.counts = array("I", bytes(4 * _PAGE_SIZE))
        self.offsets = array("I", bytes(4 * _PAGE_SIZE))
        self.lengths = bytearray(_PAGE_SIZE)
        self.names = bytearray()
        self.wasted = 0
        self.known = 0
        self.versions: array[int] | None = None

    def name(self, slot: int) -> bytes:
        offset = self.offsets[slot]
        return bytes(self.names[offset : offset + self.lengths[slot]])

    def set(self, slot: int, parent: int, name: bytes) -> None:
        self.parents[slot] = parent
        if self.lengths[slot] != len(name) or self.name(slot) != name:
            self.wasted += self.lengths[slot]
            self.offsets[slot] = len(self.names)
            self.lengths[slot] = len(name)
            self.names += name
            if self.wasted > _WASTE_MAX:
                self._compact()

    def _compact(self) -> None:
        names = bytearray()
        for slot in range(_PAGE_SIZE):
            if self.lengths[slot]:
                name = self.name(slot)
                self.offsets[slot] = len(names)
                names += name
        self.names = names
        self.wasted = 0


class KnownInodes:
    """The place and the kernel's lookup count of each inode that it knows. The core owns it."""

    def __init__(self, handover: Handover | None = None) -> None:
        self._pages: dict[int, _InodePage] = {}
        self._handover = handover or Handover()
        self._outlives = self._handover.outlives
        for ino, before in self._handover.still_open.items():
            if before.places:
                self.add(ino, *before.places[0])

    def get(self, ino: int) -> tuple[int, bytes] | None:
        """(directory, a name of the inode); None if the kernel does not know the inode."""
        page = self._pages.get(ino >> _PAGE_BITS)
        slot = ino & _SLOT_MASK
        if page is None or not page.counts[slot]:
            return None
        return page.parents[slot], page.name(slot)

    def set(self, ino: int, parent: int, name: bytes) -> None:
        """Change the place of an inode, if the kernel knows it."""
        page = self._pages.get(ino >> _PAGE_BITS)
        if page is not None and page.counts[ino & _SLOT_MASK]:
            page.set(ino & _SLOT_MASK, parent, name)
            if self._outlives:
                self._handover.looked_up(ino, parent, name)
                self._handover.renamed(ino, parent, name)

    def add(self, ino: int, parent: int, name: bytes) -> None:
        """Raise the kernel's lookup count of the inode, and set its place."""
        page = self._pages.get(ino >> _PAGE_BITS)
        if page is None:
            page = self._pages[ino >> _PAGE_BITS] = _InodePage()
        slot = ino & _SLOT_MASK
        if not page.counts[slot]:
            page.known += 1
        page.counts[slot] += 1
        page.set(slot, parent, name)
        if self._outlives:
            self._handover.looked_up(ino, parent, name)

    def forget(self, ino: int, count: int) -> bool:
        """The kernel dropped ``count`` of its references; True when none is left."""
        page = self._pages.get(ino >> _PAGE_BITS)
        slot = ino & _SLOT_MASK
        if page is None or not page.counts[slot]:
            return True
        page.counts[slot] -= min(count, page.counts[slot])
        if page.counts[slot]:
            return False
        page.set(slot, 0, b"")
        if page.versions is not None:
            page.versions[slot] = 0
        page.known -= 1
        if not page.known:
            del self._pages[ino >> _PAGE_BITS]
        return True

    def known(self, ino: int) -> bool:
        """The kernel knows the inode. From any thread."""
        page = self._pages.get(ino >> _PAGE_BITS)
        return page is not None and page.counts[ino & _SLOT_MASK] > 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """(inode, parent, name) of all that the kernel knows."""
        for number, page in self._pages.items():
            for slot, count in enumerate(page.counts):
                if count:
                    yield number << _PAGE_BITS | slot, page.parents[slot], page.name(slot)

    # -- content in shared volumes -------------------------------------------------------------------

    def content_version(self, ino: int) -> int:
        """Version of the content that the kernel may have cached; 0: its pages are stale."""
        page = self._pages.get(ino >> _PAGE_BITS)
        return page.versions[ino & _SLOT_MASK] if page is not None and page.versions is not None else 0

    def set_content_version(self, ino: int, version: int) -> None:
        """Note the version of the content that the kernel reads or wrote. 0: its pages are stale."""
        page = self._pages.get(ino >> _PAGE_BITS)
        if page is None or not page.counts[ino & _SLOT_MASK]:
            return
        if page.versions is None:
            page.versions = array("Q", bytes(8 * _PAGE_SIZE))
        page.versions[ino & _SLOT_MASK] = version

    def distrust_all(self) -> None:
        """Note that all cached pages of the kernel may be stale."""
        for page in self._pages.values():
            page.versions = None

    def __len__(self) -> int:
        return sum(page.known for page in self._pages.values())
