"""How `hf3fs` reaches the daemon: one connection to each mount, shared by rings, memory and files of this process.

They outlive a connection. After a fork the child makes its own, and after the daemon was away so does everybody;
whatever is used then is registered again, through the descriptors that are kept here.

What is no longer used is given back to the daemon without a call for it. The garbage collector finds it, at any
instruction, even in the middle of a request on the same connection; so it only puts the object on a list, and the next
thread that may make requests works the list off.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from errno import EBADF, EPIPE
from typing import Generic, Protocol, TypeVar

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client import Client, connect


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T")
Thing = TypeVar("Thing", bound=Closable)


class MountLink:
    """This process's connection to a mount. It ends when nobody has it any more."""

    def __init__(self, mount_point: str) -> None:
        self.client = connect(mount_point)
        self.alive = True
        """False once the daemon was seen to be gone, and in the child of a fork"""
        self._requests = threading.Lock()
        self._unused: deque[Closable] = deque()
        weakref.finalize(self, self.client.close)

    def request(self, make: Callable[[Client], T]) -> T:
        """Do something that asks the daemon. Disconnected, OSError."""
        try:
            with self._requests:
                return make(self.client)
        except Disconnected:
            self.alive = False
            raise
        finally:
            self._close_unused()

    def drop(self, thing: Closable) -> None:
        """Close it, now or soon. May be called at any instruction."""
        self._unused.append(thing)
        self._close_unused()

    def _close_unused(self) -> None:
        """Unless a request is under way: its thread closes them after it."""
        while self._unused and self._requests.acquire(blocking=False):
            try:
                while self._unused:
                    with contextlib.suppress(OSError, Disconnected):  # a connection that ended took it along
                        self._unused.popleft().close()
            finally:
                self._requests.release()


class SharedThing(Generic[Thing]):
    """Memory or an open file: known by a descriptor, registered with each link that needs it.

    ``descriptor``: taken over. ``register``: what registers it. It lets go of everything when it dies, or by `close`.
    """

    def __init__(self, descriptor: int, register: Callable[[Client, int], Thing]) -> None:
        self._descriptor = descriptor
        self._register = register
        self._on: dict[MountLink, Thing] = {}
        self.close = weakref.finalize(self, _let_go, descriptor, self._on)

    def on(self, link: MountLink) -> Thing:
        """What it is registered as. OSError EBADF where it was closed, else as the daemon answers; Disconnected."""
        known = self._on.get(link)
        return link.request(lambda client: self._on_new(link, client)) if known is None else known

    def _on_new(self, link: MountLink, client: Client) -> Thing:
        if not self.close.alive:
            raise OSError(EBADF, "the descriptor is not registered any more")
        if link not in self._on:  # no other thread was faster
            for dead in [other for other in self._on if not other.alive]:
                del self._on[dead]
            self._on[link] = self._register(client, self._descriptor)
        return self._on[link]


def _let_go(descriptor: int, registered: Mapping[MountLink, Closable]) -> None:
    for link, thing in registered.items():
        link.drop(thing)
    with contextlib.suppress(OSError):  # of a file whose daemon died: it is closed all the same
        os.close(descriptor)


_links: weakref.WeakValueDictionary[str, MountLink] = weakref.WeakValueDictionary()
_links_lock = threading.Lock()


def with_link(mount_point: str, action: Callable[[MountLink], T]) -> T:
    """``action`` with the link to a mount; once more, with a new one, if the daemon of the present one is gone.

    BrokenPipeError where no daemon answers, FileNotFoundError where there is no mount.
    """
    with contextlib.suppress(Disconnected):
        return action(_link(mount_point))
    try:
        return action(_link(mount_point))
    except Disconnected as error:
        raise BrokenPipeError(EPIPE, str(error)) from error


def _link(mount_point: str) -> MountLink:
    with _links_lock:
        link = _links.get(mount_point)
        if link is None or not link.alive:
            link = _links[mount_point] = MountLink(mount_point)
        return link


def _leave_to_parent() -> None:
    """In the child of a fork: the connections are the parent's, and another thread may have had the lock."""
    global _links_lock
    _links_lock = threading.Lock()
    for link in list(_links.values()):
        link.alive = False
    _links.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
