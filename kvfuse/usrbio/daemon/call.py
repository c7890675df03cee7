"""Operations of a ring: an entry as it was submitted, a call that the event loop does, and what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt
import trio

from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.doorman import Doorman
from kvfuse.usrbio.daemon.interpreter import Interpreter, User
from kvfuse.usrbio.daemon.registry import Namespace, OpenFile

PIECE = 4 << 20
"""Bytes that are read at once into memory of the daemon."""


class Entry(NamedTuple):
    """One SQE; see `wire.SQE`."""

    op: int
    priority: int
    flags: int
    handle: int
    iov: int
    key_length: int
    offset: int
    iov_offset: int
    length: int
    key_offset: int
    user_data: int
    timeout_us: int
    reserved: int


class Answer(NamedTuple):
    """What a completion says; see `wire.CQE`."""

    result: int
    offset: int = 0
    arena: int = 0
    pin: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A checked operation that the event loop does. It ends once: `Ring.complete` says whether it was the end."""

    entry: Entry
    deadline: float
    """monotonic seconds; inf: none"""
    file: OpenFile | None = None
    namespace: Namespace | None = None
    iov: Iov | None = None
    names: Sequence[bytes] = ()
    """file names of the keys"""
    data: Any = None
    """PUT, WRITE: a copy of the bytes"""
    size: int = 0
    """what it holds of its connection's share of memory, until its task has ended"""
    weight: int = 0
    """of its user's calls under way; as its size"""
    busy: bool = False
    """the ring thread is at it"""
    doom: Callable[[], None] | None = None
    """what gives it up as soon as the ring thread is not at it any more"""
    ended: bool = False


class Done(NamedTuple):
    """A call that changed something, and what that was."""

    call: Call
    result: int
    content: int = 0
    """inode whose bytes changed"""
    directory: int = 0
    """inode of the directory whose names changed"""
    names: Sequence[tuple[bytes, int]] = ()
    """names, and the inodes they meant before; 0: nothing"""
    found: Sequence[bool] | None = None
    """of a call with many keys: the answer for each"""


class Refused(Exception):
    """An entry that is answered with this errno and nothing else."""

    def __init__(self, number: int) -> None:
        self.number = number


class Short(Exception):
    """There is no memory for an entry now: it has to wait."""


class Ring(Protocol):
    """A ring's thread, as those see it that serve its entries and do its calls.

    `run_in_turn`, `complete` and `nudge` are for any thread, all else for this one.
    """

    def run_in_turn(self, job: Callable[[], None]) -> bool:
        """Have the ring's thread call ``job``, which waits for nothing, in its turn. False if the thread has ended."""

    def complete(self, call: Call, result: int, offset: int = 0, arena: int = 0, pin: int = 0) -> bool:
        """End a call, once. False when it had ended before: nobody hears of what was done."""

    def is_wanted(self) -> bool:
        """Somebody else is to work before the next entry."""

    def pause(self) -> None:
        """Let others work, if they are to."""

    def copying(self) -> AbstractContextManager[None]:
        """Others may work during this large copy."""

    def post(self, user_data: npt.ArrayLike, results: npt.ArrayLike) -> None:
        """Post many completions: their numbers, and their results."""

    def publish(self, packed: bytes, count: int) -> None:
        """Post completions that are packed already."""

    def pass_over(self) -> None:
        """An entry that was taken has no completion."""

    def withdraw(self, user_data: int) -> bool:
        """End an entry that still waits for its turn with -ECANCELED; False if there is none."""

    def nudge(self) -> None:
        """Have the thread look again at what waits. Any thread."""

    def attempt(self, call: Call, attempt: Callable[[], bool]) -> bool:
        """Keep others from ending the call meanwhile. True when it has ended, or nobody waits for it any more."""

    def write_if_wanted(self, call: Call, write: Callable[[], None]) -> bool:
        """Write into the client's memory, unless the call has ended. Never later than its completion."""


R_contra = TypeVar("R_contra", contravariant=True)
"""the rings' threads"""


class Tables(Protocol[R_contra]):
    """What a ring's thread asks of its connection: what is registered, and what the event loop does for it."""

    files: dict[int, OpenFile]
    iovs: dict[int, Iov]
    namespaces: dict[int, Namespace]
    share: Share
    doorman: Doorman
    interpreter: Interpreter
    user: User
    """whose turns the rings have"""

    def start(self, ring: R_contra, calls: list[Call]) -> None:
        """In the event loop: do these calls. Called from the ring thread."""

    def cancel(self, ring: R_contra, call: Call) -> None:
        """In the event loop: end the call that ``call`` wants to cancel."""

    def pin(self, block: Any) -> int:
        """Hold a block of the tier until `unpin`; 0, and it is not held, where that are too many. Any thread."""

    def unpin(self, pin: int) -> None: ...
    def allocate(self, namespace: Namespace, size: int) -> Any:
        """A block of the tier for a new file of the namespace, or None; any thread."""

    def in_loop(self, function: Callable[[], object]) -> None:
        """Call it in the event loop soon, unless that ends. Any thread."""

    def failed(self, reason: str) -> None:
        """The client broke its ring: disconnect it. Any thread."""


async def in_ring_thread(ring: Ring, job: Callable[[], bool]) -> bool:
    """What ``job`` says, called by the ring thread in its turn; False if that has ended."""
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()
    results: list[bool] = []

    def run() -> None:
        results.append(False)
        try:
            results[0] = job()
        finally:
            token.run_sync_soon(done.set)

    if not ring.run_in_turn(run):
        return False
    await done.wait()
    return results[0]
