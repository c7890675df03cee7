"""Folders, attributes, extended attributes, links and renames: all of a file but its bytes."""

from __future__ import annotations

import base64
import os
import stat
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

import trio

from kvfuse import errors
from kvfuse.credentials import Capability
from kvfuse.http.file_resources import describe
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.path_walk import READ, SEARCH, WRITE, FoundPath, PathWalk
from kvfuse.http.web_message import BYTES, WebAnswer, WebError, WebRequest, json_answer, refuse_unknown, split_target
from kvfuse.volume.api import FILE_SIZE_MAX, RENAME_EXCHANGE, RENAME_NOREPLACE, SYMLINK_MAX, Changes, RingApi

LISTED_MAX = 10_000
"""names of one page"""
LISTED_AT_ONCE = 256
XATTR_SIZE_MAX = 64 << 10
ID_MAX = (1 << 32) - 2
TIME_MAX = (1 << 63) - 1
"""nanoseconds"""
CHANGEABLE: dict[str, tuple[int, int]] = {
    "mode": (0, 0o7777), "uid": (0, ID_MAX), "gid": (0, ID_MAX), "size": (0, FILE_SIZE_MAX),
    "atime": (0, TIME_MAX), "mtime": (0, TIME_MAX),
}  # fmt: skip
"""what PATCH sets -> bounds"""
KINDS = {
    stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


@dataclass
class NameResources:
    """The handlers."""

    volume: RingApi
    drops: KernelDrops

    def _walk(self, request: WebRequest) -> PathWalk:
        return PathWalk(self.volume, request.caller, request.tokens)

    # -- folders -------------------------------------------------------------------------------------

    async def list_folder(self, request: WebRequest) -> WebAnswer:
        """A page of the names of a folder. ``next`` goes into ``after`` of the next request; none: it was the last."""
        limit = request.number("limit", 1, LISTED_MAX, 1000)
        after = request.number("after", 0, TIME_MAX, 0)
        async with self._walk(request) as walk:
            folder = await walk.find_folder(request.path)
            walk.check(folder, READ)
            may_stat = walk.may(folder, SEARCH)
            await self.volume.tree.open_directory(folder.ino)
            rows, is_last = list[dict[str, Any]](), False
            while not is_last and len(rows) < limit:
                count = min(LISTED_AT_ONCE, limit - len(rows))
                found = await self.volume.tree.list_directory(folder.ino, after, count)
                is_last = len(found) < count
                for name, after, one in found:  # noqa: B007
                    copy = FoundPath.copy(one, folder.ino, name, has_token=False)
                    rows.append(_row(name, _attributes(copy) if may_stat else {"type": _kind(copy)}))
        return json_answer({"entries": rows} | ({} if is_last else {"next": after}))

    async def make_folder(self, request: WebRequest) -> WebAnswer:
        """Make a folder."""
        async with self._walk(request) as walk:
            folder, name = await walk.find_parent(request.path)
            walk.check(folder, WRITE | SEARCH)
            made = await self.volume.tree.make_directory(
                folder.ino, name, request.mode(0o755), walk.caller.make_caller()
            )
            walk.note_made(made.ino)
            await self.drops.drop([(folder.ino, name)])
        return WebAnswer(201)

    async def remove_folder(self, request: WebRequest) -> WebAnswer:
        """Remove an empty folder."""
        async with self._walk(request) as walk:
            folder, name = await walk.find_parent(request.path)
            walk.check_taking(folder, await walk.step(folder, name))
            await self.volume.tree.remove_directory(folder.ino, name)
            await self.drops.drop([(folder.ino, name)])
        return WebAnswer(204)

    # -- attributes ----------------------------------------------------------------------------------

    async def get_attributes(self, request: WebRequest) -> WebAnswer:
        """The fields of a stat; of a symbolic link itself with ``nofollow``."""
        async with self._walk(request) as walk:
            found = await walk.find(request.path, follows="nofollow" not in request.query)
            content = _attributes(found)
            if stat.S_ISLNK(found.mode):
                content["target"] = os.fsdecode(await self.volume.inodes.read_symlink(found.ino))
        return json_answer(content, headers=(("ETag", found.etag),))

    async def set_attributes(self, request: WebRequest) -> WebAnswer:
        """Set some of mode, uid, gid, size, atime and mtime (nanoseconds)."""
        given = await request.read_json()
        refuse_unknown(given, CHANGEABLE, "attribute")
        for name, value in given.items():
            least, most = CHANGEABLE[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise WebError(400, f"{name} is to be a whole number from {least} to {most}")
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            self._check_change(walk, found, given)
            if "size" in given and not found.is_file:
                raise errors.IsADirectory(f"{os.fsdecode(found.name)} is no regular file")
            caller = walk.caller.make_caller()
            changed = await self.volume.inodes.set_attributes(found.ino, Changes(**given), caller)
            content = _attributes(FoundPath.copy(changed, found.directory, found.name, has_token=found.has_token))
            await self.drops.drop([(found.directory, found.name)] if found.name else [], contents=[found.ino])
        return json_answer(content)

    def _check_change(self, walk: PathWalk, found: FoundPath, given: dict[str, Any]) -> None:
        """As the kernel does. NotPermitted, PermissionDenied."""
        powers = walk.caller.powers
        if "size" in given:
            walk.check(found, WRITE)
        if given.keys() & {"mode", "atime", "mtime"}:
            walk.check_owner(found)
        if "uid" in given and not powers.has(Capability.CHOWN, found):
            walk.check_owner(found)
            if given["uid"] != found.uid:
                raise errors.NotPermitted("only root gives a file to another user")
        if "gid" in given and not powers.has(Capability.CHOWN, found):
            walk.check_owner(found)
            if given["gid"] not in (found.gid, walk.caller.gid, *walk.caller.groups):
                raise errors.NotPermitted(f"the user is not in the group {given['gid']}")

    async def get_xattrs(self, request: WebRequest) -> WebAnswer:
        """The value of one extended attribute, ``name``; without a name all, in base64."""
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            if (name := request.query.get("name")) is not None:
                self._check_xattr(walk, found, name, READ)
                return WebAnswer(200, await self.volume.inodes.get_xattr(found.ino, os.fsencode(name)), BYTES)
            walk.check(found, READ)
            content = {}
            for one in await self.volume.inodes.list_xattrs(found.ino):
                if one.startswith(b"user."):
                    value = await self.volume.inodes.get_xattr(found.ino, one)
                    content[os.fsdecode(one)] = base64.b64encode(value).decode()
        return json_answer(content)

    async def set_xattr(self, request: WebRequest) -> WebAnswer:
        """Set an extended attribute to the body."""
        value, name = await request.body.read_all(XATTR_SIZE_MAX), request.query["name"]
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            self._check_xattr(walk, found, name, WRITE)
            caller = walk.caller.make_caller()
            await self.volume.inodes.set_xattr(found.ino, os.fsencode(name), value, caller)
            await self._xattr_changed(found)
        return WebAnswer(204)

    async def remove_xattr(self, request: WebRequest) -> WebAnswer:
        """Remove an extended attribute."""
        name = request.query["name"]
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            self._check_xattr(walk, found, name, WRITE)
            caller = walk.caller.make_caller()
            await self.volume.inodes.remove_xattr(found.ino, os.fsencode(name), caller)
            await self._xattr_changed(found)
        return WebAnswer(204)

    async def _xattr_changed(self, found: FoundPath) -> None:
        """What was a block may be a file of another number now."""
        names = [(found.directory, found.name)] if found.name else []
        await self.drops.drop(names, attributes=[found.ino])

    def _check_xattr(self, walk: PathWalk, found: FoundPath, name: str, wanted: int) -> None:
        """Only users' attributes of files and folders. NotPermitted, PermissionDenied, Unsupported."""
        if not name.startswith("user.") or "\0" in name:
            raise errors.Unsupported(f"{name!r}: attributes whose names begin with 'user.' are offered")
        if not (found.is_file or found.is_directory):
            raise errors.NotPermitted("only files and folders have attributes of users")
        if wanted == WRITE and found.is_directory and found.mode & stat.S_ISVTX:
            walk.check_owner(found)
        walk.check(found, wanted)

    # -- names ---------------------------------------------------------------------------------------

    async def rename(self, request: WebRequest) -> WebAnswer:
        """Give a file or folder the path ``to``, also in the place of what has it."""
        target, _ = split_target(os.fsencode(_as_target(request.query["to"])))
        how = request.query.get("how", "replace")
        flags = {"replace": 0, "new": RENAME_NOREPLACE, "exchange": RENAME_EXCHANGE}[how]
        async with self._walk(request) as walk:
            old_folder, old = await walk.find_parent(request.path)
            new_folder, new = await walk.find_parent(target)
            found = await walk.step(old_folder, old)
            walk.check_taking(old_folder, found)
            there = await walk.step_if_there(new_folder, new)
            if there is None:
                walk.check(new_folder, WRITE | SEARCH)
            else:
                walk.check_taking(new_folder, there)
            for one in (found, there):  # its name ".." changes
                if one is not None and one.is_directory and old_folder.ino != new_folder.ino:
                    walk.check(one, WRITE)
            await self.volume.tree.rename(old_folder.ino, old, new_folder.ino, new, flags)
            gone = [there.ino] if there is not None else []
            await self.drops.drop([(old_folder.ino, old), (new_folder.ino, new)], attributes=[found.ino, *gone])
        return WebAnswer(204)

    async def link(self, request: WebRequest) -> WebAnswer:
        """Give a file one more name: the path ``to``."""
        target, _ = split_target(os.fsencode(_as_target(request.query["to"])))
        async with self._walk(request) as walk:
            found = await walk.find(request.path, follows=False)
            if found.is_directory:
                raise errors.NotPermitted(f"{os.fsdecode(found.name)} is a folder: it has one name")
            if not walk.may(found, READ | WRITE):
                walk.check_owner(found)
            folder, name = await walk.find_parent(target)
            walk.check(folder, WRITE | SEARCH)
            made = await self.volume.tree.link(found.ino, folder.ino, name)
            walk.note_made(made.ino)
            names = [(folder.ino, name), (found.directory, found.name)]
            await self.drops.drop(names, attributes=[found.ino, made.ino])
        return WebAnswer(201)

    async def make_symlink(self, request: WebRequest) -> WebAnswer:
        """Make a symbolic link to the body."""
        target = await request.body.read_all(SYMLINK_MAX)
        if not target or b"\0" in target:
            raise WebError(400, "the body is to be the path that the link leads to")
        async with self._walk(request) as walk:
            folder, name = await walk.find_parent(request.path)
            walk.check(folder, WRITE | SEARCH)
            made = await self.volume.tree.make_symlink(folder.ino, name, target, walk.caller.make_caller())
            walk.note_made(made.ino)
            await self.drops.drop([(folder.ino, name)])
        return WebAnswer(201)

    async def sync(self, request: WebRequest) -> WebAnswer:
        """Answer when a file, or the names of a folder, survive a loss of power."""
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            walk.check(found, WRITE if not walk.may(found, READ) else READ)
            if found.is_directory:
                await self.volume.inodes.fsync_directory(found.ino)
                return WebAnswer(204)
            if not found.is_file:
                raise errors.InvalidArgument(f"{os.fsdecode(found.name)} has no bytes")
            handle = await self.volume.files.open(found.ino, os.O_RDONLY, walk.caller.make_caller())
            try:
                await self.volume.files.fsync(handle)
            finally:
                with trio.CancelScope(shield=True):
                    await self.volume.files.release(handle)
        return WebAnswer(204, headers=describe(found))


def _as_target(path: str) -> str:
    """A path of the query, which is decoded already, as a target of a request. WebError 400."""
    if not path.startswith("/"):
        raise WebError(400, f"to={path!r} is no path: it begins with a slash, the root of the volume")
    return quote_from_bytes(os.fsencode(path))


def _kind(found: FoundPath) -> str:
    return KINDS.get(stat.S_IFMT(found.mode), "other")


def _attributes(found: FoundPath) -> dict[str, Any]:
    return {
        "type": _kind(found), "mode": found.mode & 0o7777, "size": found.size, "uid": found.uid, "gid": found.gid,
        "nlink": found.nlink, "ino": found.ino, "atime": found.atime, "mtime": found.mtime, "ctime": found.ctime,
        "etag": found.etag,
    }  # fmt: skip


def _row(name: bytes, attributes: dict[str, Any]) -> dict[str, Any]:
    """``href``: the name as it stands in a path, whatever bytes it has."""
    return {"name": name.decode("utf-8", "replace"), "href": quote_from_bytes(name, ""), **attributes}
