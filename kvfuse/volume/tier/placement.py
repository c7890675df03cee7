"""Where the pages of the shared-memory tier come from: huge pages, and the memory of one processor socket.

Both are wishes to the kernel. Huge pages are transparent ones, so none need be set aside, and what the kernel cannot
give are small pages. Pages of a node come from another one where that has no room.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass
from pathlib import Path

from kvfuse.errors import ConfigError
from kvfuse.remote.libc import prefer_node

HUGE_PAGE = 2 << 20
"""bytes: of x86-64, and of aarch64 with pages of 4 KiB"""
_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NODES = Path("/sys/devices/system/node/online")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Of the pages of one tier."""

    hugepages: bool = False
    node: int | None = None
    """a NUMA node; None: of whoever touches a page first"""

    @property
    def page_size(self) -> int:
        """Bytes that one touch takes, at most."""
        return HUGE_PAGE if self.hugepages else mmap.PAGESIZE

    def apply(self, memory: mmap.mmap, address: int) -> None:
        """Before the memory, which is mapped at ``address``, is touched. OSError."""
        if self.hugepages and hugepages_are_given():
            memory.madvise(mmap.MADV_HUGEPAGE)
        if self.node is not None:
            prefer_node(address, len(memory), self.node)


ANYWHERE = Placement()


def hugepages_are_given() -> bool:
    """The kernel gives huge pages for shared memory that asks for them."""
    try:
        words = _SHARED_HUGE_PAGES.read_text()
    except OSError:
        return False
    return not any(f"[{word}]" in words for word in ("never", "deny"))


def checked_placement(*, hugepages: bool, node: int | None) -> Placement:
    """The placement that options ask for. ConfigError for a node that is absent; a log line where there are no huge
    pages."""
    if node is not None and node not in (nodes := online_nodes()):
        raise ConfigError(f"cache.tier_node {node}: this host has {', '.join(map(str, sorted(nodes)))}")
    if hugepages and not hugepages_are_given():
        log.warning(
            "cache.tier_hugepages: the kernel gives shared memory no huge pages; root may allow it: echo advise > %s",
            _SHARED_HUGE_PAGES,
        )
    return Placement(hugepages, node)


def online_nodes() -> set[int]:
    """NUMA nodes of this host; node 0 where the kernel knows none."""
    try:
        words = _NODES.read_text().strip().split(",")
    except OSError:
        return {0}
    nodes: set[int] = set()
    for word in words:
        first, _, last = word.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes
