"""Open files."""

from __future__ import annotations

import itertools
import os

from kvfuse.errors import Stale
from kvfuse.volume.api import Caller
from kvfuse.volume.inodes.node import Node

next_handle = itertools.count(1).__next__
"""a number for another handle of this process"""


class FileHandle:
    """An open file; see `api.Handle`. Its node counts it from the beginning."""

    __slots__ = (
        "appends",
        "cache_valid",
        "caller",
        "counts_reads",
        "direct",
        "heard",
        "id",
        "node",
        "readable",
        "writable",
    )

    def __init__(self, node: Node, flags: int, caller: Caller) -> None:
        self.id = next_handle()
        self.node = node
        self.caller = caller
        mode = flags & os.O_ACCMODE
        self.readable = mode != os.O_WRONLY
        self.writable = mode != os.O_RDONLY
        self.appends = bool(flags & os.O_APPEND)
        self.direct = bool(flags & os.O_DIRECT)
        self.counts_reads = not flags & os.O_NOATIME
        """reads change the access time"""
        self.heard = 0
        """`Doubt.epoch` up to which it was told of bytes that are lost"""
        node.handles += 1
        node.writers += self.writable
        self.cache_valid = True
        """no other host has changed the content since the kernel cached it (rings invalidate the cache themselves)"""

    def tell_lost(self) -> None:
        """Raises, once, where bytes of the file that were taken are lost."""
        if self.node.lost is not None and self.heard < self.node.lost[1]:
            error, self.heard = self.node.lost
            raise type(error)(str(error))

    @property
    def size(self) -> int:
        return self.node.size

    @property
    def number(self) -> int:
        return self.node.ino

    @property
    def is_new(self) -> bool:
        return not self.node.stored

    @property
    def place(self) -> tuple[int, bytes]:
        return self.node.parent, self.node.name


def check_content(node: Node) -> None:
    """Stale for a file without names whose bytes had to make room although the kernel knew it.

    The kernel then looks the name up again, and finds who took it.
    """
    if node.reaped:
        raise Stale(f"inode {node.ino} was removed")
