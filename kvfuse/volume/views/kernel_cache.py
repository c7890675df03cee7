"""What the kernel caches of a mount: the interface for doors whose changes the kernel does not see."""

from __future__ import annotations

from typing import Protocol


class KernelCache(Protocol):
    """What the kernel caches of a mount, for doors whose changes the kernel does not see.

    After the volume was changed and before that is reported as done, the door drops what the change made untrue: then
    the next system call of whoever is told sees it. From any thread but the event loop's: the kernel may wait
    for an answer from the daemon first. EngineError where the kernel refuses; what it has not cached costs nothing.
    """

    def drop_content(self, ino: int) -> None:
        """Bytes, in mappings too, and attributes of an inode."""

    def drop_attributes(self, ino: int) -> None: ...
    def drop_name(self, parent: int, name: bytes, ino: int = 0) -> None:
        """What a name meant: an inode, or 0 for a name that was absent. Not the attributes of ``parent``."""

    def drop_any_name(self, parent: int, name: bytes) -> None:
        """As `drop_name`, where it is not known here what the name meant."""
