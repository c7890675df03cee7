"""What clients read by themselves, as they note it: a page of shared memory for each of their tables."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from kvfuse.remote.libc import punch_hole
from kvfuse.touchpage import (
    ASKED_MAX,
    ASKED_OFFSET,
    ASKED_SIZE,
    HEADER_SIZE,
    TOUCHES_MAX,
    TOUCHES_SIZE,
)

Numbers = npt.NDArray[np.int64]

PAGE_SLOTS = 1024
"""slots and keys alike, of one page, that are looked at in one go; what clients write beyond is not seen"""


class TouchPage:
    """A page that one client writes: the rows of a table that it read. A hint: it may write anything."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvfuse-touches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, TOUCHES_SIZE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = np.frombuffer(mmap.mmap(self.descriptor, TOUCHES_SIZE), np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, os.close, self.descriptor)
        self._counts = memory[:16].view(np.uint64).data
        self._slots: npt.NDArray[np.uint32] = memory[HEADER_SIZE:ASKED_OFFSET].view(np.uint32)
        self._asked = memory[ASKED_OFFSET:].reshape(ASKED_MAX, ASKED_SIZE)
        self._seen = [0, 0]

    def end(self) -> None:
        """The client has it no more; if it goes on to use it, that is memory of its own."""
        punch_hole(self.descriptor, 0, TOUCHES_SIZE)

    def take(self) -> list[int]:
        """Slots that were written since the last call, each once; of many the last ones."""
        return list(dict.fromkeys(self._slots[self._new(0, TOUCHES_MAX)].tolist()))

    @property
    def has_asked(self) -> bool:
        """`take_asked` has something."""
        return bool(self._counts[1] != self._seen[1])

    def take_asked(self) -> list[list[bytes]]:
        """The keys of each question since the last call; of many the last ones."""
        questions: list[list[bytes]] = [[]]
        for row in self._asked[self._new(1, ASKED_MAX)]:  # a copy: the page is the client's
            if length := int(row[0]):
                questions[-1].append(row[1 : 1 + length].tobytes())
            else:
                questions.append([])
        return [keys for keys in questions if keys]

    def _new(self, which: int, places_max: int) -> Numbers:
        """Places that were written since the last call, in order."""
        count = int(self._counts[which])
        new, self._seen[which] = min((count - self._seen[which]) % (1 << 64), PAGE_SLOTS), count
        first = (count - new) % places_max  # the count is the client's: any number
        return (first + np.arange(new)) % places_max
