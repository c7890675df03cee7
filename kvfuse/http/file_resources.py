"""Reads and writes whole files and parts of them: /v1/files/PATH.

A PUT writes a file of another name in the same folder and then renames it: readers find the former file or all of the
new one, and a PUT that is cut leaves the former. PATCH writes in place, as write(2) does.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Any

import trio

from kvfuse import errors
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.path_walk import READ, SEARCH, WRITE, FoundPath, PathWalk
from kvfuse.http.web_message import BYTES, Streamed, WebAnswer, WebError, WebRequest
from kvfuse.volume.api import FILE_SIZE_MAX, RENAME_NOREPLACE, Handle, RingApi

PIECE = 512 << 10
"""bytes of a file that are in memory for one download"""
UNFINISHED = b".kvfuse-put-"
"""how names of files begin that are being written"""
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\*|\d{1,19})")


@dataclass
class FileResources:
    """The handlers of /v1/files."""

    volume: RingApi
    drops: KernelDrops

    async def get(self, request: WebRequest) -> WebAnswer:
        """The bytes of a file, or a range of them; for HEAD the headers alone."""
        async with PathWalk(self.volume, request.caller, request.tokens) as walk:
            found = await walk.find(request.path)
            if not found.is_file:
                what = "a folder" if found.is_directory else "no regular file"
                raise errors.IsADirectory(f"/{os.fsdecode(b'/'.join(request.path))} is {what}")
            headers = (*describe(found), ("Accept-Ranges", "bytes"))
            if request.method == "HEAD":
                return WebAnswer(200, b"", BYTES, headers, size=found.size)
            walk.check(found, READ)
            if _is_same(request, found):
                return WebAnswer(304, headers=headers)
            handle = await self.volume.files.open(found.ino, os.O_RDONLY, walk.caller.make_caller())
        size = handle.size
        try:
            part = _find_range(request, found, size)
        except BaseException:
            await self._release(handle)
            raise
        start, end = part or (0, size)
        if part is not None:
            headers = (*headers, ("Content-Range", f"bytes {start}-{end - 1}/{size}"))
        body = Streamed(self._read(handle, start, end), end - start, partial(self._release, handle))
        return WebAnswer(206 if part else 200, body, BYTES, headers)

    async def _read(self, handle: Handle, start: int, end: int) -> AsyncGenerator[bytes | bytearray, None]:
        while start < end:
            piece = await self.volume.files.read(handle, start, min(PIECE, end - start))
            if not len(piece):
                raise errors.Stale("the file became shorter while it was sent")
            start += len(piece)
            yield bytes(piece) if isinstance(piece, memoryview) else piece

    async def _release(self, handle: Handle) -> None:
        with trio.CancelScope(shield=True):
            await self.volume.files.release(handle)

    # -- changes -------------------------------------------------------------------------------------

    async def put(self, request: WebRequest) -> WebAnswer:
        """Store a whole file in the place of the one that has the name, if any."""
        is_exclusive = request.headers.get("if-none-match") == "*"
        async with PathWalk(self.volume, request.caller, request.tokens) as walk:
            folder, name = await walk.find_parent(request.path)
            walk.check(folder, WRITE | SEARCH)
            old = await walk.step_if_there(folder, name)
            _check_match(request, old)
            if old is not None:
                self._check_replaced(walk, folder, old, is_exclusive=is_exclusive)
            mode = request.mode(0o644 if old is None else old.mode & 0o777)
            draft = UNFINISHED + secrets.token_hex(8).encode()
            caller = walk.caller.make_caller()
            handle, made = await self.volume.tree.create(folder.ino, draft, mode, caller, os.O_WRONLY | os.O_EXCL)
            walk.note_made(made.ino)
            is_named = False
            try:
                try:
                    await self._write_all(request, handle, 0)
                    if "fsync" in request.query:
                        await self.volume.files.fsync(handle)
                finally:
                    with trio.CancelScope(shield=True):
                        await self.volume.files.flush(handle)
                        await self.volume.files.release(handle)
                if "if-match" in request.headers:  # what took the time is over: look once more
                    _check_match(request, await walk.step_if_there(folder, name))
                flags = RENAME_NOREPLACE if is_exclusive else 0
                await self.volume.tree.rename(folder.ino, draft, folder.ino, name, flags)
                is_named = True
            except errors.Exists as error:
                raise WebError(412, f"{os.fsdecode(name)} exists") from error
            finally:
                if not is_named:
                    await self._remove_draft(folder.ino, draft)
            if "fsync" in request.query:
                await self.volume.inodes.fsync_directory(folder.ino)
            gone = [old.ino] if old is not None else []
            await self.drops.drop([(folder.ino, name), (folder.ino, draft)], attributes=gone)
            new = await walk.step(folder, name)
        return WebAnswer(201 if old is None else 204, headers=describe(new))

    def _check_replaced(self, walk: PathWalk, folder: FoundPath, old: FoundPath, *, is_exclusive: bool) -> None:
        if is_exclusive:
            raise WebError(412, f"{os.fsdecode(old.name)} exists")
        if old.is_directory:
            raise errors.IsADirectory(f"{os.fsdecode(old.name)} is a folder")
        walk.check_taking(folder, old)

    async def _remove_draft(self, folder: int, draft: bytes) -> None:
        with trio.CancelScope(shield=True):
            try:
                await self.volume.tree.unlink(folder, draft)
            except errors.KvfuseError:  # it is not there, or cannot be removed now: a later look at the folder finds it
                pass
            await self.drops.drop([(folder, draft)])

    async def patch(self, request: WebRequest) -> WebAnswer:
        """Write bytes into a file, in place; at its end with ``offset=end``."""
        async with PathWalk(self.volume, request.caller, request.tokens) as walk:
            found = await walk.find(request.path)
            if not found.is_file:
                raise errors.IsADirectory(f"{os.fsdecode(found.name)} is no regular file")
            walk.check(found, WRITE)
            _check_match(request, found)
            is_append = request.query.get("offset") == "end"
            offset = 0 if is_append else _find_offset(request)
            flags = os.O_WRONLY | (os.O_APPEND if is_append else 0)
            handle = await self.volume.files.open(found.ino, flags, walk.caller.make_caller())
            try:
                await self._write_all(request, handle, handle.size if is_append else offset)
                if "fsync" in request.query:
                    await self.volume.files.fsync(handle)
                await self.volume.files.flush(handle)
            finally:
                await self._release(handle)
                await self.drops.drop([(found.directory, found.name)], contents=[found.ino])
            new = await walk.step(await walk.find_folder(request.path[:-1]), request.path[-1])
        return WebAnswer(204, headers=describe(new))

    async def _write_all(self, request: WebRequest, handle: Any, offset: int) -> None:
        """Write the body from ``offset`` on. FileTooLarge, NoSpace."""
        if offset + (request.body.size or 0) > FILE_SIZE_MAX:
            raise errors.FileTooLarge(f"a file has {FILE_SIZE_MAX} bytes at most")
        files = self.volume.files
        async for piece in request.body.pieces():
            left = memoryview(piece)
            while left:
                if handle.appends:
                    offset = handle.size
                count = await files.write(handle, offset, left, by_kernel=True)
                if not count:
                    raise errors.NoSpace("there is no room for the rest of the file")
                offset, left = offset + count, left[count:]

    async def delete(self, request: WebRequest) -> WebAnswer:
        """Remove a file, or another name that is no folder's."""
        async with PathWalk(self.volume, request.caller, request.tokens) as walk:
            folder, name = await walk.find_parent(request.path)
            found = await walk.step(folder, name)
            if found.is_directory:
                raise errors.IsADirectory(f"{os.fsdecode(name)} is a folder: DELETE /v1/folders removes it")
            walk.check_taking(folder, found)
            _check_match(request, found)
            await self.volume.tree.unlink(folder.ino, name)
            await self.drops.drop([(folder.ino, name)], attributes=[found.ino])
        return WebAnswer(204)


def describe(found: FoundPath) -> tuple[tuple[str, str], ...]:
    """The headers that tell of a file."""
    return (
        ("ETag", found.etag),
        ("Last-Modified", formatdate(max(0, found.mtime) // 10**9, usegmt=True)),
        ("Kvfuse-Mode", f"{found.mode:o}"),
        ("Kvfuse-Owner", f"{found.uid}:{found.gid}"),
    )


def _is_same(request: WebRequest, found: FoundPath) -> bool:
    given = request.headers.get("if-none-match", "")
    return given == "*" or found.etag in [tag.strip().removeprefix("W/") for tag in given.split(",")]


def _check_match(request: WebRequest, found: FoundPath | None) -> None:
    """WebError 412: ``If-Match`` names other states of the file than the one it is in, or there is none (None)."""
    given = request.headers.get("if-match")
    if given is None:
        return
    tags = [tag.strip() for tag in given.split(",")]
    if found is None or ("*" not in tags and found.etag not in tags):
        state = f"has the ETag {found.etag}" if found is not None else "is not there"
        raise WebError(412, f"/{os.fsdecode(b'/'.join(request.path))} {state}, which is not what If-Match names")


def _find_range(request: WebRequest, found: FoundPath, size: int) -> tuple[int, int] | None:
    """(start, end) of the bytes that are wanted; None: all. WebError 416. What is none, or several, means all."""
    match = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None or match[0] == "bytes=-" or request.headers.get("if-range", found.etag) != found.etag:
        return None
    first, last = match[1], match[2]
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= size or (not first and not int(last)):
        raise WebError(416, f"the file has {size} bytes", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _find_offset(request: WebRequest) -> int:
    """Where a PATCH writes. WebError 400."""
    text = request.headers.get("content-range")
    if text is None:
        return request.number("offset", 0, FILE_SIZE_MAX)
    match = _CONTENT_RANGE.fullmatch(text)
    length = request.body.size
    if match is None or "offset" in request.query:
        raise WebError(400, "Content-Range is 'bytes FIRST-LAST/*', and takes the place of the parameter offset")
    if length is not None and int(match[2]) - int(match[1]) + 1 != length:
        raise WebError(400, f"Content-Range and the body, of {length} bytes, are of different lengths")
    return int(match[1])
