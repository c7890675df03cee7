"""What the kernel may have cached of a mount, and how to drop it: for changes that did not come through the kernel.

The kernel takes the locks of the inode, waits for reads of it that are under way, and only then answers. The event
loop has to answer those reads, so nothing here may be called from its thread; pyfuse3 releases the interpreter
meanwhile. A notification costs a few microseconds, and so none is sent for what the kernel cannot have.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import pyfuse3

from kvfuse.errors import EngineError

DIRECTORIES_MAX = 4096
ANSWER_SECONDS = 1.0
"""from the daemon's answer until the kernel has taken it"""

_NOTHING_CACHED = frozenset({errno.ENOENT, errno.ENOTCONN, errno.ENODEV, errno.EINVAL})
"""the inode or name is not known; or the mount has ended: pyfuse3 has no session any more"""


class Absences:
    """Directories in which the kernel may remember that a name does not exist. Noted by the event loop, asked by all.

    ``timeout``: seconds for which the kernel remembers.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout + ANSWER_SECONDS if timeout else 0.0
        self._ends: dict[int, float] = {}
        self._end_of_all = 0.0

    def note(self, directory: int) -> None:
        """The kernel is told now that a name in ``directory`` is absent."""
        if not self._timeout:
            return
        end = time.monotonic() + self._timeout
        if len(self._ends) >= DIRECTORIES_MAX and directory not in self._ends:
            self._end_of_all = end  # before the new dict: a reader sees the one or the other
            self._ends = {}
        self._ends[directory] = end

    def may_be_cached(self, directory: int) -> bool:
        return time.monotonic() < max(self._ends.get(directory, 0.0), self._end_of_all)


class FuseKernelCache:
    """`volume.api.KernelCache` of the mount of this process. ``knows``: whether the kernel holds an inode."""

    def __init__(self, knows: Callable[[int], bool], absences: Absences) -> None:
        self._knows = knows
        self._absences = absences

    def drop_content(self, ino: int) -> None:
        if self._knows(ino):
            _notify(pyfuse3.invalidate_inode, ino, False)

    def drop_attributes(self, ino: int) -> None:
        if self._knows(ino):
            _notify(pyfuse3.invalidate_inode, ino, True)

    def drop_name(self, parent: int, name: bytes, ino: int = 0) -> None:
        if (ino and self._knows(ino)) or self._absences.may_be_cached(parent):
            _notify(pyfuse3.invalidate_entry, parent, name)

    def drop_any_name(self, parent: int, name: bytes) -> None:
        if self._knows(parent):
            _notify(pyfuse3.invalidate_entry, parent, name)


def _notify(notification: Callable[..., None], *arguments: object) -> None:
    try:
        notification(*arguments)
    except OSError as error:
        if error.errno not in _NOTHING_CACHED:
            raise EngineError(f"the kernel keeps what it cached of inode {arguments[0]}: {error}") from error
