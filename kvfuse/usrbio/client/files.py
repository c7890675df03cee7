"""What the entries of a ring name by handle: files and namespaces. Registered with the daemon through a descriptor."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from errno import EEXIST, EINVAL, ENOENT, ENOTEMPTY, ESTALE
from pathlib import Path
from typing import Self

from kvfuse.usrbio.client.session import Session
from kvfuse.usrbio.protocol.wire import Access, Message, Request

MODES = {
    "r": (Access.READ, os.O_RDONLY),
    "w": (Access.WRITE, os.O_WRONLY),
    "rw": (Access.READ | Access.WRITE, os.O_RDWR),
}
"""mode of `Client.file` -> what is asked of the daemon, how a path is opened"""


SETTINGS = "user.kvfuse.namespace"
"""extended attribute of a folder that is a namespace"""


class Registered:
    """A file or folder of the mount that the daemon knows by ``handle``. Ends with `close`."""

    ADD: Request
    DROP: Request

    def __init__(self, path: str, open_flags: int, argument: int, forget: Callable[[Registered], None]) -> None:
        self.path = path
        """where it was when it was registered first"""
        self.handle = 0
        """the daemon's number for it; 0 while it is not registered: operations answer EBADF"""
        self.inode = 0
        self._open_flags = open_flags | os.O_CLOEXEC
        self._argument = argument
        self._forget = forget
        self._session: Session | None = None

    def register(self, session: Session, descriptor: int | None = None) -> None:
        """By an open descriptor, else by opening the path. OSError; FileNotFoundError if that is another inode now."""
        self.handle = 0
        for is_last in (descriptor is not None, True):
            opened = os.open(self.path, self._open_flags, 0o644) if descriptor is None else descriptor
            try:
                if self.inode not in (0, os.fstat(opened).st_ino):
                    raise FileNotFoundError(f"{self.path}: another file took the place of inode {self.inode}")
                reply, _ = session.request(self.ADD, self._argument, descriptors=[opened])
                break
            except OSError as error:
                if is_last or error.errno != ESTALE:  # what is opened may be a block, which loses its name
                    raise
            finally:
                if descriptor is None:
                    os.close(opened)
        self._session = session
        self.handle, self.inode = reply.values[:2]

    def register_again(self, session: Session) -> None:
        """After the daemon came back. What is gone keeps the handle 0."""
        self._open_flags &= ~os.O_CREAT
        try:
            self.register(session)
        except OSError:
            self.handle = 0

    def close(self) -> None:
        """The daemon lets go of it."""
        self._forget(self)
        handle, self.handle = self.handle, 0
        if handle and self._session is not None:
            self._session.drop(self.DROP, handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class File(Registered):
    """A regular file. Stays registered when its descriptor is closed, and when it is renamed."""

    ADD, DROP = Request.ADD_FILE, Request.DROP_FILE

    def __init__(
        self, target: int | str | os.PathLike[str], mode: str, forget: Callable[[Registered], None], *,
        once: bool = False,
    ) -> None:  # fmt: skip
        """Not registered yet. A path is opened for the mode, created where it may be written, and never truncated."""
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: it must be one of {', '.join(MODES)}")
        access, flags = MODES[mode]
        if isinstance(target, int):
            path = os.readlink(f"/proc/self/fd/{target}")
        else:
            path = os.path.abspath(target)
            flags |= os.O_CREAT if Access.WRITE in access else 0
        super().__init__(path, flags, access | Access.ONCE if once else access, forget)

    def register(self, session: Session, descriptor: int | None = None) -> None:
        """As `Registered.register`."""
        try:
            super().register(session, descriptor)
        except OSError as error:
            if error.errno != EINVAL or not self._argument & Access.ONCE:
                raise
            self._argument &= ~Access.ONCE  # an older daemon knows one way to read
            super().register(session, descriptor)


class Namespace(Registered):
    """A folder whose files are blocks, each called by its key (see `keys`)."""

    ADD, DROP = Request.OPEN_NAMESPACE, Request.CLOSE_NAMESPACE

    def __init__(
        self, path: Path, create: bool, mode: int, forget: Callable[[Registered], None], descriptor: str = ""
    ) -> None:
        """Not registered yet. ``create``: `make_cache`. ``mode``: permissions of new blocks.

        ``descriptor``: what they are, JSON; "": anything.
        """
        super().__init__(str(path), os.O_RDONLY | os.O_DIRECTORY, mode, forget)
        self.create = create
        self._descriptor = descriptor

    def register(self, session: Session, descriptor: int | None = None) -> None:
        """As `Registered.register`; but it is what the path names now, whichever inode that is."""
        self.handle = 0
        if self.create:
            make_cache(Path(self.path), is_own=self._descriptor != "")
        reply = register_folder(session, self.path, self._argument)
        if self._descriptor:
            session.request(Request.DESCRIBE, reply.values[0], text=self._descriptor)
        self._session = session
        self.handle, self.inode = reply.values[:2]


def register_folder(session: Session, path: str, mode: int) -> Message:
    """Have the daemon open a namespace; its reply. OSError; FileNotFoundError: it is none, or not for this client."""
    descriptor = _open_folder(path, session.has_tokens)
    try:
        return session.request(Request.OPEN_NAMESPACE, mode, descriptors=[descriptor])[0]
    except OSError as error:
        if error.errno != ESTALE:
            raise
        raise FileNotFoundError(ENOENT, f"{path} was removed, or this client has not the token that it needs") from None
    finally:
        os.close(descriptor)


def _open_folder(path: str, has_tokens: bool) -> int:
    """Who may not list a folder may yet have the token for it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        if not has_tokens:
            raise
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def make_cache(path: Path, *, is_own: bool = False) -> None:
    """Make a folder, unless it is there: a cache of its own, or (not ``is_own``) a part of the one that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        return
    if not is_own and _is_in_cache(path):
        return
    try:
        os.setxattr(path, SETTINGS, b"kind=cache")
    except OSError as error:
        if error.errno not in (ENOTEMPTY, EEXIST):  # somebody uses it already; another host has just made it one
            path.rmdir()
            raise


def _is_in_cache(path: Path) -> bool:
    for folder in path.resolve().parents:
        with suppress(OSError):  # it is no namespace, or not ours to read
            return b"kind=files" not in os.getxattr(folder, SETTINGS).split()
    return False
