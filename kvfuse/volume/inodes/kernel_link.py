"""The kernel of a mount, as far as a volume knows one."""

from __future__ import annotations

from contextlib import suppress

from kvfuse import errors
from kvfuse.volume.api import KernelCache


class KernelLink:
    """What the kernel caches of a volume, over all its memberships. The core of each has it."""

    def __init__(self) -> None:
        self.cache: KernelCache | None = None
        """None where nobody is told"""

    def connect(self, cache: KernelCache) -> None:
        """Tell this kernel what changes from now on, but for what it asked for."""
        self.cache = cache

    def drop_attributes(self, ino: int) -> None:
        """The kernel shows attributes from its cache that are old by now."""
        if self.cache is not None:
            with suppress(errors.EngineError):
                self.cache.drop_attributes(ino)
