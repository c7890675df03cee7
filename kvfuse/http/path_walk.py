"""Finds what a path means for a caller, and checks permissions as the kernel does for a path.

Each folder of the path needs the right to search. Who shows the token of a namespace may do all in it, whatever modes
say. Symbolic links are followed within the volume; one that leads out of it leads nowhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvfuse import errors
from kvfuse.access.client_process import ClientProcess
from kvfuse.credentials import Capability
from kvfuse.http.web_message import WebError
from kvfuse.volume.api import NAME_MAX, ROOT_INODE, VIRTUAL_NAME, Attributes, RingApi
from kvfuse.volume.measures.gates import fits

READ, WRITE, SEARCH = 4, 2, 1
LINKS_MAX = 40
"""symbolic links of one path"""


@dataclass(frozen=True)
class FoundPath:
    """What a path means: a copy of the fields of a stat, and where it was found."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    atime: int
    mtime: int
    ctime: int
    has_token: bool
    """the caller showed the token of its namespace"""
    directory: int = ROOT_INODE
    name: bytes = b""

    @classmethod
    def copy(cls, one: Attributes, directory: int, name: bytes, *, has_token: bool) -> Self:
        times = one.atime, one.mtime, one.ctime
        return cls(one.ino, one.mode, one.nlink, one.uid, one.gid, one.size, *times, has_token, directory, name)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def etag(self) -> str:
        """Changes with the file and its content."""
        return f'"{self.ino:x}-{self.mtime:x}-{self.size:x}"'


class PathWalk:
    """The look-ups of one request. A context: at its end the volume forgets what was looked up."""

    def __init__(self, volume: RingApi, caller: ClientProcess, tokens: Sequence[str] = ()) -> None:
        self._volume = volume
        self.caller = caller
        self._tokens = tokens
        self._counted: list[int] = []
        self._links = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ino in self._counted:
            self._volume.tree.forget(ino, 1)
        self._counted.clear()

    @property
    def has_followed(self) -> bool:
        """It has followed a symbolic link."""
        return self._links > 0

    def note_made(self, ino: int) -> None:
        """An operation counted an inode as looked up."""
        self._counted.append(ino)

    def may(self, one: FoundPath, wanted: int) -> bool:
        return one.has_token or self.caller.may_access(one, wanted)

    def check(self, one: FoundPath, wanted: int) -> None:
        """PermissionDenied."""
        if not self.may(one, wanted):
            words = {READ: "read", WRITE: "write", SEARCH: "search", WRITE | SEARCH: "change names in"}
            what = os.fsdecode(one.name) or "/"
            raise errors.PermissionDenied(f"the user may not {words.get(wanted, 'use')} {what}")

    def check_owner(self, one: FoundPath) -> None:
        """NotPermitted, unless the caller owns it, or has CAP_FOWNER."""
        if self.caller.uid != one.uid and not self.caller.powers.has(Capability.FOWNER, one):
            raise errors.NotPermitted(f"{os.fsdecode(one.name) or '/'} is another user's")

    def check_taking(self, directory: FoundPath, one: FoundPath) -> None:
        """The caller may remove a name from its directory, or replace what it means. PermissionDenied, NotPermitted."""
        self.check(directory, WRITE | SEARCH)
        if not (directory.has_token or self.caller.may_take_name(directory, one)):
            raise errors.NotPermitted(f"{os.fsdecode(one.name)} is another user's, and its folder sticky")

    async def root(self) -> FoundPath:
        one = await self._volume.inodes.attributes(ROOT_INODE)
        return FoundPath.copy(one, ROOT_INODE, b"", has_token=await self._fits(ROOT_INODE))

    async def find(self, names: Sequence[bytes], *, follows: bool = True) -> FoundPath:
        """What a path means. NotFound, NotADirectory, PermissionDenied. ``follows``: a link at its end, too."""
        return await self._go([await self.root()], list(names), follows=follows)

    async def find_folder(self, names: Sequence[bytes]) -> FoundPath:
        """As `find`, of a folder."""
        found = await self.find(names)
        if not found.is_directory:
            raise errors.NotADirectory(f"/{os.fsdecode(b'/'.join(names))} is no folder")
        return found

    async def find_parent(self, names: Sequence[bytes]) -> tuple[FoundPath, bytes]:
        """(folder, name) of a path whose name may be absent. NotPermitted: the name is the daemon's own."""
        if not names:
            raise errors.NotPermitted("the root of the volume is always there")
        folder = await self.find_folder(names[:-1])
        if folder.ino == ROOT_INODE and names[-1] == VIRTUAL_NAME:
            raise errors.NotPermitted(f"{os.fsdecode(VIRTUAL_NAME)} is the daemon's own")
        if len(names[-1]) > NAME_MAX:
            raise errors.NameTooLong(f"a name has {NAME_MAX} bytes at most")
        return folder, names[-1]

    async def step(self, folder: FoundPath, name: bytes) -> FoundPath:
        """What a name of a folder means, which is no further followed. NotFound, NotADirectory, PermissionDenied."""
        if not folder.is_directory:
            raise errors.NotADirectory(f"{os.fsdecode(folder.name)} is no folder")
        self.check(folder, SEARCH)
        if len(name) > NAME_MAX:
            raise errors.NameTooLong(f"a name has {NAME_MAX} bytes at most")
        try:
            one = await self._volume.tree.lookup(folder.ino, name)
        except errors.NotFound:
            raise errors.NotFound(f"there is no {os.fsdecode(name)} in /{os.fsdecode(folder.name)}") from None
        self._counted.append(one.ino)
        found = FoundPath.copy(one, folder.ino, name, has_token=folder.has_token)
        if self._tokens and found.is_directory:
            return FoundPath.copy(one, folder.ino, name, has_token=await self._fits(one.ino))
        return found

    async def step_if_there(self, folder: FoundPath, name: bytes) -> FoundPath | None:
        """As `step`; None: there is no such name."""
        try:
            return await self.step(folder, name)
        except errors.NotFound:
            return None

    async def _go(self, above: list[FoundPath], names: list[bytes], *, follows: bool) -> FoundPath:
        """Walk on from the last of some folders, which are above each other."""
        while names:
            name = names.pop(0)
            if name in (b"", b"."):
                continue
            if name == b"..":
                self.check(above[-1], SEARCH)
                above[1:] = above[1:-1]
                continue
            found = await self.step(above[-1], name)
            if stat.S_ISLNK(found.mode) and (names or follows):
                self._links += 1
                target = await self._volume.inodes.read_symlink(found.ino)
                if self._links > LINKS_MAX or target.startswith(b"/"):
                    raise WebError(409, f"the link {os.fsdecode(name)} leads in a circle, or out of the volume")
                names[:0] = target.split(b"/")
                continue
            if names and not found.is_directory:
                raise errors.NotADirectory(f"{os.fsdecode(name)} is no folder")
            above.append(found)
        return above[-1]

    async def _fits(self, ino: int) -> bool:
        """Whether the caller shows the token of an inode's namespace."""
        if not self._tokens:
            return False
        gate = await self._volume.inodes.gate(ino)
        if gate is None or not gate.lock:
            return False
        return True in [fits(gate.lock, token) for token in self._tokens]  # takes the same time for any token
