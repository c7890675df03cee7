"""What reading and writing do to an inode beside its bytes: the access time, and the bits that give privileges."""

from __future__ import annotations

import stat

from kvfuse.volume import clock
from kvfuse.volume.node import Node

DAY_NS = 86_400 * 10**9


def accessed(node: Node) -> None:
    """Move the access time as relatime does: where it is not the latest of the three times, or is a day old.

    It is kept in memory until something else is stored, as with lazytime.
    """
    now = clock.now()
    if node.atime <= max(node.mtime, node.ctime) or now - node.atime >= DAY_NS:
        node.atime = now


def lose_privileges(node: Node, *, by_root: bool = False) -> None:
    """The bytes or the owner of a file changed: setuid and setgid no longer say what the owner meant.

    ``by_root``: by root's hand. It leaves setgid where the group may not execute, as there it is no privilege.
    """
    node.mode &= ~stat.S_ISUID
    if node.mode & stat.S_IXGRP or not by_root:
        node.mode &= ~stat.S_ISGID
