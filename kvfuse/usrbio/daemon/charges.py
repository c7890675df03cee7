"""Counts, by user, clients' memory that the kernel charges to the daemon: absent pages that it wrote to, and rings.

The kernel charges a page of shared memory to the control group of the process that touches it first, until nobody has
the memory open, even after the daemon dropped it. So the daemon remembers a user's cost by the memory's file handle,
which does not keep the memory; where the user asks for more than it may have, the daemon reads how much of it still
exists. Pages that the client touched itself cost nothing here. A ring counts with its whole size while the daemon has
it, and afterwards with what exists, until its client drops it, too.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from math import inf
from typing import NamedTuple
from weakref import WeakValueDictionary

from kvfuse.access.client_process import ClientProcess
from kvfuse.machine_memory import memory_size
from kvfuse.options.options import UsrbioOptions
from kvfuse.usrbio.daemon.call_memory import SharedPool
from kvfuse.usrbio.daemon.page_owners import OwnGroup

log = logging.getLogger(__name__)

USER_SHARE = 8
"""A user's part of the memory that this process may have, where no option says how much"""
ALL_SHARE = 4
"""part that all users may have together, but no less than one user may"""
CHARGE_MIN = 64 << 10
"""least bytes that a memory counts: else to remember it could take more than it has"""
LOOKS = 500
"""memories that `recount` reads in one go"""
LOOKS_SECONDS = 0.02
"""least time between two rounds of one user"""
WATCH_SECONDS = 0.01
"""least time between two reads of what the group pays for"""
SHARED_FILES = "/dev/shm"
_AT_EMPTY_PATH = 0x1000
_libc = ctypes.CDLL(None, use_errno=True)


class _Handle(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


class MemoryId(NamedTuple):
    """Identifies a memory without keeping it: a file handle, see name_to_handle_at(2)."""

    device: int
    kind: int
    handle: bytes

    @classmethod
    def from_descriptor(cls, descriptor: int) -> MemoryId:
        """Identify the memory of a descriptor. OSError."""
        found, mount = _Handle(size=128), ctypes.c_int()
        if _libc.name_to_handle_at(descriptor, b"", ctypes.byref(found), ctypes.byref(mount), _AT_EMPTY_PATH):
            raise OSError(ctypes.get_errno(), "no handle of the memory")
        return cls(os.fstat(descriptor).st_dev, found.kind, bytes(found.data[: found.size]))

    def read_size(self, base: int) -> int:
        """Bytes that exist; 0 once nobody has it. ``base``: a descriptor of its file system. OSError."""
        found = _Handle(size=len(self.handle), kind=self.kind)
        ctypes.memmove(found.data, self.handle, len(self.handle))
        descriptor = _libc.open_by_handle_at(base, ctypes.byref(found), os.O_PATH | os.O_CLOEXEC)
        if descriptor < 0:
            if ctypes.get_errno() == errno.ESTALE:
                return 0
            raise OSError(ctypes.get_errno(), "the memory cannot be looked at")
        try:
            return os.fstat(descriptor).st_blocks * 512
        finally:
            os.close(descriptor)


@contextmanager
def _open_bases() -> Iterator[dict[int, int]]:
    """Open the file systems of memfds and of /dev/shm: device number -> descriptor."""
    with ExitStack() as undo:
        descriptors = [os.memfd_create("kvfuse-base", os.MFD_CLOEXEC)]
        undo.callback(os.close, descriptors[0])
        with suppress(OSError):
            descriptors.append(os.open(SHARED_FILES, os.O_RDONLY | os.O_CLOEXEC))
            undo.callback(os.close, descriptors[1])
        yield {os.fstat(descriptor).st_dev: descriptor for descriptor in descriptors}


class Charge:
    """The cost of one user's memory. Any thread. ``limit``: bytes; ``charges``: of all users."""

    def __init__(self, limit: float, charges: Charges, *, is_outside: bool) -> None:
        self.is_slow = False
        """a small copy waited for its memory: see `MappedIov.holds_lock`"""
        self._limit = limit
        self._is_outside = is_outside
        self._charges = charges
        self._sizes: dict[MemoryId, int] = {}
        """counted bytes; the memory read last is at the end"""
        self._rings: set[MemoryId] = set()
        """rings that the daemon has: `recount` skips them"""
        self._held = 0
        self._lock = threading.Lock()
        self._next_look = 0.0

    @property
    def is_watched(self) -> bool:
        """The kernel charges more than was counted: each copy finds out what it adds."""
        return self._is_outside and self._charges.is_alarmed()

    def mark_slow(self) -> None:
        self._charges.mark_slow(self)

    def count_own(self, address: int, length: int) -> int:
        """Count pages of a mapping that the kernel charges to the daemon."""
        group = self._charges.group
        return group.count_pages(address, length) if group is not None else 0

    def take(
        self, descriptor: int, size: int, remedy: str = "touch the iov's pages before", *, at_once: bool = False
    ) -> None:  # fmt: skip
        """Charge ``size`` bytes of pages that the caller is about to create in a memory. OSError EDQUOT, ENOMEM.

        ``at_once``: `recount` before a refusal, however lately that was done.
        """
        if not self._charges.is_counting:
            return
        memory = MemoryId.from_descriptor(descriptor)
        if memory.device not in self._charges.devices:
            if self._limit < inf:  # nobody could know when it is gone
                raise OSError(errno.EDQUOT, "absent pages of an iov in a tmpfs of the client's own: touch them before")
            return
        if self._take(memory, size):
            return
        self.recount(at_once=at_once)
        if self._take(memory, size):
            return
        if self._held + size > self._limit:
            raise OSError(errno.EDQUOT, f"{self._held} bytes are charged to the daemon: {remedy}")
        self._charges.recount()
        if not self._take(memory, size):
            raise OSError(errno.ENOMEM, f"all users have too much charged to the daemon: {remedy}")

    def _take(self, memory: MemoryId, size: int) -> bool:
        with self._lock:
            if memory not in self._sizes:
                size = max(size, CHARGE_MIN)
            if self._held + size > self._limit or not self._charges.pool.take(size):
                return False
            self._count(memory, size)
            return True

    def _count(self, memory: MemoryId, size: int) -> None:
        self._held += size
        self._sizes[memory] = self._sizes.get(memory, 0) + size
        self._charges.holders.add(self)

    @contextmanager
    def hold_ring(self, descriptor: int, size: int, *, is_left: bool) -> Iterator[None]:
        """Charge the memory of a ring until the end of the body. OSError EDQUOT, ENOMEM: that is too much, with ended
        rings that clients still hold.

        ``is_left``: the former daemon had it, so it continues, whatever the limits are.
        """
        if not self._charges.is_counting:
            yield
            return
        memory = MemoryId.from_descriptor(descriptor)
        if is_left:
            with self._lock:
                self._charges.pool.force(size)
                self._count(memory, size)
        else:
            self.take(descriptor, size, "unmap and close rings that have ended", at_once=True)
        self._rings.add(memory)
        try:
            yield
        finally:
            self._rings.remove(memory)

    def recount(self, *, at_once: bool = False) -> None:
        """Refund what is gone: some memories in turn, as all others may wait for this thread."""
        with self._lock, _open_bases() as bases:
            if time.monotonic() < self._next_look and not at_once:
                return
            for memory in list(islice((memory for memory in self._sizes if memory not in self._rings), LOOKS)):
                size = self._sizes.pop(memory)
                there = memory.read_size(bases[memory.device])
                left = min(size, max(there, CHARGE_MIN)) if there else 0
                if left:
                    self._sizes[memory] = left
                self._held -= size - left
                self._charges.pool.give(size - left)
            if not self._sizes:
                self._charges.holders.discard(self)
            self._next_look = time.monotonic() + LOOKS_SECONDS


class Charges:
    """The charges of all users. ``options``: the limits. ``own_size``: bytes of the daemon's own shared memory."""

    def __init__(self, options: UsrbioOptions, own_size: Callable[[], int] = lambda: 0) -> None:
        size = memory_size()
        self._limit = options.user_charged_size or size // USER_SHARE
        self._size = max(size // ALL_SHARE, self._limit)
        self.pool = SharedPool(self._size)
        self.holders: set[Charge] = set()
        """charges of users that have some, also when they are gone"""
        self._users: WeakValueDictionary[tuple[int, bool, bool], Charge] = WeakValueDictionary()
        self._slow: set[tuple[int, bool]] = set()
        self._own_size = own_size
        self._next_watch = 0.0
        self._is_alarmed = False
        self.group: OwnGroup | None = None
        with suppress(OSError, StopIteration):  # no group of our own, or not root
            self.group = OwnGroup()
        with _open_bases() as bases:
            self.devices = frozenset(bases)
            try:
                self.is_counting = all(MemoryId.from_descriptor(base).read_size(base) >= 0 for base in bases.values())
            except OSError:  # not root, or a kernel without handles of tmpfs
                self.is_counting = False
                log.info("clients' memory charged to the daemon is not limited: the daemon lacks CAP_DAC_READ_SEARCH")

    @property
    def size(self) -> int:
        """Bytes of all users: no less than what still exists."""
        return self._size - self.pool.free

    def get_charge(self, peer: ClientProcess) -> Charge:
        """The charge of a client's user. For root with its capabilities only the limit of all holds."""
        is_outside = self.group is not None and not self.group.has_process(peer.pid)
        key = (peer.uid, peer.is_unlimited, is_outside)
        charge = self._users.get(key)
        if charge is None:
            limit = inf if peer.is_unlimited else self._limit
            charge = self._users[key] = Charge(limit, self, is_outside=is_outside)
            charge.is_slow = key[:2] in self._slow
        return charge

    def mark_slow(self, slow: Charge) -> None:
        """Let nobody else wait for the memory of that user from now on, also when it connects again."""
        slow.is_slow = True
        self._slow |= {key[:2] for key, charge in list(self._users.items()) if charge is slow}

    def is_alarmed(self) -> bool:
        """Whether the daemon's group pays for much more shared memory than was counted, as of some milliseconds ago.

        A client achieves that by punching holes after the daemon looked and before it copied.
        """
        now = time.monotonic()
        if self.group is not None and now >= self._next_watch:
            self._next_watch = now + WATCH_SECONDS
            self._is_alarmed = self.group.shared_size() > self._own_size() + self.size + self._limit
        return self._is_alarmed

    def recount(self) -> None:
        for charge in list(self.holders):
            charge.recount()
