"""Invalidates the kernel's cache of a mount after changes that did not pass through the kernel.

The kernel may block an invalidation until the event loop answers a request: so the event loop's thread never calls
this module; pyfuse3 releases the interpreter meanwhile. For a name the kernel takes the lock of the folder; a lookup
or creation there holds that lock until the daemon has answered, and other callers queue behind the invalidation. (To
expire a name, since Linux 6.2, takes that lock, too; to expire all names of the mount, since 6.16, takes none.) For
content it waits for reads in flight. For attributes it does not wait. The daemon sends no invalidation for what the
kernel cannot have: none for names in folders whose names it may not cache, as the strict ones of shared volumes.
`holder.guard` ends the waits of a killed daemon.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import pyfuse3

from kvfuse.errors import EngineError
from kvfuse.native import fusewire

DIRECTORIES_MAX = 4096
ANSWER_SECONDS = 1.0
"""from the daemon's answer until the kernel has received it"""
LISTING_SECONDS = 60.0
"""as `ANSWER_SECONDS`, for a listing: its answer follows after its last name was read from the record store"""

_NOTHING_CACHED = frozenset({errno.ENOENT, errno.ENOTCONN, errno.ENODEV, errno.EINVAL})
"""the kernel does not know the inode or name; or the mount has ended, and pyfuse3's session with it"""


class CachedNames:
    """Directories whose names the kernel may cache; a second instance has those whose absent names it may cache.

    Only the event loop notes directories; any thread queries. ``timeout``: seconds for which the kernel caches names;
    ``answer_seconds``: until the kernel has received the answer.
    """

    def __init__(self, timeout: float, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._timeout = timeout
        self._seconds = timeout + answer_seconds
        self._ends: dict[int, float] = {}
        self._end_of_all = 0.0

    def note_directory(self, directory: int) -> float:
        """Note that a reply names an entry of ``directory``. Returns for how many seconds the kernel may cache it."""
        if not self._timeout:
            return 0.0
        end = time.monotonic() + self._seconds
        if len(self._ends) >= DIRECTORIES_MAX and directory not in self._ends:
            self._end_of_all = end  # before the new dict: a reader sees the one or the other
            self._ends = {}
        self._ends[directory] = end
        return self._timeout

    def note_all(self) -> None:
        """Note that the kernel may cache any name, from a former daemon."""
        self._end_of_all = time.monotonic() + self._seconds

    def may_be_cached(self, directory: int) -> bool:
        return time.monotonic() < max(self._ends.get(directory, 0.0), self._end_of_all)


class FuseKernelCache:
    """Implements `views.kernel_cache.KernelCache` for this process's mount. ``knows``: the kernel holds an inode."""

    def __init__(self, knows: Callable[[int], bool], names: CachedNames, absences: CachedNames) -> None:
        self._knows = knows
        self._names = names
        self._absences = absences

    def drop_content(self, ino: int) -> None:
        fusewire.forget(ino)
        if self._knows(ino):
            _notify_kernel(pyfuse3.invalidate_inode, ino, False)

    def drop_attributes(self, ino: int) -> None:
        fusewire.forget(ino)
        if self._knows(ino):
            _notify_kernel(pyfuse3.invalidate_inode, ino, True)

    def drop_name(self, parent: int, name: bytes, ino: int = 0) -> None:
        is_kept = ino and self._knows(ino) and self._names.may_be_cached(parent)
        if is_kept or self._absences.may_be_cached(parent):
            _notify_kernel(pyfuse3.invalidate_entry, parent, name)

    def drop_any_name(self, parent: int, name: bytes) -> None:
        if self._names.may_be_cached(parent) or self._absences.may_be_cached(parent):
            _notify_kernel(pyfuse3.invalidate_entry, parent, name)


def _notify_kernel(notification: Callable[..., None], *arguments: object) -> None:
    try:
        notification(*arguments)
    except OSError as error:
        if error.errno not in _NOTHING_CACHED:
            raise EngineError(f"the kernel keeps what it cached of inode {arguments[0]}: {error}") from error
