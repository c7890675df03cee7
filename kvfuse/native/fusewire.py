"""Between pyfuse3 and the kernel: what libfuse of this machine does not say, or says too slowly.

``_fusewire.c`` has some of libfuse's functions, and is loaded before pyfuse3: so the dynamic linker finds it first.
With it the daemon

* answers INIT with flags of its own: requests in the background, no guesses of the kernel's when content changed (it is
  told), mappings of files that are open with O_DIRECT;
* says of each open file whether its closes are to be announced (`NO_FLUSH`), and lets its direct writes go on side by
  side (`DIRECT`): `marks` go with the handle as far as ``_fusewire``;
* lets a daemon take over a connection that another one began (`replay`): libfuse gets the kernel's INIT, which came
  once, from here, and its answer goes nowhere;
* reads each request into the same memory, of which every page is there, and populates the pages of an answer: the
  kernel fails a request with EIO whose copy meets a page fault in a daemon that is being killed;
* answers in C what the kernel asks before each write: whether the file has ``security.capability``. A file that was
  made here and never got an attribute has none. On shared volumes that holds in relaxed folders, until this host hears
  that another one changed the file (`forget`);
* has Python answer requests that need not wait without a task, a context and a reply object for each
  (`answer_at_once`): most lookups, forgets, closes;
* has threads that read requests, and answer in C what is asked most of blocks (`use`); the event loop gets the others;
* gets LSEEK from the kernel (`sought`), which pyfuse3 does not know: the handler of GETXATTR is called for it.

Without it - it was not built, or pyfuse3 was there first - everything works, with more requests.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

NO_FLUSH = 1 << 63
DIRECT = 1 << 62
"""marks of handles"""
NO_REQUEST = 0, False
BACKGROUND = 64
"""requests that nobody waits for - read-ahead, asynchronous I/O - at a time; the kernel's own bound is 12"""

AUTO_INVAL_DATA = 1 << 12
"""flags of INIT: the kernel drops its pages of a file whose mtime it finds changed, be it by its own writes"""
DIRECT_IO_ALLOW_MMAP = 1 << 36

NOTIFY_RESEND = struct.pack("<IiQ", 16, 7, 0)
"""a message of the daemon's own accord, to the kernel: send again what nobody answered; since Linux 6.9"""
NOTIFY_INC_EPOCH = struct.pack("<IiQ", 16, 8, 0)
"""likewise: ask again what each name means before it is used; since Linux 6.16"""
DIRECT_KERNEL = 6, 18
"""the first one on which it was seen that a page read beside a direct write does not stay in the cache"""


def kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def _load() -> ModuleType | None:
    """``_fusewire``, before pyfuse3 and for all to see."""
    if "pyfuse3" in sys.modules:
        return None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        from kvfuse.native import _fusewire as module
    except ImportError:  # no compiler, or no headers of libfuse, at the installation
        return None
    finally:
        sys.setdlopenflags(flags)
    return module


_wire = _load()
is_there = _wire is not None
_writes_side_by_side = kernel() >= DIRECT_KERNEL


def marks(*, direct: bool, close_is_awaited: bool) -> int:
    """What a handle carries to `_fusewire`, which takes it off. 0 where that is not there."""
    if _wire is None:
        return 0
    return (DIRECT if direct and _writes_side_by_side else 0) | (0 if close_is_awaited else NO_FLUSH)


def configure(*, is_shared: bool) -> None:
    """Before a mount. ``is_shared``: other hosts may give attributes to files that were made here, which counts at once
    in folders where closes are awaited."""
    let_readers_go_on()
    if _wire is not None:
        _wire.configure(
            wanted=DIRECT_IO_ALLOW_MMAP, unwanted=AUTO_INVAL_DATA, background=BACKGROUND, knows_plain=not is_shared
        )


_way: tuple[object, int, Callable[[], None]] | None = None
"""what readers answer by, how many of them there are to be, and what takes over from them"""
_are_reading = _are_held = False
_connection = -1
"""descriptor that they read"""


def use(way: object, count: int, take_over: Callable[[], None]) -> None:
    """Have ``count`` threads read requests from the next `source` on.

    ``way``: a `Door`'s; they answer some by it. ``take_over``: called before a request is handled that is about
    something which was answered by that way alone so far.
    """
    global _way
    if _wire is not None and count:
        _way = way, count, take_over


def source(descriptor: int) -> int:
    """What is readable once there is a request for the event loop. ``descriptor``: the connection, not blocking."""
    global _connection
    if _wire is None or _way is None:
        return descriptor
    _connection = descriptor
    _start_readers()
    return int(_wire.source(descriptor))


def await_request(descriptor: int, seconds: float) -> bool:
    """Block this thread until ``descriptor`` is readable. False: it was not in time, or it is not known."""
    return _wire is not None and bool(_wire.await_request(descriptor, seconds))


def _start_readers() -> None:
    global _are_reading
    is_due = not (_are_reading or _are_held) and _connection >= 0
    if is_due and _wire is not None and _way is not None and _wire.connection() is not None:
        _are_reading = True
        way, count, take_over = _way
        _wire.start_readers(_connection, count, way, take_over)


def hold_readers() -> None:
    """Have no thread read requests for a while. What they have read is there."""
    global _are_reading, _are_held
    _are_held = True
    if _wire is not None and _are_reading:
        _wire.stop_readers()
        _are_reading = False


def let_readers_go_on() -> None:
    """At once: whoever waits for what they read hears of nothing else."""
    global _are_held
    _are_held = False
    _start_readers()


def are_queued() -> bool:
    """Whether readers have read requests that the event loop did not get yet."""
    return _wire is not None and bool(_wire.are_queued())


def end_readers() -> None:
    """Before what they answer by ends."""
    global _way, _connection
    hold_readers()
    if _wire is not None:
        _wire.end_way()
    _way, _connection = None, -1


def node() -> int:
    """The inode that the request which is being handled is about. As for `request`."""
    return _wire.node() if _wire is not None else 0


def answer_at_once(*functions: Callable[..., object]) -> None:
    """Have the event loop answer some requests without a task for each, by these functions; by none from now on.

    ``look_up(directory, name)`` and ``get_attributes(inode)`` return (attributes, None for an absent name; seconds for
    which the kernel may cache the name; and these), ``release(handle)`` returns True. A request for which they return
    None goes to pyfuse3. ``forget(inode, count)`` always does its work. None of them waits.
    """
    if _wire is not None:
        _wire.answer_at_once(*functions)


def connection() -> tuple[bytes, int] | None:
    """(INIT as the kernel sent it, descriptor) of the mount's connection. None: INIT did not come, or is not known."""
    return _wire.connection() if _wire is not None else None


def replay(init: bytes, descriptor: int) -> None:
    """After pyfuse3.init over a connection that another daemon began: go on where that one stopped.

    The kernel sends requests again that nobody answered, and asks for all names that it knows, which may not have been
    stored; unless it is too old for that. ValueError.
    """
    assert _wire is not None
    _wire.replay(init)
    for notice in (NOTIFY_INC_EPOCH, NOTIFY_RESEND):
        with suppress(OSError):
            os.write(descriptor, notice)


def forget(ino: int) -> None:
    """Another host changed the file: it may have attributes. With Python's lock held, as always: for any thread."""
    if _wire is not None:
        _wire.forget(ino)


def request() -> tuple[int, bool]:
    """(number of the request that is being handled, it was sent again), until its handler waits for something.

    (0, False) where that is not known.
    """
    return _wire.request() if _wire is not None else NO_REQUEST


def writes_back() -> bool:
    """The request that is being handled writes pages of a mapping back: by any handle for writing. As for `request`."""
    return _wire is not None and bool(_wire.writes_back())


def sought() -> tuple[int, bool] | None:
    """(offset, whether data is sought, or else a hole) of an LSEEK, if that is being handled. As for `request`.

    It is handled as a GETXATTR whose name says nothing: a program may ask for the same one. The answer is an offset
    of 8 bytes in the machine's order.
    """
    return _wire.sought() if _wire is not None else None


Profiled = tuple[int, int, int, int, int]
"""thread that asks, opcode, inode, bytes, when it was read in nanoseconds (0: nobody looked then)"""


def profile_requests(on: bool) -> None:
    """Count requests from now on, or no more: see `requestprofile.h`. MemoryError."""
    if _wire is not None:
        _wire.profile_requests(on)


def take_profile() -> bytes:
    """Rows of what was counted since the last call, as `profiling.COUNTED` has them."""
    return bytes(_wire.take_profile()) if _wire is not None else b""


def begin_profiled() -> Profiled | None:
    """The request that is being handled, for `end_profiled`. As for `request`."""
    return _wire.begin_profiled() if _wire is not None else None


def end_profiled(request: Profiled, has_failed: bool) -> None:
    """Count a request that was answered."""
    if _wire is not None:
        _wire.end_profiled(request, has_failed)


def counts() -> dict[str, int]:
    """``flags`` of INIT's answer; ``capability``: requests that were answered in C."""
    return dict(_wire.counts()) if _wire is not None else {}
