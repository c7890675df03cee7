"""Operations of a ring: an entry as it was submitted, a call that the event loop does, and what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from kvfuse.usrbio.daemon.call_memory import Share
from kvfuse.usrbio.daemon.client_memory import Iov
from kvfuse.usrbio.daemon.doorman import Doorman
from kvfuse.usrbio.daemon.interpreter import User
from kvfuse.usrbio.daemon.pins import Pins
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
    """A checked operation that the event loop does. It ends once: see `Completions.complete`."""

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


R_contra = TypeVar("R_contra", contravariant=True)
"""the rings' threads"""


class Tables(Protocol[R_contra]):
    """What a ring's thread asks of its connection: what is registered, and what the event loop does for it."""

    @property
    def files(self) -> Mapping[int, OpenFile]: ...
    @property
    def iovs(self) -> Mapping[int, Iov]: ...
    @property
    def namespaces(self) -> Mapping[int, Namespace]: ...

    pins: Pins
    share: Share
    doorman: Doorman
    user: User
    """whose turns the rings have"""

    def start(self, ring: R_contra, calls: list[Call]) -> None:
        """In the event loop: do these calls. Called from the ring thread."""

    def cancel(self, ring: R_contra, call: Call) -> None:
        """In the event loop: end the call that ``call`` wants to cancel."""

    def allocate(self, namespace: Namespace, size: int) -> Any:
        """A block of the tier for a new file of the namespace, or None; any thread."""

    def in_loop(self, function: Callable[[], object]) -> None:
        """Call it in the event loop soon, unless that ends. Any thread."""

    def failed(self, reason: str) -> None:
        """The client broke its ring: disconnect it. Any thread."""
