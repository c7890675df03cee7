"""The kernel's cache of a mount, and how to invalidate it after changes that did not pass through the kernel.

The kernel may wait before it takes the news, and nothing ends that wait but an answer of the event loop: so nothing
here may be called from its thread; pyfuse3 releases the interpreter meanwhile. For a name it wants the lock of the
folder, which who looks a name up or makes one there holds until the daemon answered, and while it waits, others wait
for the same lock behind it. (To let a name merely expire, since Linux 6.2, takes that lock, too; to let all names of
the mount expire at once, since 6.16, takes none.) For content it waits for reads that are under way. For attributes
it waits for nothing. Nothing is sent for what the kernel cannot have: in a folder of which it keeps no names, as in
the strict ones of shared volumes, it is told of none. `holder.guard` ends the waits of a killed daemon.
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
"""from the daemon's answer until the kernel has taken it"""
LISTING_SECONDS = 60.0
"""as `ANSWER_SECONDS`, for a listing: the answer is sent when the last of its names was read from the record store"""

_NOTHING_CACHED = frozenset({errno.ENOENT, errno.ENOTCONN, errno.ENODEV, errno.EINVAL})
"""the inode or name is not known; or the mount has ended: pyfuse3 has no session any more"""


class CachedNames:
    """Directories of which the kernel may keep names; or, another one of these, that names are absent.

    Noted by the event loop, asked by all. ``timeout``: seconds for which the kernel keeps them; ``answer_seconds``:
    until it has the answer that said so.
    """

    def __init__(self, timeout: float, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._timeout = timeout
        self._seconds = timeout + answer_seconds
        self._ends: dict[int, float] = {}
        self._end_of_all = 0.0

    def note_directory(self, directory: int) -> float:
        """The reply to the kernel names an entry of ``directory``, which the kernel may cache for so many seconds."""
        if not self._timeout:
            return 0.0
        end = time.monotonic() + self._seconds
        if len(self._ends) >= DIRECTORIES_MAX and directory not in self._ends:
            self._end_of_all = end  # before the new dict: a reader sees the one or the other
            self._ends = {}
        self._ends[directory] = end
        return self._timeout

    def note_all(self) -> None:
        """A daemon before this one told the kernel of any names."""
        self._end_of_all = time.monotonic() + self._seconds

    def may_be_cached(self, directory: int) -> bool:
        return time.monotonic() < max(self._ends.get(directory, 0.0), self._end_of_all)


class FuseKernelCache:
    """`views.kernel_cache.KernelCache` of the mount of this process. ``knows``: whether the kernel holds an inode."""

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
