"""Invalidation of the kernel's cache of a mount."""

from __future__ import annotations

from contextlib import suppress

from kvfuse import errors
from kvfuse.volume.views.kernel_cache import KernelCache


class KernelLink:
    """The way to the kernel's cache, which the cores of all memberships of a mount share."""

    def __init__(self) -> None:
        self.cache: KernelCache | None = None
        """None: there is no mount"""

    def connect(self, cache: KernelCache) -> None:
        """Invalidate this cache from now on."""
        self.cache = cache

    def drop_attributes(self, ino: int) -> None:
        """Invalidate the cached attributes of an inode. Errors of the kernel are ignored."""
        if self.cache is not None:
            with suppress(errors.EngineError):
                self.cache.drop_attributes(ino)
