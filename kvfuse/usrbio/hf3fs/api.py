"""3FS's ring calls over a kvfuse mount: what engines import as ``hf3fs_fuse.io`` (the distribution compat/hf3fs-fuse).

    shm = multiprocessing.shared_memory.SharedMemory(size=1 << 20, create=True)
    iov = make_iovec(shm, "/mnt/kv")
    ring = make_ioring("/mnt/kv", 8)
    register_fd(fd)
    ring.prepare(iov[:4096], True, fd, 0)
    (done,) = ring.submit().wait(min_results=1)    # the slice; done.result is its number of bytes, or -errno

Names, arguments, defaults and errors are 3FS's. Where this differs it promises more:

* Slices come back in the order of their submission, whatever order they end in, so what `ioring.wait` gives
  can be matched by position, also when a timeout makes it short.
* What a timed-out wait left behind comes back by the next one, unless something new is prepared in between. That gives
  it up: it is cancelled and never comes back, and what is new begins when the daemon has let go of its memory.
* Hints how a daemon should batch (``io_depth``, a ring's ``timeout`` in ms) or place memory (``block_size``, ``numa``)
  are taken and have no effect: operations begin as they are submitted.

Memory and files are registered with each connection that needs them. So everything goes on working in the child of
a fork, which gets a connection of its own, and for files that are opened when the daemon is back after a crash.
"""

from __future__ import annotations

import fcntl
import multiprocessing.shared_memory  # engines reach SharedMemory through this import
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from errno import EBADF, EINVAL, EOPNOTSUPP, EPIPE

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import Client, Priority
from kvfuse.usrbio.client.iov import Iov, new_memory
from kvfuse.usrbio.client.session import find_mount
from kvfuse.usrbio.hf3fs.mount_link import SharedThing, with_link
from kvfuse.usrbio.hf3fs.ring import RegisteredDescriptor, ioring, registered
from kvfuse.usrbio.hf3fs.slices import iovec

__all__ = [
    "IorPriority",
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "hardlink",
    "ioring",
    "iovec",
    "make_ioring",
    "make_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
]

SHARED_MEMORY_FOLDER = "/dev/shm"
FORBID_READ_HOLES = 2
"""flag of a ring: holes are errors"""
ZEROS_SIZE = 1 << 20


class IorPriority:
    """Of a ring: its operations go before, or after, those of others."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


# -- files ------------------------------------------------------------------------------------------


def extract_mount_point(path: str | os.PathLike[str]) -> str | None:
    """The mount that ``path`` lies in, symlinks followed: of a mount, itself. None: there is none.

    BrokenPipeError where its daemon is gone.
    """
    try:
        return str(find_mount(os.path.realpath(path)))
    except FileNotFoundError:
        return None
    except Disconnected as error:
        raise BrokenPipeError(EPIPE, str(error)) from error


def register_fd(fd: int, flags: int = 0) -> None:
    """Let rings use an open file, until `deregister_fd`; it may be renamed or unlinked meanwhile. ``flags``: none yet.

    OSError: EBADF for what is no open file of a mount, EINVAL for a number that is registered. BrokenPipeError.
    """
    mode = fcntl.fcntl(fd, fcntl.F_GETFL)
    if fd in registered:
        raise OSError(EINVAL, f"descriptor {fd} is registered already")
    access = {os.O_RDONLY: "r", os.O_WRONLY: "w"}.get(mode & os.O_ACCMODE, "rw")
    mount_point = extract_mount_point(os.readlink(f"/proc/self/fd/{fd}"))
    if mount_point is None or os.stat(mount_point).st_dev != os.fstat(fd).st_dev:
        raise OSError(EBADF, f"descriptor {fd} is not one of a file in a kvfuse mount")
    file = SharedThing(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), lambda client, own: client.file(own, access))
    with_link(mount_point, file.on)
    registered[fd] = RegisteredDescriptor(file, "r" in access, "w" in access)


def deregister_fd(fd: int) -> None:
    """Before the descriptor is closed. One that is not registered is ignored."""
    known = registered.pop(fd, None)
    if known is not None:
        known.file.close()


def force_fsync(fd: int) -> int:
    """The file's bytes and size are durable, and what stat shows is true. 0. OSError."""
    os.fsync(fd)
    return 0


def hardlink(target: str | os.PathLike[str], link_name: str | os.PathLike[str]) -> None:
    """Another name for a file; a symlink as ``target`` is followed. OSError."""
    os.link(os.path.realpath(target), link_name)


def punch_hole(
    filename: str | os.PathLike[str] | int, start: Sequence[int], end: Sequence[int], flags: int = 0
) -> None:
    """Each range from ``start`` to before ``end`` reads as zeros; the size stays. The space is not given back.

    ``filename``: a path, or a descriptor open for writing. RuntimeError for lists of different lengths, OSError.
    """
    if len(start) != len(end):
        raise RuntimeError(f"{len(start)} starts and {len(end)} ends")
    fd = filename if isinstance(filename, int) else os.open(filename, os.O_RDWR | os.O_CLOEXEC)
    zeros = memoryview(bytes(ZEROS_SIZE))
    try:
        size = os.fstat(fd).st_size
        for begin, stop in zip(start, end, strict=True):
            offset = begin
            while offset < min(stop, size):
                offset += os.pwrite(fd, zeros[: min(stop, size) - offset], offset)
    finally:
        if fd is not filename:
            os.close(fd)


# -- memory and rings -------------------------------------------------------------------------------


def make_iovec(
    shm: multiprocessing.shared_memory.SharedMemory, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
) -> iovec:
    """Let rings of a mount use shared memory, which from here on may be unlinked and closed. OSError.

    ``block_size``, ``numa``: see above.
    """
    name = os.path.join(SHARED_MEMORY_FOLDER, shm.name.lstrip("/"))
    return _make_iovec(os.open(name, os.O_RDWR | os.O_CLOEXEC), hf3fs_mount_point)


def _make_iovec(descriptor: int, mount_point: str) -> iovec:
    """Takes the descriptor over."""
    memory = SharedThing[Iov](descriptor, Client.wrap)
    return iovec.of(with_link(mount_point, memory.on).array, memory)


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    """A ring of ``entries`` reads or writes. ``priority``: see `IorPriority`; the other arguments: see above.

    OSError: EINVAL, EOPNOTSUPP (``flags`` that make holes errors), and as `register_fd`.
    """
    if entries <= 0 or (timeout or 0) < 0:
        raise OSError(EINVAL, f"a ring of {entries} entries with the timeout {timeout}")
    if flags & FORBID_READ_HOLES:
        raise OSError(EOPNOTSUPP, "holes are read as zeros: a ring cannot report them")
    wanted = priority or IorPriority.NORMAL
    rank = Priority.HIGH if wanted < 0 else Priority.LOW if wanted else Priority.NORMAL
    return ioring(hf3fs_mount_point, entries, for_read, rank)


# -- a whole file -----------------------------------------------------------------------------------


def read_file(
    fn: str | os.PathLike[str],
    hf3fs_mount_point: str | None = None,
    block_size: int = 1 << 30,
    off: int = 0,
    priority: int | None = None,
    cb: Callable[[memoryview, int], object] | None = None,
) -> bytes | None:
    """The file's bytes from ``off`` on. With ``cb``: None; each block is given to ``cb(block, offset)`` instead.

    What ``cb`` answers: an int, where to read next; something true, to end; else the next block follows. The block is
    overwritten by the next. OSError.
    """
    blocks: list[bytes] = []
    take = cb or (lambda data, _: blocks.append(bytes(data)))
    with _opened(fn) as fd:
        mount_point = hf3fs_mount_point or extract_mount_point(fn)
        assert mount_point is not None, "register_fd found it"
        ring = make_ioring(mount_point, 1, priority=priority)
        _, memory = new_memory(max(min(block_size, os.fstat(fd).st_size), 1))
        block = _make_iovec(memory.descriptor, mount_point)
        while True:
            (done,) = ring.prepare(block, True, fd, off).submit().wait(min_results=1)
            if done.result < 0:
                raise OSError(-done.result, os.strerror(-done.result))
            data = block.data[: done.result]
            answer = take(data, off) if data else None
            if type(answer) is int:
                off = answer
            elif answer or len(data) < len(block):
                return b"".join(blocks) if cb is None else None
            else:
                off += len(data)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor that rings may use."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        register_fd(fd)
        try:
            yield fd
        finally:
            deregister_fd(fd)
    finally:
        os.close(fd)
